"""What every endpoint and RPC of this dialect shares: models by grps's names, the ready flag, replies."""

from __future__ import annotations

from pathlib import Path

from fastserve.config import GrpsOptions
from fastserve.dialects.grps.errors import UnknownModel, code_of, failure_json
from fastserve.dialects.grps.monitor import Monitor
from fastserve.errors import ServeError, invalid
from fastserve.metrics.series import Metric
from fastserve.repository.grps_config import FILE, Deployment, read_deployment
from fastserve.repository.version import Version
from fastserve.serving.dialect import ServingContext
from fastserve.serving.service import DialectService
from fastserve.wire.call import Call
from fastserve.wire.dialect import retry_after

JSON, JSON_UTF8 = b"application/json", b"application/json;charset=utf-8"
BYTES = b"application/octet-stream"
NO_DEFAULT = "No model is named, and this server has no default one (grps.default_model)."
NAME = "grps"


class Service(DialectService):
    """One dialect's state in one front process, shared by its HTTP and gRPC halves."""

    def __init__(self, context: ServingContext, options: GrpsOptions) -> None:
        super().__init__(context, NAME)
        self.options = options
        self.monitor = Monitor(context.registry)
        self.online = Online(context, options)
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
            if not name and not self._default:
                raise invalid(NO_DEFAULT)
            raise UnknownModel(name or self._default)
        return found

    def look_up(self, name: str) -> Version | None:
        """The same, None for none."""
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

    def sooner_ns(self, received_ns: int, theirs_ns: int) -> int:
        """The same of a client that says how long it waits, 0 for ever: whichever is up first."""
        own_ns = self.deadline_ns(received_ns)
        return min(own_ns, theirs_ns) if own_ns and theirs_ns else own_ns or theirs_ns

    def answer(self, call: Call, body: bytes, code: int = 200) -> None:
        """Reply with a JSON message whose code this is."""
        status = 200 if self.options.http_status == "always_200" else code
        call.reply(status, body, self.json_type)

    def refuse(self, call: Call, fault: ServeError, model: str = "") -> None:
        """Reply with an error, and count it."""
        self.traffic.refused(model, fault.kind.name)
        code = code_of(fault, self.options)
        status = 200 if self.options.http_status == "always_200" else code
        call.reply(status, failure_json(code, fault.message), self.json_type, retry_after(fault))

    def count(self, version: Version, received_ns: int) -> None:
        """A stream that ended well."""
        self.monitor.took(self.traffic.answered(version.model, version.number, received_ns))

    def close(self) -> None:
        self.monitor.close()


class Answered:
    """How requests of one version end well on the fast path. How they end badly is their transport's."""

    def __init__(self, service: Service, version: Version) -> None:
        self.service, self.model = service, version.model

    def answered(self, prepared: object, took_ns: int, ran_ns: int) -> None:
        self.service.monitor.took(took_ns)


def speaks_messages(version: Version) -> bool:
    """Whether a model takes whole messages: a customized one of a deployment."""
    config = version.config
    return config.options.origin == FILE and config.backend != "onnx"


ONLINE = Metric(
    "fastserve_grps_online",
    "Whether grps's clients called online last",
    "gauge",
    ("protocol",),
    combine="last",
)


class Online:
    """The flag that `online` sets and `offline` clears, one for all front processes. The server must be ready
    besides. Offline models answer all the same: who reads the flag is told, and nobody else."""

    def __init__(self, context: ServingContext, options: GrpsOptions) -> None:
        self._context, self._shared = context, options.shared_ready
        self._gauges = {name: context.registry.gauges(ONLINE).of(name) for name in self._protocols()}
        self._known = dict.fromkeys(self._gauges, options.start_online)
        self._alone = context.settings.frontends == 1

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
