"""The Open Inference Protocol V2 with Triton's extensions, as the server knows it."""

from __future__ import annotations

from fastserve.config import TritonOptions
from fastserve.dialects.kserve_v2.dialect import KServeV2
from fastserve.dialects.kserve_v2.operations import ROUTES, RPCS
from fastserve.protos import load
from fastserve.serving.dialect import DialectSpec
from fastserve.serving.model_control import exposes

SPEC = DialectSpec(
    name="kserve_v2",
    options=TritonOptions,
    section="triton",
    build=KServeV2,
    routes=ROUTES,
    rpcs=RPCS,
    descriptors=lambda: [load("kserve_v2").descriptor_set],
    exposes=exposes,
    stands_in=True,
    any_health_name=True,  # the original looks at no name
)
