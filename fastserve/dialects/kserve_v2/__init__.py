"""The Open Inference Protocol V2 with Triton's extensions. Start at `dialect`; `infer` is the main call."""

from fastserve.dialects.kserve_v2.dialect import KServeV2
from fastserve.dialects.kserve_v2.service import Service

__all__ = ["KServeV2", "Service"]
