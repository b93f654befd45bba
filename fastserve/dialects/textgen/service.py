"""What every endpoint of this dialect shares in one front process."""

from __future__ import annotations

from fastserve.config import TextgenOptions
from fastserve.metrics.traffic import Traffic
from fastserve.serving.dialect import ServingContext
from fastserve.wire.apart import Apart

NAME = "textgen"


class Service:
    """One dialect's state in one front process."""

    def __init__(self, context: ServingContext, options: TextgenOptions) -> None:
        self.options = options
        self.catalog = context.engine.catalog
        self.readiness = context.readiness
        self.registry = context.registry
        self.settings = context.settings
        self.apart = Apart()
        self.traffic = Traffic(context.registry, NAME, self.catalog.models)
