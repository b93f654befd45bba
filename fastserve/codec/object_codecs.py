"""How objects of the batching library become bytes: safe MessagePack, or pickle where a service says so.

    CODECS["msgpack"]   plain types, dataclasses, arrays and tensors (`safe_msgpack`); reading runs no code
    CODECS["pickle"]    what pickle takes; reading may run any code, so both ends have to be the user's own

A class of the user's script has another module in a worker (`safe_msgpack.SCRIPT`) than in the process that
the script started, `__main__`. Both codecs translate the one into the other.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from fastserve.codec import safe_msgpack
from fastserve.codec.safe_msgpack import MAIN, SCRIPT, CannotTravel


class ObjectCodec(NamedTuple):
    """Two functions. `encode` raises TypeError for what it cannot write."""

    encode: Callable[[Any], bytes]
    decode: Callable[[Any], Any]


class ScriptPickler(pickle.Pickler):
    """Writes classes and functions of a worker's script by the name that the script's own process has."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == SCRIPT and isinstance(value, type | type(encode_pickle)):
            return _find_in_script, (value.__qualname__,)
        return NotImplemented


class ScriptUnpickler(pickle.Unpickler):
    """Finds what the user's script defines, in a worker as well."""

    def find_class(self, module: str, name: str) -> Any:
        if module == MAIN and SCRIPT in sys.modules:
            module = SCRIPT
        return super().find_class(module, name)


def encode_pickle(value: Any) -> bytes:
    """Return the pickle of a value. Raises CannotTravel."""
    out = io.BytesIO()
    try:
        ScriptPickler(out, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as fault:
        raise CannotTravel(f"a {type(value).__qualname__} cannot be pickled: {fault}") from None
    return out.getvalue()


def decode_pickle(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of a pickle. Raises whatever its classes raise."""
    return ScriptUnpickler(io.BytesIO(data)).load()


def _find_in_script(name: str) -> Any:
    """Return what the script defines by a name. Raises AttributeError."""
    found: Any = sys.modules.get(SCRIPT) or sys.modules[MAIN]
    for part in name.split("."):
        found = getattr(found, part)
    return found


CODECS = {
    "msgpack": ObjectCodec(safe_msgpack.encode, safe_msgpack.decode),
    "pickle": ObjectCodec(encode_pickle, decode_pickle),
}
