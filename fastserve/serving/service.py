"""What the endpoints of one dialect share in a front process, whichever the dialect: the parts of the server
they need, and what is kept for them. A dialect's own `Service` begins with this one.
"""

from __future__ import annotations

from fastserve.apart import Apart
from fastserve.metrics.traffic import Traffic
from fastserve.repository.keepers import Keepers
from fastserve.serving.dialect import ServingContext
from fastserve.serving.model_view import Views


class DialectService:
    """One per dialect and front process."""

    timeout_ns = 0
    """How long a request may take where its client does not say; 0 for ever."""

    def __init__(self, context: ServingContext, dialect: str) -> None:
        engine = context.engine
        self.context, self.engine, self.catalog = context, engine, engine.catalog
        self.repository, self.regions, self.readiness = context.repository, context.regions, context.readiness
        self.limits, self.admin = context.settings.limits, context.settings.admin
        self.apart = Apart()
        self.keepers, self.views = Keepers(engine.catalog), Views(engine.catalog)
        self.traffic = Traffic(context.registry, dialect, engine.catalog.models)

    def deadline_ns(self, received_ns: int) -> int:
        """When the time of a request that came then is up by `timeout_ns`; 0 for never."""
        return received_ns + self.timeout_ns if self.timeout_ns else 0
