"""The packages `grps_framework` and `grps_apis` that a grps project imports, with the names of the originals.

    from grps_framework.apis.grps_pb2 import GrpsMessage
    from grps_framework.converter.converter import Converter, converter_register
    from grps_framework.model_infer.inferer import ModelInferer, inferer_register
    app_monitor.inc("seen", 1)          a counter       avg, max, min     a gauge
    app_monitor.cdf("took", 12.5)       a histogram

`install` puts them where `import` finds them, whether or not the original is installed: its own would run the
server that this replaces. Names of metrics may be anything, so each is a label of one family for its kind.

`GrpsContext` is a request as the project sees it; the sender behind it transports the answer.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl

from fastserve.backends.triton_api.utils import MetricFamily
from fastserve.protos import load

TEXT, BYTES = "text/plain", "application/octet-stream"
Response = tuple[bytes, int, list[tuple[str, str]]]  # body, status, headers
_RESPONSES = "http_response should be str, bytes, tuple(str/bytes, status, headers) or flask.Response"


class StreamSender(Protocol):
    """Sends the parts of one request's answer."""

    def part(self, data: bytes, final: bool) -> None:
        """Send one message of a stream, a serialized GrpsMessage. Blocks while the client is behind."""

    def cancelled(self) -> bool:
        """Return whether the client has left."""


class MultiDict(dict[str, str]):
    """First values by name; `getlist` returns all of them. With `fold` names ignore case."""

    def __init__(self, pairs: Iterable[tuple[str, str]], *, fold: bool = False) -> None:
        self._fold, self._pairs = fold, list(pairs)
        super().__init__(reversed([(self._key(name), value) for name, value in self._pairs]))

    def _key(self, name: str) -> str:
        return name.lower() if self._fold else name

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(self._key(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(self._key(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the first value of a name, or `default`."""
        return super().get(self._key(name), default)

    def getlist(self, name: str) -> list[str]:
        """Return every value of a name."""
        return [value for own, value in self._pairs if self._key(own) == self._key(name)]


class HttpRequest:
    """An HTTP request where flask is not installed, with the members of flask's that projects use."""

    def __init__(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.method, self.data, self.headers = method, body, MultiDict(headers, fold=True)
        self.path, _, query = target.partition("?")
        self.full_path, self.query_string = target, query.encode()
        self.args = MultiDict(parse_qsl(query, keep_blank_values=True))
        self.content_type = self.headers.get("content-type")
        self.content_length = len(body)

    @property
    def mimetype(self) -> str:
        return (self.content_type or "").partition(";")[0].strip().lower()

    @property
    def is_json(self) -> bool:
        return self.mimetype == "application/json" or self.mimetype.endswith("+json")

    @property
    def form(self) -> MultiDict:
        """Fields of a urlencoded form; files need flask."""
        as_text = self.mimetype == "application/x-www-form-urlencoded"
        return MultiDict(
            parse_qsl(self.data.decode("utf-8", "replace") if as_text else "", keep_blank_values=True)
        )

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    def get_json(self, force: bool = False, silent: bool = False) -> Any:
        try:
            return json.loads(self.data)
        except ValueError:
            if silent:
                return None
            raise

    def get_data(self, cache: bool = True, as_text: bool = False) -> Any:
        return self.data.decode() if as_text else self.data


def make_http_request(method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Any:
    """Return flask's own Request where it is installed, else an HttpRequest."""
    try:
        from flask import Request  # type: ignore[import-not-found, unused-ignore]
        from werkzeug.test import EnvironBuilder  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return HttpRequest(method, target, headers, body)
    path, _, query = target.partition("?")
    build = EnvironBuilder(path, query_string=query, method=method, headers=headers, data=body)
    return Request(build.get_environ())


class GrpsContext:
    """One request as the project sees it: data of its own, streams, errors, customised HTTP."""

    def __init__(self, sender: StreamSender, *, streaming: bool = False, http_request: Any = None) -> None:
        self._sender, self._streaming, self._http_request = sender, streaming, http_request
        self._data: dict[Any, Any] = {}
        self._error: str | None = None
        self._disconnected = False
        self._final = False
        self._http_response: Response | None = None
        self.converter: Any = None
        self.inferer: Any = None

    # --- data of the project's own ---

    def put_user_data(self, key: Any, value: Any) -> None:
        """Keep a value for the other steps of this request."""
        self._data[key] = value

    def get_user_data(self, key: Any) -> Any:
        """Return the kept value, None where there is none."""
        return self._data.get(key)

    # --- streams ---

    def if_streaming(self) -> bool:
        """Return whether the client asked for a stream."""
        return self._streaming

    def stream_respond(self, msg: Any, final: bool = False) -> None:
        """Send one message of a stream; nothing may follow a final one. Raises ValueError for another
        type."""
        if not isinstance(msg, load("grps").GrpsMessage):
            raise ValueError("Streaming response should be GrpsMessage")
        self._send(msg, final)

    def stream_respond_with_postprocess(self, inp: Any, final: bool = False) -> None:
        """Send the model's output as one message of a stream, made by the converter's `postprocess`."""
        if self.converter is None:
            raise ValueError("stream_respond_with_postprocess should only be used with converter")
        self.stream_respond(self.converter.postprocess(inp, self), final)

    def customized_http_stream_respond(self, msg: str | bytes, final: bool = False) -> None:
        """Send one piece of a customised HTTP stream."""
        if not isinstance(msg, str | bytes):
            raise ValueError("Streaming response should be str or bytes")
        if self._http_request is None:
            raise ValueError("customized_http_stream_respond should only be used with customized http")
        data = msg.encode("utf-8", "replace") if isinstance(msg, str) else msg
        self._send(load("grps").GrpsMessage(bin_data=data), final)

    def if_disconnected(self) -> bool:
        """Return whether the client has gone."""
        self._disconnected = self._disconnected or self._sender.cancelled()
        return self._disconnected

    def _send(self, message: Any, final: bool) -> None:
        if self._streaming and not self._final:
            self._final = final
            self._sender.part(message.SerializeToString(), final)

    # --- errors ---

    def set_has_err(self, has_err: bool) -> None:
        """Mark the request as failed, or not: its other steps are skipped."""
        self._error = (self._error or "") if has_err else None

    def has_err(self) -> bool:
        """Return whether the request has failed."""
        return self._error is not None

    def set_err_msg(self, err_msg: str) -> None:
        """Mark the request as failed with this text for the client."""
        self._error = str(err_msg)

    def get_err_msg(self) -> str:
        """Return the error text for the client."""
        return self._error or ""

    # --- customised HTTP ---

    def get_http_request(self) -> Any:
        """Return the HTTP request of a customised predict, flask's own where that is installed; else None."""
        return self._http_request

    def set_http_response(self, http_response: Any) -> None:
        """Set the answer of a customised predict. Raises ValueError for another type."""
        self._http_response = read_response(http_response)

    def get_http_response(self) -> Response | None:
        """Return the answer that was set last."""
        return self._http_response


def read_response(given: Any) -> Response:
    """Read str, bytes, (body, status, headers) or a flask.Response as a Response. Raises ValueError."""
    if isinstance(given, str):
        return given.encode("utf-8", "replace"), 200, [("Content-Type", f"{TEXT}; charset=utf-8")]
    if isinstance(given, bytes):
        return given, 200, [("Content-Type", BYTES)]
    if isinstance(given, tuple) and len(given) == 3:
        body, status, headers = given
        if not isinstance(body, str | bytes):
            raise ValueError("http_response[0] should be str or bytes")
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
            raise ValueError("http_response[1] should be int, a status from 200 to 599")
        if not isinstance(headers, Mapping):
            raise ValueError("http_response[2] should be dict")
        return read_response(body)[0], status, [(str(name), str(value)) for name, value in headers.items()]
    if all(hasattr(given, name) for name in ("get_data", "status_code", "headers")):
        return given.get_data(), int(given.status_code), [(str(n), str(v)) for n, v in given.headers.items()]
    raise ValueError(_RESPONSES)


BUCKETS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0]

_KINDS = {
    "inc": (MetricFamily.COUNTER, "What grps models count"),
    "avg": (MetricFamily.GAUGE, "Averages of what grps models measure"),
    "max": (MetricFamily.GAUGE, "Largest of what grps models measure"),
    "min": (MetricFamily.GAUGE, "Smallest of what grps models measure"),
    "cdf": (MetricFamily.HISTOGRAM, "What grps models measure"),
}


class AppMonitor:
    """Metrics of the project in this worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[tuple[str, str], Any] = {}
        self._values: dict[tuple[str, str], tuple[float, int]] = {}  # what a gauge shows, of so many

    def inc(self, name: str, value: float = 1) -> None:
        """Add to a counter."""
        self._find("inc", name).increment(value)

    def avg(self, name: str, value: float) -> None:
        """Add a value to an average since the start."""
        before, count = self._values.get(("avg", name), (0.0, 0))
        self._show("avg", name, before + (value - before) / (count + 1), count + 1)

    def max(self, name: str, value: float) -> None:
        """Show the largest value since the start."""
        self._show("max", name, max(value, self._values.get(("max", name), (value, 0))[0]), 1)

    def min(self, name: str, value: float) -> None:
        """Show the smallest value since the start."""
        self._show("min", name, min(value, self._values.get(("min", name), (value, 0))[0]), 1)

    def cdf(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._find("cdf", name).observe(value)

    def _show(self, kind: str, name: str, value: float, count: int) -> None:
        self._values[kind, name] = value, count
        self._find(kind, name).set(value)

    def _find(self, kind: str, name: str) -> Any:
        with self._lock:
            if (kind, name) not in self._metrics:
                number, words = _KINDS[kind]
                family = MetricFamily(f"grps_app_{kind}", words, number)
                buckets = BUCKETS if kind == "cdf" else None
                self._metrics[kind, name] = family.Metric({"name": str(name)}, buckets)
            return self._metrics[kind, name]


app_monitor = AppMonitor()
logger = logging.getLogger("grps")

_MESSAGES = (
    "DataType", "EmptyGrpsMessage", "GenericMapData", "GenericTensor", "GenericTensorData", "GrpsMessage",
    "NDArrayData", "Status",
)  # fmt: skip


class Converter:
    """Converts between messages and a model's inputs and outputs: the base of a project's converters."""

    _path: str | None = None
    _args: Any = None

    def init(self, path: str | None = None, args: Any = None) -> None:
        """Configure the converter; called once, when the model loads."""
        self._path, self._args = path, args

    def preprocess(self, inp: Any, context: GrpsContext) -> Any:
        """Convert a message, or the output of the node before, into the model's input."""
        raise NotImplementedError(f"{type(self).__name__} has no preprocess")

    def postprocess(self, inp: Any, context: GrpsContext) -> Any:
        """Convert the model's output into a message."""
        raise NotImplementedError(f"{type(self).__name__} has no postprocess")

    def batch_preprocess(self, inps: list[Any], contexts: list[GrpsContext]) -> Any:
        """Convert the messages of a batch into the model's input."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_preprocess")

    def batch_postprocess(self, inp: Any, contexts: list[GrpsContext]) -> list[Any]:
        """Convert the model's output for a batch into a message each."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_postprocess")


class ModelInferer(ABC):
    """Runs a model: the base of a project's inferers."""

    _path: str | None = None
    _device: str | None = None
    _args: Any = None

    def init(self, path: str, device: str | None = None, args: Any = None) -> None:
        """Configure the inferer; called once, before `load`."""
        self._path, self._device, self._args = path, device, args

    @abstractmethod
    def load(self) -> bool:
        """Load the model. False, or an exception, fails the load."""

    @abstractmethod
    def infer(self, inp: Any, context: GrpsContext) -> Any:
        """Run one request."""

    def batch_infer(self, inp: Any, contexts: list[GrpsContext]) -> Any:
        """Run a batch."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_infer")


T = TypeVar("T")


class NamedRegistry(Generic[T]):
    """Objects by the names that inference.yml gives them."""

    def __init__(self) -> None:
        self._known: dict[str, T] = {}

    def register(self, name: str, registered: T) -> None:
        """Register an object under a name."""
        self._known[name] = registered

    def get(self, name: str) -> T | None:
        """Return the object of that name, None where there is none."""
        return self._known.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._known)


converter_register: NamedRegistry[Any] = NamedRegistry()
inferer_register: NamedRegistry[Any] = NamedRegistry()


def install() -> None:
    """Make the packages importable in this process."""
    apis = _make_apis()
    for name, members in {
        "grps_apis": {},
        "grps_apis.grps_pb2": apis,
        "grps_framework": {},
        "grps_framework.apis": {},
        "grps_framework.apis.grps_pb2": apis,
        "grps_framework.context": {},
        "grps_framework.context.context": {"GrpsContext": GrpsContext},
        "grps_framework.converter": {},
        "grps_framework.converter.converter": {
            "Converter": Converter,
            "converter_register": converter_register,
        },
        "grps_framework.model_infer": {},
        "grps_framework.model_infer.inferer": {
            "ModelInferer": ModelInferer,
            "inferer_register": inferer_register,
        },
        "grps_framework.logger": {},
        "grps_framework.logger.logger": {"clogger": logger, "logger": logger},
        "grps_framework.monitor": {},
        "grps_framework.monitor.monitor": {"app_monitor": app_monitor},
    }.items():
        _put(name, members)


def _make_apis() -> dict[str, Any]:
    messages = load("grps")
    members = {name: getattr(messages, name) for name in _MESSAGES}
    return {**members, **dict(members["DataType"].items())}


def _put(name: str, members: dict[str, Any]) -> None:
    module = ModuleType(name)
    module.__path__ = []  # a package: more may be below it
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
