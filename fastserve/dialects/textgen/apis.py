"""Which APIs there are, each a module with its `PATHS`. A new one is its module and its lines here."""

from __future__ import annotations

from fastserve.dialects.textgen import (
    infer,
    management,
    metadata,
    openai_calls,
    openai_embeddings,
    openai_models,
    tgi_paths,
    tokenizer,
    triton,
)
from fastserve.dialects.textgen.paths import Path

PATHS: tuple[Path, ...] = (
    *infer.PATHS,
    *openai_calls.PATHS,
    *openai_embeddings.PATHS,
    *openai_models.PATHS,
    *tgi_paths.PATHS,
    *tokenizer.PATHS,
    *triton.PATHS,
    *metadata.PATHS,
    *management.PATHS,
)
