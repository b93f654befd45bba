"""The neutral pair every dialect reads into and writes from."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastserve.tensor import Tensor


@dataclass(slots=True)
class InferRequest:
    """One request for one loaded version.

    `inputs` maps the model's own input names to tensors; with a batching model every tensor
    begins with the same number of rows. `outputs` names the wanted outputs, empty for all.
    `deadline_ns` is on the clock of time.monotonic_ns(), 0 for none.
    """

    inputs: dict[str, Tensor]
    outputs: tuple[str, ...] = ()
    request_id: str = ""
    priority: int = 0
    deadline_ns: int = 0
    parameters: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class InferResponse:
    """Outputs by the model's own names. Valid until `release()`; release exactly once."""

    outputs: dict[str, Tensor]
