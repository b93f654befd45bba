"""Client APIs, each in a folder of its own that knows no other. A new one is its folder and its line here.

On a listener that speaks several, they are asked in this order whose a target is.
"""

from typing import Any

from fastserve.dialects.console.spec import SPEC as CONSOLE
from fastserve.dialects.grps.spec import SPEC as GRPS
from fastserve.dialects.kserve_v2.spec import SPEC as KSERVE_V2
from fastserve.dialects.metrics_port import SPEC as METRICS_PORT
from fastserve.dialects.ops import SPEC as OPS
from fastserve.dialects.textgen.spec import SPEC as TEXTGEN
from fastserve.dialects.tfserving.spec import SPEC as TFSERVING
from fastserve.dialects.triton_v1.spec import SPEC as TRITON_V1
from fastserve.serving.dialect import DialectSpec

SPECS: tuple[DialectSpec[Any], ...] = (
    OPS,
    CONSOLE,
    TEXTGEN,
    TFSERVING,
    KSERVE_V2,
    TRITON_V1,
    GRPS,
    METRICS_PORT,
)
