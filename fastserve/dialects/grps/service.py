"""Models by grps's names, the ready flag, replies, error codes (spec 5) and metadata (spec 12)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from fastserve.backends.base import write_specs
from fastserve.dialects.grps.monitor import GrpsMonitor
from fastserve.errors import Kind, Reason, ServeError, invalid
from fastserve.metrics.exposition import Metric
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.net.router import CANONICAL_STATUS, common_status, fault_headers
from fastserve.protos import load
from fastserve.repository.grps_config import FILE, Deployment, read_deployment
from fastserve.repository.version import Version, VersionState
from fastserve.serving.dialect import DialectService, ServingContext
from fastserve.settings import GrpsOptions

CODE = CANONICAL_STATUS | {Kind.RESOURCE_EXHAUSTED: 503, Kind.ABORTED: 503}
OK_JSON = b'{"status":{"code":200,"msg":"OK","status":"SUCCESS"}'


class UnknownModel(ServeError):
    """A model that is not there, for whose code there is a setting."""

    def __init__(self, name: str) -> None:
        super().__init__(Kind.NOT_FOUND, f"Model {name} not found.")


class NotReady(ServeError):
    """The error that answers a readiness probe."""

    def __init__(self) -> None:
        super().__init__(Kind.UNAVAILABLE, "Service Unavailable")


def code_of(fault: ServeError, options: GrpsOptions) -> int:
    """The code of a failure."""
    own = options.unknown_model_code if isinstance(fault, UnknownModel) else CODE[fault.kind]
    return common_status(fault) or own


def failure_json(code: int, message: str) -> bytes:
    """A failure as a JSON message. Bytes that were not UTF-8 are replaced."""
    text = msgspec.json.encode(message.encode("utf-8", "replace").decode("utf-8", "replace"))
    return b'{"status":{"code":%d,"msg":%b,"status":"FAILURE"}}' % (code, text)


def failure_message(code: int, message: str) -> bytes:
    """Return a failure as a serialized message."""
    status = load("grps").Status(code=code, msg=message.encode("utf-8", "replace").decode(), status="FAILURE")
    return bytes(load("grps").GrpsMessage(status=status).SerializeToString())


@lru_cache(maxsize=1)
def ok_message() -> bytes:
    """A serialized message that is nothing but good: a status put before the rest of one."""
    data: Any = load("grps").GrpsMessage(status={"code": 200, "msg": "OK", "status": "SUCCESS"})
    return bytes(data.SerializeToString())


JSON_UTF8 = b"application/json;charset=utf-8"
BYTES = b"application/octet-stream"
NO_DEFAULT = "No model is named, and this server has no default one (grps.default_model)."
NAME = "grps"


class GrpsService(DialectService):
    """One dialect's state in one front process, shared by its HTTP and gRPC halves."""

    def __init__(self, context: ServingContext, options: GrpsOptions) -> None:
        super().__init__(context, NAME)
        self.options = options
        self.monitor = context.share("grps monitor", lambda: GrpsMonitor(context.registry, context.state))
        self.online = context.share("grps online", lambda: Online(context, options))
        self.json_type = JSON_UTF8 if options.json_charset else JSON
        self.timeout_ns = options.timeout_ms * 1_000_000
        folder = context.settings.deployment
        self.deployment: Deployment | None = read_deployment(Path(folder)) if folder else None
        self._deployed = frozenset(self.deployment.names if self.deployment is not None else ())
        self._default = options.default_model or (self.deployment.default if self.deployment else "")

    def find(self, name: str) -> Version:
        """The available version of `name-version`; "" is the default. Raises ServeError."""
        found = self.look_up(name)
        if found is None:
            self.explain_absence(name)
            if not name and not self._default:
                raise invalid(NO_DEFAULT)
            raise UnknownModel(name or self._default)
        return found

    def look_up(self, name: str) -> Version | None:
        """Return the available version of `name-version`, None for none."""
        if not name:
            name = self._default
            if not name:
                return (
                    self.catalog.available(next(iter(self.catalog.models)))
                    if len(self.catalog.models) == 1
                    else None
                )
        if name in self._deployed or self.options.bare_names:
            found = self.catalog.available(name)
            if found is not None:
                return found
        model, _, number = name.rpartition("-")
        if not number.isascii() or not number.isdigit() or len(number) > 18:
            return None
        return self.catalog.available(model, int(number))

    def explain_absence(self, name: str) -> None:
        """See Catalog.explain_absence; for `name-version`, or `name`; "" is the default."""
        name = name or self._default
        if not name and len(self.catalog.models) == 1:
            name = next(iter(self.catalog.models))
        self.catalog.explain_absence(name, name.rpartition("-")[0])

    def answer(self, call: Call, body: bytes, code: int = 200) -> None:
        """Reply with a JSON message whose code this is."""
        status = 200 if self.options.http_status == "always_200" else code
        call.reply(status, body, self.json_type)

    def refuse(self, call: Call, fault: ServeError, model: str = "") -> None:
        """Reply with an error, and count it."""
        fault = call.cause_of(fault)
        self.count_fault(model, fault, call)
        code = code_of(fault, self.options)
        held_back = fault.reason in (Reason.API_KEY, Reason.KEY_LIMIT)
        always = self.options.http_status == "always_200" and not held_back
        status = 200 if always else code
        call.reply(status, failure_json(code, fault.message), self.json_type, fault_headers(fault))

    def count(self, version: Version, received_ns: int) -> None:
        """A stream that ended well."""
        self.monitor.took(self.traffic.answered(version.model, version.number, received_ns))

    def answered(self, prepared: object, took_ns: int, ran_ns: int) -> None:
        """Count a request that the fast path answered well."""
        self.monitor.took(took_ns)

    def close(self) -> None:
        self.monitor.close()


def speaks_messages(version: Version) -> bool:
    """Whether a model takes whole messages: a customized one of a deployment, and a dag of them."""
    config = version.config
    return config.options.origin == FILE and config.backend in ("grps", "ensemble")


ONLINE = Metric(
    "fastserve_grps_online",
    "Whether grps's clients called online last",
    "gauge",
    ("protocol",),
    combine="last",
)


class Online:
    """The flag that `online` sets and `offline` clears, one for all front processes. The server must be ready
    besides. Offline models answer all the same: only the readiness calls show the flag."""

    def __init__(self, context: ServingContext, options: GrpsOptions) -> None:
        self._context, self._shared = context, options.shared_ready
        self._gauges = {name: context.registry.gauges(ONLINE).of(name) for name in self._protocols()}
        self._known = dict.fromkeys(self._gauges, options.start_online)
        self._alone = context.settings.front_count == 1

    def set(self, protocol: str, online: bool) -> None:
        """`protocol`: http or grpc."""
        name = "all" if self._shared else protocol
        self._known[name] = online
        self._gauges[name].set(online)

    def is_ready(self, protocol: str) -> bool:
        """Whether clients of a protocol should come."""
        name = "all" if self._shared else protocol
        known = self._known[name]
        if not self._alone:  # some other process may have been told since
            (found,) = self._context.registry.read(ONLINE)
            said = found.get((name,))
            known = known if said is None else bool(said[0])
        return known and self._context.readiness.ready

    def _protocols(self) -> tuple[str, ...]:
        return ("all",) if self._shared else ("http", "grpc")


def describe_server(service: GrpsService) -> str:
    """inference.yml and server.yml, in the order that is set; the models alone for who may use but some."""
    deployment = service.deployment
    if deployment is None or service.catalog is not service.engine.catalog:
        return dump({"models": [*_describe_deployed(service), *_describe_catalog(service)]})
    first, second = deployment.texts
    if service.options.server_metadata_first == "server":
        first, second = second, first
    return f"{first}\n{second}"


def describe_model(service: GrpsService, name: str) -> str:
    """The first model of that name, or the one of `name-version`. Raises ServeError NOT_FOUND."""
    for model in (*_describe_deployed(service), *_describe_catalog(service)):
        if name in (model["name"], f"{model['name']}-{model['version']}"):
            return dump(model)
    service.explain_absence(name)
    raise ServeError(Kind.NOT_FOUND, "Model not found.")


def dump(value: object) -> str:
    """As the original writes it: keys in order, null for what is not set."""
    return str(yaml.safe_dump(value, sort_keys=True, allow_unicode=True))


def _describe_deployed(service: GrpsService) -> list[dict[str, object]]:
    listed = service.deployment.described() if service.deployment is not None else []
    return [model for model in listed if service.catalog.allows(f"{model['name']}-{model['version']}")]


def _describe_catalog(service: GrpsService) -> list[dict[str, object]]:
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
