"""The `torch` section of model.yaml: how a PyTorch model is opened and run.

backend: torch
torch: {autocast: bfloat16, cuda_graphs: true}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class TorchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be set of it."""

    file: Annotated[
        str, Meta(description="File in a version's folder; nothing: model.pt2, model.pt or model.py.")
    ] = ""
    weights: Annotated[
        str, Meta(description="State dict in a version's folder for the module of a model.py.")
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="What floating-point weights and inputs are turned into; auto: left as they are."),
    ] = "auto"
    autocast: Annotated[
        Literal["off", "bfloat16", "float16"],
        Meta(description="Type that torch.autocast computes in where that loses little."),
    ] = "off"
    compile: Annotated[
        Literal["off", "default", "reduce-overhead", "max-autotune"],
        Meta(description="Mode of torch.compile; batching models need allowed_batch_sizes with it."),
    ] = "off"
    compile_backend: Annotated[str, Meta(description="Backend of torch.compile.")] = "inductor"
    cuda_graphs: Annotated[
        bool,
        Meta(description="Replay a CUDA graph for each of allowed_batch_sizes; without effect on a CPU."),
    ] = False


def read_torch(config: Mapping[str, Any]) -> TorchOptions:
    """The section of a model's config as a worker is sent it."""
    return msgspec.convert(config.get("torch") or {}, TorchOptions)
