"""The order of a service's workers: how they find the transformer's class, and how they construct it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastserve.backends.class_source import collect_source, typed_at_prompt
from fastserve.backends.transformer import BACKEND, VectorTransformer
from fastserve.codec.object_codecs import CODECS


def check_class(kind: Any) -> type[VectorTransformer]:
    """Return a transformer's class. Raises TypeError for anything else."""
    if not (isinstance(kind, type) and issubclass(kind, VectorTransformer)):
        raise TypeError(f"worker_class must be a subclass of VectorTransformer, not {kind!r}")
    return kind


def order_worker(kind: Any, kwargs: Mapping[str, Any], *, whole: bool, transport: str) -> dict[str, Any]:
    """Describe how a worker finds and constructs the class. Raises TypeError when it could not."""
    kind = check_class(kind)
    if "<locals>" in kind.__qualname__:
        raise TypeError(
            f"{kind.__qualname__} is defined inside a function; a worker can only import it from a module"
        )
    script = _script_of(kind) if kind.__module__ == "__main__" else ""
    typed = kind.__module__ == "__main__" and not script
    transformer = {
        "module": kind.__module__,
        "qualname": kind.__qualname__,
        "script": script,
        "source": collect_source(kind) if typed else "",
        "init_kwargs": CODECS[transport].encode(dict(kwargs)).hex(),
        "transport": transport,
        "whole": whole,
    }
    return {"backend": BACKEND, "transformer": transformer}


def _script_of(kind: type[VectorTransformer]) -> str:
    """Return the path of the script that defines a class of `__main__`; "" for one typed at a prompt."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return "" if typed_at_prompt(kind) or not script.is_file() else str(script.resolve())
