"""A request as code of a grps project sees it: GrpsContext, with the names and rules of the original's.

It holds what the project may ask and say; how an answer travels is the business of the sender behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qsl

from fastserve.protos import load

TEXT, BYTES = "text/plain", "application/octet-stream"
Response = tuple[bytes, int, list[tuple[str, str]]]  # body, status, headers
_RESPONSES = "http_response should be str, bytes, tuple(str/bytes, status, headers) or flask.Response"


class Sender(Protocol):
    """The way back of one request."""

    def part(self, data: bytes, final: bool) -> None:
        """One message of a stream: a serialized GrpsMessage. Blocks while the client is behind."""

    def cancelled(self) -> bool:
        """Whether nobody waits any more."""


class Values(dict[str, str]):
    """The first value of every name; `getlist` has all. With `fold` upper and lower case are the same."""

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
        """The first, or `default`."""
        return super().get(self._key(name), default)

    def getlist(self, name: str) -> list[str]:
        """Every value of a name."""
        return [value for own, value in self._pairs if self._key(own) == self._key(name)]


class HttpRequest:
    """An HTTP request where flask is not installed, with the members of flask's that projects use."""

    def __init__(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.method, self.data, self.headers = method, body, Values(headers, fold=True)
        self.path, _, query = target.partition("?")
        self.full_path, self.query_string = target, query.encode()
        self.args = Values(parse_qsl(query, keep_blank_values=True))
        self.content_type = self.headers.get("content-type")
        self.content_length = len(body)

    @property
    def mimetype(self) -> str:
        return (self.content_type or "").partition(";")[0].strip().lower()

    @property
    def is_json(self) -> bool:
        return self.mimetype == "application/json" or self.mimetype.endswith("+json")

    @property
    def form(self) -> Values:
        """Fields of a form that came as text; files are flask's."""
        as_text = self.mimetype == "application/x-www-form-urlencoded"
        return Values(
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
    """flask's own Request where it is installed."""
    try:
        from flask import Request  # type: ignore[import-not-found, unused-ignore]
        from werkzeug.test import EnvironBuilder  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return HttpRequest(method, target, headers, body)
    path, _, query = target.partition("?")
    build = EnvironBuilder(path, query_string=query, method=method, headers=headers, data=body)
    return Request(build.get_environ())


class GrpsContext:
    """One request: data of the project's own, streams, errors, customised HTTP."""

    def __init__(self, sender: Sender, *, streaming: bool = False, http_request: Any = None) -> None:
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
        """Keep something for the other steps of this request."""
        self._data[key] = value

    def get_user_data(self, key: Any) -> Any:
        """What was kept, None for nothing."""
        return self._data.get(key)

    # --- streams ---

    def if_streaming(self) -> bool:
        """Whether the client asked for a stream."""
        return self._streaming

    def stream_respond(self, msg: Any, final: bool = False) -> None:
        """Send one message of a stream; nothing may follow a final one. Raises ValueError for no message."""
        if not isinstance(msg, load("grps").GrpsMessage):
            raise ValueError("Streaming response should be GrpsMessage")
        self._send(msg, final)

    def stream_respond_with_postprocess(self, inp: Any, final: bool = False) -> None:
        """The same for what the model gave, by the converter's `postprocess`."""
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
        """Whether the client has gone."""
        self._disconnected = self._disconnected or self._sender.cancelled()
        return self._disconnected

    def _send(self, message: Any, final: bool) -> None:
        if self._streaming and not self._final:
            self._final = final
            self._sender.part(message.SerializeToString(), final)

    # --- errors ---

    def set_has_err(self, has_err: bool) -> None:
        """Whether the request has failed: its other steps are left out."""
        self._error = (self._error or "") if has_err else None

    def has_err(self) -> bool:
        """Whether it has."""
        return self._error is not None

    def set_err_msg(self, err_msg: str) -> None:
        """It has failed, and this is what the client is told."""
        self._error = str(err_msg)

    def get_err_msg(self) -> str:
        """What the client is told."""
        return self._error or ""

    # --- customised HTTP ---

    def get_http_request(self) -> Any:
        """The HTTP request of a customised predict, flask's own where that is installed; else None."""
        return self._http_request

    def set_http_response(self, http_response: Any) -> None:
        """What a customised predict answers. Raises ValueError for what is no response."""
        self._http_response = read_response(http_response)

    def get_http_response(self) -> Response | None:
        """What was set last."""
        return self._http_response


def read_response(given: Any) -> Response:
    """str, bytes, (body, status, headers) or a flask.Response as one thing. Raises ValueError."""
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
