"""The text generation APIs, as the server knows them."""

from __future__ import annotations

from collections.abc import Sequence

from fastserve.config import Settings, TextgenOptions
from fastserve.dialects.textgen.apis import PATHS
from fastserve.dialects.textgen.dialect import Textgen
from fastserve.serving.dialect import DialectSpec


def exposes(settings: Settings) -> Sequence[str]:
    return ("stop the server",) if settings.textgen.stop_service else ()


SPEC = DialectSpec(
    name="textgen",
    options=TextgenOptions,
    section="textgen",
    build=Textgen,
    routes=tuple(path.row for path in PATHS),
    exposes=exposes,
)
