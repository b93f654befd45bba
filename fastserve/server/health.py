"""Readiness of the server, derived from the catalog and the workers each time one of them changes.

/healthz/ready, every dialect's own health calls and grpc.health.v1 show the result of `judge`.
"""

from __future__ import annotations

from fastserve.engine.loader import VersionLoader
from fastserve.metrics import LoadFailure, ModelReadiness, Readiness, ServerState
from fastserve.repository.catalog import Catalog
from fastserve.repository.repository import ensemble_needs
from fastserve.repository.version import Model, Version, VersionState

_COMING = (VersionState.START, VersionState.LOADING)


def judge(catalog: Catalog, host: VersionLoader, *, strict: bool, may_be_empty: bool) -> Readiness:
    """Return ready if every wanted model has an available version with a live, warm, responsive worker.

    Not `strict`: a model that could not be loaded is reported and does not count. A server without any
    model is ready only where models are loaded on demand (`may_be_empty`).
    """
    _look_at_workers(catalog, host)
    models = {
        name: _judge_model(model, host, starting=name in catalog.starting)
        for name, model in sorted(catalog.models.items())
        if name in catalog.starting or _wanted(model)
    }
    failed = [
        f"{name}: {state.reason}"
        for name, state in models.items()
        if not state.ready
        and (strict or catalog.models[name].latest is not None or _loading(catalog.models[name]))
    ]
    if failed:
        return Readiness(False, "; ".join(failed), models, ServerState.SERVING)
    if not any(state.ready for state in models.values()) and not may_be_empty:
        return Readiness(False, "no model is loaded", models, ServerState.SERVING)
    return Readiness(True, "", models, ServerState.SERVING)


def _wanted(model: Model) -> bool:
    versions = model.versions.values()
    return model.error is not None or any(
        v.state is not VersionState.END or v.error is not None for v in versions
    )


def _loading(model: Model) -> bool:
    return any(version.state in _COMING for version in model.versions.values())


def _say_loading(model: Model, host: VersionLoader) -> str:
    waits = next(filter(None, map(host.waits_for, model.versions.values())), "")
    return f"loading: {waits}" if waits else "loading"


def _judge_model(model: Model, host: VersionLoader, *, starting: bool) -> ModelReadiness:
    failed = LoadFailure.of(model.failed_at, model.error.message) if model.error else None
    latest = model.latest
    if latest is not None:
        alive, wanted = host.alive(latest), latest.config.instances
        return ModelReadiness(not latest.down, latest.down, alive, wanted, failed)
    if starting or _loading(model):
        return ModelReadiness(False, _say_loading(model, host), failed=failed)
    errors = [v.error for v in model.versions.values() if v.error is not None]
    error = model.error or (errors[-1] if errors else None)
    return ModelReadiness(False, error.message if error else "no version is available", failed=failed)


def _look_at_workers(catalog: Catalog, host: VersionLoader) -> None:
    """Set `down` of each available version. An ensemble is down while one of its steps is."""
    available = [version for model in catalog.models.values() for version in model.available()]
    ensembles = [version for version in available if version in host.ensembles]
    for version in available:
        alive = host.alive(version)
        version.down = host.stuck(version) if alive else host.trouble(version) or "no worker is alive"
    for _ in ensembles:  # one may be a step of another: the longest chain has them all
        for version in ensembles:
            version.down = _down_step(catalog, version)


def _down_step(catalog: Catalog, ensemble: Version) -> str:
    for name in ensemble_needs(ensemble.config):
        step = catalog.available(name)
        if step is not None and step.down:
            return f"{name}: {step.down}"
    return ""
