"""The grps API, as the server knows it."""

from __future__ import annotations

from fastserve.config import GrpsOptions
from fastserve.dialects.grps.dialect import Grps
from fastserve.dialects.grps.routes import ROUTES, RPC_RESOURCES, RPCS
from fastserve.protos import load
from fastserve.serving.dialect import DialectSpec, ListenerPolicy

SPEC = DialectSpec(
    name="grps",
    options=GrpsOptions,
    section="grps",
    build=Grps,
    routes=ROUTES,
    rpcs=RPCS,
    rpc_resources=RPC_RESOURCES,
    listeners=ListenerPolicy.OPT_IN,  # it has `/`
    descriptors=lambda: [load("grps").descriptor_set],
    exposes=lambda settings: ("take it offline, for load balancers",),
)
