"""The TensorRT Inference Server V1 API, as the server knows it."""

from __future__ import annotations

from fastserve.dialects.triton_v1.dialect import TritonV1
from fastserve.dialects.triton_v1.routes import ROUTES, RPCS
from fastserve.protos import load
from fastserve.serving.dialect import DialectSpec, NoOptions
from fastserve.serving.model_control import exposes

SPEC = DialectSpec(
    name="triton_v1",
    options=NoOptions,
    build=TritonV1,
    routes=ROUTES,
    rpcs=RPCS,
    descriptors=lambda: [load("triton_v1").descriptor_set],
    exposes=exposes,
    stands_in=True,
)
