from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS: dict[np.dtype[Any], int]

class SlabTensor:
    _name: str
    _kind: int
    _lent: bool
    def __init__(self, name: str, numpy_array: NDArray[Any]) -> None: ...
    def _hold(self, name: str, array: NDArray[Any], kind: int, lent: bool) -> None: ...
    def name(self) -> str: ...
    def triton_dtype(self) -> int: ...
    def shape(self) -> list[int]: ...
    def as_numpy(self) -> NDArray[Any]: ...
    def _own(self) -> NDArray[Any]: ...
    @property
    def raw(self) -> NDArray[Any]: ...

class Outputs:
    _tensors: list[Any]
    _error: Any
    _parameters: dict[str, Any] | None
    def __init__(self, output_tensors: Any = (), error: Any = None, parameters: Any = None) -> None: ...
    def output_tensors(self) -> list[Any]: ...
    def has_error(self) -> bool: ...
    def error(self) -> Any: ...

class WholeRequest:
    _request_id: str
    _correlation_id: int | str
    _timeout_us: int
    _priority: int
    _flags: int
    _model: str
    _version: int
    _parameters: dict[str, Any] | None
    _outputs: list[str]
    _inputs: dict[str, Any]
    _reply: Any
    def inputs(self) -> list[Any]: ...
    def input_by_name(self, name: str) -> Any: ...
    def request_id(self) -> str: ...
    def correlation_id(self) -> int | str: ...
    def flags(self) -> int: ...
    def requested_output_names(self) -> set[str]: ...

def get_input_tensor_by_name(inference_request: Any, name: str) -> Any: ...

class SlotRun:
    ring: Any
    codec: Any
    slot: int
    lent: list[tuple[int, list[Any]]]
    def __init__(self, ring: Any, codec: RequestCodecBase, slot: int, leases: int) -> None: ...
    def settle(self) -> None: ...

class OneReply:
    _batch: Any
    _row: int
    _sent: int
    decoupled: bool
    ended: bool
    wanted: list[str]
    def send(self, response: Any, final: bool) -> None: ...
    def hold(self) -> bool: ...
    def let_go(self) -> None: ...
    def _answer_slab(self, status: int, packed: tuple[Any, Any]) -> None: ...
    def end(self) -> None: ...

class Asked:
    request: Any
    reply: Any
    rows: int
    offset: int
    nbytes: int
    lent: list[Any]

class RequestCodecBase:
    dtypes: tuple[Any, ...]
    def __init__(
        self,
        memory: Any,
        *,
        worker: int,
        types: tuple[Any, ...],
        tables: tuple[Any, ...],
        model: tuple[str, int],
        names: tuple[list[str], list[str]],
        numbers: dict[str, int],
        optional: frozenset[str],
        odd_in: dict[str, Any],
        odd_out: dict[str, Any],
    ) -> None: ...
    def read_all(
        self,
        batch: SlotRun,
        leases: list[tuple[int, int, int, int]],
        reply_type: type[OneReply],
        decoupled: bool,
    ) -> list[Asked]: ...
    def answer_all(self, responses: Any, replies: list[Any]) -> None: ...
    def read(self, reply: OneReply, offset: int, nbytes: int, lent: list[Any]) -> Any: ...
