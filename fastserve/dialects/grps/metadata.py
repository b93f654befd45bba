"""What the server and its models say of themselves, as YAML text (spec 12).

Of a deployment it is what its own files say; of other models the same words for what is known of them.
"""

from __future__ import annotations

import yaml

from fastserve.backends.base import write_specs
from fastserve.dialects.grps.service import Service
from fastserve.errors import Kind, ServeError
from fastserve.repository.version import Version, VersionState


def describe_server(service: Service) -> str:
    """inference.yml and server.yml, in the order that is set."""
    deployment = service.deployment
    if deployment is None:
        return dump({"models": _describe_catalog(service)})
    first, second = deployment.texts
    if service.options.server_metadata_first == "server":
        first, second = second, first
    return f"{first}\n{second}"


def describe_model(service: Service, name: str) -> str:
    """The first model of that name, or the one of `name-version`. Raises ServeError NOT_FOUND."""
    listed = service.deployment.described() if service.deployment is not None else []
    for model in (*listed, *_describe_catalog(service)):
        if name in (model["name"], f"{model['name']}-{model['version']}"):
            return dump(model)
    raise ServeError(Kind.NOT_FOUND, "Model not found.")


def dump(value: object) -> str:
    """As the original writes it: keys in order, null for what is not set."""
    return str(yaml.safe_dump(value, sort_keys=True, allow_unicode=True))


def _describe_catalog(service: Service) -> list[dict[str, object]]:
    deployed = set(service.deployment.names if service.deployment is not None else ())
    return [
        _describe(version)
        for name, model in sorted(service.catalog.models.items())
        if name not in deployed
        for _, version in sorted(model.versions.items())
        if version.state is VersionState.AVAILABLE
    ]


def _describe(version: Version) -> dict[str, object]:
    config = version.config
    tensors = {
        side: [{"name": name, **spec} for name, spec in write_specs(specs).items()]
        for side, specs in (("inputs", version.inputs), ("outputs", version.outputs))
    }
    batching = {"type": "dynamic" if config.batching else "none", "max_batch_size": config.max_batch_size}
    about = {"name": version.model, "version": str(version.number), "inferer_type": config.backend}
    return {**about, "batching": batching, **tensors}
