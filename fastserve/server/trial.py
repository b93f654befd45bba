"""Loads what the settings name as a server would, in worker processes, and tells what came of it.

Nothing listens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import uvloop

from fastserve.config import Settings
from fastserve.engine.hosting import Host
from fastserve.engine.rate import RateLimiter, read_pools
from fastserve.metrics import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.repository import Repository
from fastserve.repository.version import Version
from fastserve.server.speaking import recorded_reader


@dataclass(slots=True)
class Trial:
    """What a start would find: problems by model, in a server's own words, and the versions that loaded."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    served: dict[str, list[Version]] = field(default_factory=dict)


def try_loads(settings: Settings) -> Trial:
    """Load everything once, and unload it. Raises ConfigError as a start does; blocking."""
    once = msgspec.structs.replace(settings, model_control="none")
    return uvloop.run(_try(once))


async def _try(settings: Settings) -> Trial:
    catalog, registry = Catalog(), Registry(sections=settings.frontends)
    limited = settings.rate_limit == "execution_count"
    host = Host(
        registry,
        fronts=settings.frontends,
        catalog=catalog,
        cache_bytes=settings.response_cache_bytes,
        device_share=settings.device_memory_share,
        limiter=RateLimiter(read_pools(settings.rate_limit_resources)) if limited else None,
    )
    host.read_recorded = recorded_reader(settings)
    repository = Repository(settings, catalog, host)
    try:
        problems = await repository.load_all()
        served = {name: model.available() for name, model in catalog.models.items()}
        return Trial(problems, served)
    finally:
        await repository.close()
        await host.close()
        registry.close()
