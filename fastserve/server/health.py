"""When the server is ready: derived from the catalog and the workers each time one of them changes.

The one rule: /healthz/ready, every dialect's own health calls and grpc.health.v1 show what `judge` finds.
"""

from __future__ import annotations

from fastserve.engine.hosting import Host
from fastserve.metrics import ModelReadiness, Readiness
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Model, VersionState

_COMING = (VersionState.START, VersionState.LOADING)


def judge(catalog: Catalog, host: Host, *, strict: bool, may_be_empty: bool) -> Readiness:
    """Ready: every model that should serve has an available version with a live, warm worker not stuck.

    Not `strict`: a model that could not be loaded is reported and does not count. A server without any
    model is ready only where models are loaded on demand (`may_be_empty`).
    """
    models = {
        name: _judge_model(model, host) for name, model in sorted(catalog.models.items()) if _wanted(model)
    }
    failed = [
        f"{name}: {state.reason}"
        for name, state in models.items()
        if not state.ready
        and (strict or catalog.models[name].latest is not None or _loading(catalog.models[name]))
    ]
    if failed:
        return Readiness(False, "; ".join(failed), models)
    if not any(state.ready for state in models.values()) and not may_be_empty:
        return Readiness(False, "no model is loaded", models)
    return Readiness(True, "", models)


def _wanted(model: Model) -> bool:
    versions = model.versions.values()
    return model.error is not None or any(
        v.state is not VersionState.END or v.error is not None for v in versions
    )


def _loading(model: Model) -> bool:
    return any(version.state in _COMING for version in model.versions.values())


def _judge_model(model: Model, host: Host) -> ModelReadiness:
    latest = model.latest
    if latest is not None:
        alive, wanted = host.alive(latest), latest.config.instances
        reason = host.stuck(latest) if alive else host.trouble(latest) or "no worker is alive"
        return ModelReadiness(not reason, reason, alive, wanted)
    if _loading(model):
        return ModelReadiness(False, "loading")
    errors = [v.error for v in model.versions.values() if v.error is not None]
    error = model.error or (errors[-1] if errors else None)
    return ModelReadiness(False, error.message if error else "no version is available")
