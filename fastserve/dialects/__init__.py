"""Client APIs, each in a folder of its own that knows no other. A new one is its folder and its line here.

On a listener that speaks several, they are asked in this order whose a target is.
"""

from typing import Any

from fastserve.dialects.admin.console import CONSOLE
from fastserve.dialects.admin.openapi import SPEC as OPENAPI
from fastserve.dialects.admin.probes import METRICS_PORT, OPS
from fastserve.dialects.admin.traffic import TRAFFIC
from fastserve.dialects.grps.spec import SPEC as GRPS
from fastserve.dialects.kserve.spec import SPEC as KSERVE_V2
from fastserve.dialects.mlflow import SPEC as MLFLOW
from fastserve.dialects.textgen import SPEC as TEXTGEN
from fastserve.dialects.tfserving.spec import SPEC as TFSERVING
from fastserve.dialects.triton_v1.spec import SPEC as TRITON_V1
from fastserve.serving.dialect import DialectSpec

SPECS: tuple[DialectSpec[Any], ...] = (
    OPS,
    CONSOLE,
    OPENAPI,
    TRAFFIC,
    TEXTGEN,
    TFSERVING,
    KSERVE_V2,
    TRITON_V1,
    GRPS,
    MLFLOW,
    METRICS_PORT,
)
