"""What the server knows of the operator's page."""

from fastserve.dialects.console.dialect import ROUTES, Console
from fastserve.serving.dialect import DialectSpec, NoOptions

SPEC = DialectSpec(
    name="console",
    options=NoOptions,
    build=Console,
    routes=ROUTES,
    unasked=False,
    beside_others=True,
)
