"""Plain Python objects as bytes that are safe to read: what the batching library sends to its worker.

Not pickle: reading never runs code, imports nothing a message names, and builds only the types below.
A dataclass is built of its fields, without a call of its methods, and only where its module has been
imported; a tensor of torch travels by its memory, without its graph, and arrives on the CPU.
Types are kept exactly (a tuple comes back as a tuple, numpy.float32 as numpy.float32); what cannot be
kept is refused with the place where it was found, never silently changed.

    decode(encode({"x": (1, {2}), "y": np.zeros(3)}))   == the same
    encode([0, {"x": Bar()}])   -> CannotTravel: value[1]['x']: objects of type foo.Bar cannot travel ...

The bytes are MessagePack, which knows neither tuples nor sets; so these are maps of one int key, the
code of the type. Real dicts are maps only when their keys are all str, so none can be mistaken:

    (1, 2)  ->  {TUPLE: [1, 2]}           np.zeros(3)  ->  {ARRAY: ["<f8", [3], Ext(BLOCK, 24 bytes)]}

A message that holds such a map is {MARKED: message}; one of only None, bool, int, float, str, bytes,
list and dict with str keys is bare and is read without a second pass. (Extension values as the marks
of tuples were tried: 500 ns each in reading, because msgspec calls back into Python.)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import date, datetime, timezone
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.msgpack import Ext

if TYPE_CHECKING:
    import numpy as np


MAX_DEPTH = 64  # containers within containers

SUPPORTED = (
    "None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, "
    "datetime and date, dataclasses, numpy arrays and numpy scalars of plain dtypes, dense tensors of torch"
)

TUPLE, SET, FROZENSET, DICT, BYTEARRAY, DATETIME, DATE, ARRAY, SCALAR, MARKED, DATACLASS, TORCH = range(1, 13)
MAIN, SCRIPT = "__main__", "__fastserve_main__"
"""Names of the module of a script: in the process that it started, and in its workers."""

# Extension values with content: ints beyond 64 bits, str that is not UTF-8, the memory of an array.
BIG_INT, SURROGATES, BLOCK = 32, 33, 34
_MARKED_HEAD = msgspec.msgpack.encode({MARKED: None})[:-1]
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})

_TORCH_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|complex(64|128)")
_DTYPE = re.compile(
    r"[<>|][biufc](1|2|4|8|16|32)|[<>|][SU][1-9][0-9]{0,8}|"
    r"[<>][Mm]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)

_write = msgspec.msgpack.Encoder().encode


class CannotTravel(TypeError):
    """An object of a type that is not in SUPPORTED, or nested too deep; the text says where it is."""


class Damaged(ValueError):
    """Bytes that encode() did not make."""


def encode(value: object) -> bytes:
    """Return the bytes of `value`. Raises CannotTravel. Arrays are copied once, into the bytes."""
    try:
        try:
            return _Layout(wide=False).encode(value)
        except (OverflowError, UnicodeEncodeError):  # rare enough that nobody should pay for looking first
            return _Layout(wide=True).encode(value)
    except _Stuck:
        raise CannotTravel(_describe(value)) from None


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the object encode() was given; nothing in it refers to `data`. Arrays are writable.

    Raises Damaged for anything else, whatever the bytes are.
    """
    head = bytes(memoryview(data)[: len(_MARKED_HEAD)])
    try:
        if head != _MARKED_HEAD:
            return _read_plain(data)
        return _build(_read_marked(data)[MARKED], MAX_DEPTH)
    except (ValueError, TypeError, OverflowError, RecursionError, LookupError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"not an encoded object: {error}") from None


class _Stuck(Exception):
    """An object that cannot travel. _describe finds it afterwards."""


class _Layout:
    """One object on its way to what MessagePack can hold. `wide` also looks at every int and str."""

    def __init__(self, *, wide: bool) -> None:
        self.wide = wide
        self.marked = wide
        self.leaves = _LEAVES - {int, str} if wide else _LEAVES
        self.is_leaf = self.leaves.issuperset

    def encode(self, value: object) -> bytes:
        laid = self.lay(value, MAX_DEPTH)
        return _write({MARKED: laid} if self.marked else laid)

    def lay(self, value: Any, room: int) -> Any:
        kind = type(value)
        if kind in self.leaves:
            return value
        if kind is list:
            return self.lay_all(value, room)
        if kind is dict:
            return self.lay_dict(value, room)
        self.marked = True
        if kind in _CODES:
            return {_CODES[kind]: self.lay_all(value, room)}
        if "__dataclass_fields__" in kind.__dict__:
            return {DATACLASS: [*_name_of(kind), self.lay_fields(value, room)]}
        return _lay_rare(value)

    def lay_fields(self, value: Any, room: int) -> dict[str, Any]:
        if room == 0:
            raise _Stuck
        names = [field.name for field in fields(value)]
        if not all(hasattr(value, name) for name in names) or vars_beyond(value, names):
            raise _Stuck
        return {name: self.lay(getattr(value, name), room - 1) for name in names}

    def lay_all(self, items: Any, room: int) -> list[Any] | tuple[Any, ...]:
        if room == 0:
            raise _Stuck
        if self.is_leaf(map(type, items)):
            return items if type(items) in _ARRAYS else list(items)
        lay, leaves, room = self.lay, self.leaves, room - 1
        return [item if type(item) in leaves else lay(item, room) for item in items]

    def lay_dict(self, value: dict[Any, Any], room: int) -> Any:
        if room == 0:
            raise _Stuck
        lay = self.lay
        if self.wide or not _ONLY_STR(map(type, value)):
            self.marked = True
            return {DICT: [lay(part, room - 1) for pair in value.items() for part in pair]}
        if self.is_leaf(map(type, value.values())):
            return value
        return {key: lay(item, room - 1) for key, item in value.items()}


_CODES: dict[type, int] = {tuple: TUPLE, set: SET, frozenset: FROZENSET}
_CONTAINERS = frozenset({*_CODES, list, dict})
_ARRAYS = frozenset({list, tuple})  # what msgspec writes as an array without help
_ONLY_STR = frozenset({str}).issuperset


def _lay_rare(value: Any) -> Any:
    kind = type(value)
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return Ext(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is str:
        return value if value.isascii() else Ext(SURROGATES, value.encode("utf-8", "surrogatepass"))
    if kind is bytearray:
        return {BYTEARRAY: bytes(value)}
    if kind is datetime and (value.tzinfo is None or type(value.tzinfo) is timezone):
        return {DATETIME: [value.isoformat(), value.fold]}
    if kind is date:
        return {DATE: value.isoformat()}
    return _lay_numpy(value)


def _lay_numpy(value: Any) -> Any:
    if type(value).__module__ == "torch":
        return _lay_torch(value)
    np = sys.modules.get("numpy")
    if np is None or not (type(value) is np.ndarray or isinstance(value, np.generic)):
        raise _Stuck
    if isinstance(value, np.str_ | np.bytes_):  # as an array item these would lose trailing NULs
        if type(value) is np.str_:
            return {SCALAR: ["U", str.encode(value, "utf-8", "surrogatepass")]}
        if type(value) is np.bytes_:
            return {SCALAR: ["S", b"".join((value,))]}
    dtype = value.dtype.str
    if not _DTYPE.fullmatch(dtype) or (type(value) is not np.ndarray and type(value) is not value.dtype.type):
        raise _Stuck
    if isinstance(value, np.generic):
        return {SCALAR: [dtype, value.tobytes()]}
    flat = np.ascontiguousarray(value).reshape(-1)  # no copy unless it is strided
    block = Ext(BLOCK, flat.view(np.uint8).data if flat.size else b"")
    return {ARRAY: [dtype, list(value.shape), block]}


def _lay_torch(value: Any) -> Any:
    torch = sys.modules["torch"]
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        raise _Stuck
    name = str(value.dtype).removeprefix("torch.")
    if not _TORCH_DTYPE.fullmatch(name):
        raise _Stuck
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    block = Ext(BLOCK, flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return {TORCH: [name, list(value.shape), block]}


def _name_of(kind: type) -> tuple[str, str]:
    """Return the module and name by which another process finds a dataclass."""
    module = MAIN if kind.__module__ == SCRIPT else kind.__module__
    if _find_class(module, kind.__qualname__) is not kind or kind.__new__ is not object.__new__:
        raise _Stuck
    return module, kind.__qualname__


def _find_class(module: str, name: str) -> Any:
    """Return what an imported module has by a name; None for nothing."""
    found: Any = sys.modules.get(module)
    if module == MAIN:
        found = sys.modules.get(SCRIPT) or found
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def vars_beyond(value: object, names: Iterable[str]) -> set[str]:
    """Return the names of attributes that are not among the fields."""
    return set(getattr(value, "__dict__", ())) - set(names)


def _describe(value: object) -> str:
    place, found = _find_stuck(value, "value", MAX_DEPTH) or ("value", value)
    if type(found) in _LEAVES or type(found) in _CONTAINERS:
        return f"{place}: more than {MAX_DEPTH} containers within each other cannot travel between processes"
    kind = type(found)
    what = f"objects of type {kind.__module__}.{kind.__qualname__}".replace("type builtins.", "type ")
    if "__dataclass_fields__" in kind.__dict__:
        missing = [field.name for field in fields(found) if not hasattr(found, field.name)]  # type: ignore[arg-type]
        beyond = vars_beyond(found, [field.name for field in fields(found)])  # type: ignore[arg-type]
        odd = f", with attributes that are no fields: {', '.join(sorted(beyond))}" if beyond else ""
        odd += f", without a value of {', '.join(missing)}" if missing else ""
        what += odd or ", which is not found by that name or is made by a `__new__` of its own"
    dtype = getattr(found, "dtype", None) if kind.__module__ == "numpy" else None
    if dtype is not None:
        what += f" with dtype {dtype}"
    return f"{place}: {what} cannot travel between processes; supported are {SUPPORTED}"


def _find_stuck(value: Any, place: str, room: int) -> tuple[str, object] | None:
    """Return the first part that cannot travel, in the order of encode()."""
    parts = _parts(value) if type(value) in _CONTAINERS else _field_parts(value)
    if parts is None:
        try:
            _Layout(wide=True).lay(value, room)
        except _Stuck:
            return place, value
        return None
    if room == 0:
        return f"{place[:200]}...", value
    for name, part in parts:
        found = _find_stuck(part, place + name, room - 1)
        if found:
            return found
    return None


def _field_parts(value: Any) -> Iterable[tuple[str, object]] | None:
    """Return the fields of a dataclass that can travel but for them; None for anything else."""
    if "__dataclass_fields__" not in type(value).__dict__:
        return None
    names = [field.name for field in fields(value)]
    try:
        _name_of(type(value))
    except _Stuck:
        return None
    if vars_beyond(value, names) or not all(hasattr(value, name) for name in names):
        return None
    return [(f".{name}", getattr(value, name)) for name in names]


def _parts(value: Any) -> Iterable[tuple[str, object]]:
    if type(value) is dict:
        for key, item in value.items():
            shown = repr(key)[:60] if type(key) in _LEAVES else f"a key of type {type(key).__name__}"
            yield f".keys()[{shown}]", key
            yield f"[{shown}]", item
    elif type(value) in (set, frozenset):
        yield from (("{...}", item) for item in value)
    else:
        yield from ((f"[{index}]", item) for index, item in enumerate(value))


def _take_ext(code: int, data: memoryview) -> Any:
    if code == BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == SURROGATES:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == BLOCK:
        return data  # borrowed from the message; copied when the array is built
    raise Damaged(f"not an encoded object: unknown extension {code}")


def _refuse_ext(code: int, data: memoryview) -> Any:
    raise Damaged("not an encoded object: an extension in a bare message")


_read_plain: Callable[[bytes | bytearray | memoryview], Any] = msgspec.msgpack.Decoder(
    ext_hook=_refuse_ext
).decode

_read_marked: Callable[[bytes | bytearray | memoryview], Any] = msgspec.msgpack.Decoder(
    ext_hook=_take_ext
).decode


def _build(value: Any, room: int) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if room < 0:
        raise Damaged(f"not an encoded object: more than {MAX_DEPTH} containers within each other")
    if kind is list:
        return _build_all(value, room - 1)
    if kind is dict:
        if len(value) == 1:
            ((code, content),) = value.items()
            if type(code) is int:
                return _BUILDERS[code](content, room - 1)
        if _ONLY_STR(map(type, value)):
            return {key: _build(item, room - 1) for key, item in value.items()}
    raise Damaged(f"not an encoded object: a {kind.__name__} where none can be")


def _build_all(items: Any, room: int) -> list[Any]:
    if type(items) is not list:
        raise Damaged(f"not an encoded object: a {type(items).__name__} instead of its items")
    if _LEAVES.issuperset(map(type, items)):
        return items
    leaves, build = _LEAVES, _build
    return [item if type(item) in leaves else build(item, room) for item in items]


def _build_dict(items: list[Any], room: int) -> dict[Any, Any]:
    parts = _build_all(items, room)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _build_datetime(items: list[Any], room: int) -> datetime:
    text, fold = items
    return datetime.fromisoformat(text).replace(fold=fold)


def _build_array(items: list[Any], room: int) -> np.ndarray[Any, Any]:
    import numpy as np  # only a process that holds an array is sent one

    name, shape, data = items
    if type(data) is not memoryview:
        raise Damaged("not an encoded object: an array without its memory")
    dtype = _read_dtype(name)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or prod(shape) * dtype.itemsize != len(
        data
    ):
        raise Damaged("not an encoded object: an array whose size is not that of its shape")
    array = np.empty(shape, dtype)
    if len(data):
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return array


def _build_scalar(items: list[Any], room: int) -> Any:
    import numpy as np

    name, data = items
    if name == "U":
        return np.str_(data.decode("utf-8", "surrogatepass"))
    if name == "S":
        return np.bytes_(data)
    return np.frombuffer(data, _read_dtype(name), count=1).copy()[0]


def _build_torch(items: list[Any], room: int) -> Any:
    import torch  # only a process that holds a tensor is sent one

    name, shape, data = items
    if type(name) is not str or not _TORCH_DTYPE.fullmatch(name) or type(data) is not memoryview:
        raise Damaged("not an encoded object: a tensor without its dtype or memory")
    dtype = getattr(torch, name)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or prod(shape) * dtype.itemsize != len(
        data
    ):
        raise Damaged("not an encoded object: a tensor whose size is not that of its shape")
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if len(data)
        else torch.empty(shape, dtype=dtype)
    )


def _build_dataclass(items: list[Any], room: int) -> Any:
    module, name, content = items
    kind = _find_class(module, name)
    if not isinstance(kind, type) or "__dataclass_fields__" not in kind.__dict__:
        raise Damaged(
            f"the dataclass {name} of {module} is not known here: import it where the transformer is"
        )
    if type(content) is not dict or content.keys() != {field.name for field in fields(kind)}:
        raise Damaged(f"the dataclass {name} of {module} has other fields here")
    made: Any = object.__new__(kind)
    for field, item in content.items():
        object.__setattr__(made, field, _build(item, room))
    return made


def _read_dtype(name: object) -> np.dtype[Any]:
    import numpy as np

    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise Damaged("not an encoded object: unknown dtype")
    return np.dtype(name)


_BUILDERS: dict[int, Callable[[Any, int], Any]] = {
    TUPLE: lambda items, room: tuple(_build_all(items, room)),
    SET: lambda items, room: set(_build_all(items, room)),
    FROZENSET: lambda items, room: frozenset(_build_all(items, room)),
    DICT: _build_dict,
    BYTEARRAY: lambda data, room: bytearray(_only(data, bytes)),
    DATETIME: _build_datetime,
    DATE: lambda text, room: date.fromisoformat(_only(text, str)),
    ARRAY: _build_array,
    SCALAR: _build_scalar,
    DATACLASS: _build_dataclass,
    TORCH: _build_torch,
}


def _only(item: Any, kind: type) -> Any:
    if type(item) is not kind:
        raise Damaged(f"not an encoded object: {type(item).__name__} instead of {kind.__name__}")
    return item
