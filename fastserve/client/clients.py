"""`Client` and `AsyncClient`: the models of a running server, called as functions.

    client = Client("http://127.0.0.1:8000")        grpc://127.0.0.1:8001; https and grpcs with TLS
    client.greet(name="Ann")                        a function of JSON: what it returned
    client.scale(np.ones((2, 4), np.float32))       tensors: arrays of numpy, raw over HTTP and gRPC
    for part in client.countdown.stream(start=3):   what yields, part by part
        ...

Both ask the same questions (`v2`) and differ in who sends them. A model's description is read before its
first call, and again after a call that the server refused as unfit.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastserve.client.http import AsyncHttpConnections, HttpConnections, HttpTarget
from fastserve.client.rpc import AsyncRpcChannel, RpcChannel, RpcTarget
from fastserve.client.tensors import STREAM_PLATFORM, CallInputs, ModelDescription, lay_out, read_result
from fastserve.client.v2 import ClientQuestion, HttpQuestions, Questions, RpcQuestions
from fastserve.errors import Kind, ServeError

Found = TypeVar("Found")
Asking = Generator[ClientQuestion[Any], Any, Found]
"""A conversation: it yields questions and is sent what was read of their answers."""
PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 443}
DEFAULT_URL = "http://127.0.0.1:8000"
FORGETFUL = frozenset({Kind.INVALID_ARGUMENT, Kind.NOT_FOUND})


class Conversations:
    """Conversations with a server, without the transport: base of both clients."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        api_key: str = "",
        binary: bool = True,
        cacert: str = "",
        cert: str = "",
        key: str = "",
    ) -> None:
        """`timeout_s` bounds a call, and each part of a stream over HTTP. `binary=False` sends numbers as
        JSON. `api_key` is sent as `Authorization: Bearer`. `cacert`, `cert` and `key` are paths of PEM files.
        Raises ValueError for another kind of URL, and for an API key beside such a header."""
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"url: allowed: http, https, grpc or grpcs://HOST[:PORT], not {url!r}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: more than 0, not {timeout_s}")
        self._port, self._sent_headers = parts.port or PORTS[parts.scheme], dict(headers or {})
        if api_key:
            if any(name.lower() == "authorization" for name in self._sent_headers):
                raise ValueError("api_key: not beside a header authorization, which it would be sent as")
            self._sent_headers["authorization"] = f"Bearer {api_key}"
        self._host, self._timeout_s = parts.hostname, timeout_s
        self._secured, self._files = parts.scheme.endswith("s"), (cacert, cert, key)
        self._over_rpc = parts.scheme.startswith("grpc")
        self._questions: Questions = RpcQuestions() if self._over_rpc else HttpQuestions(binary=binary)
        self._known: dict[tuple[str, str], ModelDescription] = {}

    def _http_target(self) -> HttpTarget:
        tls = None
        cacert, cert, key = self._files
        if self._secured:
            tls = ssl.create_default_context(cafile=cacert or None)
            if cert:
                tls.load_cert_chain(cert, key or None)
        return HttpTarget(self._host, self._port, self._timeout_s, self._sent_headers, tls)

    def _rpc_target(self) -> RpcTarget:
        host = f"[{self._host}]" if ":" in self._host else self._host
        cacert, cert, key = self._files
        files = (cacert, key or cert, cert)
        return RpcTarget(f"{host}:{self._port}", self._timeout_s, self._sent_headers, self._secured, files)

    def _describing(self, name: str, version: str) -> Asking[ModelDescription]:
        known = self._known.get((name, version))
        if known is None:
            known = self._known[name, version] = yield self._questions.describe(name, version)
        return known

    def _laying(
        self, name: str, version: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Asking[tuple[ModelDescription, CallInputs]]:
        model = yield from self._describing(name, version)
        return model, lay_out(model, args, named)

    def _calling(self, name: str, version: str, args: tuple[Any, ...], named: dict[str, Any]) -> Asking[Any]:
        model, inputs = yield from self._laying(name, version, args, named)
        found = yield self._questions.infer(model, version, inputs)
        return read_result(model, found, lone=inputs.lone)

    def _forget(self, name: str, version: str, fault: ServeError) -> None:
        """Forget a model that may have changed."""
        if fault.kind in FORGETFUL:
            self._known.pop((name, version), None)


class ModelProxy:
    """One model of a `Client`."""

    def __init__(self, client: Client, name: str, version: str) -> None:
        self._client, self._name, self._version = client, name, version

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the model: functions of JSON by keywords or with the whole body, others with their inputs in
        order or by name. A stream's parts come as a list. Raises ServeError, TypeError, ValueError."""
        return self._client._call(self._name, self._version, args, named)

    def stream(self, *args: Any, **named: Any) -> Iterator[Any]:
        """Call a model that answers in parts, and yield them. Raises as a call does."""
        return self._client._stream(self._name, self._version, args, named)

    def describe(self) -> ModelDescription:
        """Return the model's inputs and outputs. Raises ServeError."""
        return self._client._run(self._client._describing(self._name, self._version))


class AsyncModelProxy:
    """One model of an `AsyncClient`."""

    def __init__(self, client: AsyncClient, name: str, version: str) -> None:
        self._client, self._name, self._version = client, name, version

    async def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the model; see `ModelProxy`."""
        return await self._client._call(self._name, self._version, args, named)

    def stream(self, *args: Any, **named: Any) -> AsyncIterator[Any]:
        """Call a model that answers in parts, and yield them."""
        return self._client._stream(self._name, self._version, args, named)

    async def describe(self) -> ModelDescription:
        """Return the model's inputs and outputs. Raises ServeError."""
        return await self._client._run(self._client._describing(self._name, self._version))


class Client(Conversations):
    """A client whose calls block. Threads may share it."""

    def __init__(self, url: str = DEFAULT_URL, **options: Any) -> None:
        super().__init__(url, **options)
        self._transport: Any = (
            RpcChannel(self._rpc_target()) if self._over_rpc else HttpConnections(self._http_target())
        )

    def __getattr__(self, name: str) -> ModelProxy:
        """Return the model of a name that is a Python name; `model()` takes any."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self.model(name)

    def model(self, name: str, version: int | str = "") -> ModelProxy:
        """Return a model, or one version of it."""
        return ModelProxy(self, name, str(version))

    def ready(self) -> bool:
        """Whether the server is ready; False as well where none answers."""
        try:
            return self._ask(self._questions.ready())
        except ServeError as fault:
            if fault.kind is not Kind.UNAVAILABLE:
                raise
            return False

    def models(self) -> list[str]:
        """Return the names of the models that are ready. Raises ServeError."""
        return self._ask(self._questions.models())

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, question: ClientQuestion[Found]) -> Found:
        return question.read(self._transport.ask(question.request))

    def _run(self, asking: Asking[Found]) -> Found:
        try:
            question = next(asking)
            while True:
                question = asking.send(self._ask(question))
        except StopIteration as done:
            found: Found = done.value
            return found

    def _call(self, name: str, version: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            if self._run(self._describing(name, version)).platform == STREAM_PLATFORM:
                return list(self._stream(name, version, args, named))
            return self._run(self._calling(name, version, args, named))
        except ServeError as fault:
            self._forget(name, version, fault)
            raise

    def _stream(self, name: str, version: str, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[Any]:
        try:
            model, inputs = self._run(self._laying(name, version, args, named))
            question = self._questions.stream(model, version, inputs)
            for part in self._transport.parts(question.request):
                yield read_result(model, question.read(part), lone=inputs.lone)
        except ServeError as fault:
            self._forget(name, version, fault)
            raise


class AsyncClient(Conversations):
    """A client whose calls are awaited, on one event loop."""

    def __init__(self, url: str = DEFAULT_URL, **options: Any) -> None:
        super().__init__(url, **options)
        self._opened: Any = None

    def __getattr__(self, name: str) -> AsyncModelProxy:
        """Return the model of a name that is a Python name; `model()` takes any."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self.model(name)

    def model(self, name: str, version: int | str = "") -> AsyncModelProxy:
        """Return a model, or one version of it."""
        return AsyncModelProxy(self, name, str(version))

    async def ready(self) -> bool:
        """Whether the server is ready; False as well where none answers."""
        try:
            return await self._ask(self._questions.ready())
        except ServeError as fault:
            if fault.kind is not Kind.UNAVAILABLE:
                raise
            return False

    async def models(self) -> list[str]:
        """Return the names of the models that are ready. Raises ServeError."""
        return await self._ask(self._questions.models())

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def _transport(self) -> Any:
        """The connections, which belong to the loop of the first call."""
        if self._opened is None:
            self._opened = (
                AsyncRpcChannel(self._rpc_target())
                if self._over_rpc
                else AsyncHttpConnections(self._http_target())
            )
        return self._opened

    async def _ask(self, question: ClientQuestion[Found]) -> Found:
        return question.read(await self._transport.ask(question.request))

    async def _run(self, asking: Asking[Found]) -> Found:
        try:
            question = next(asking)
            while True:
                question = asking.send(await self._ask(question))
        except StopIteration as done:
            found: Found = done.value
            return found

    async def _call(self, name: str, version: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            if (await self._run(self._describing(name, version))).platform == STREAM_PLATFORM:
                return [part async for part in self._stream(name, version, args, named)]
            return await self._run(self._calling(name, version, args, named))
        except ServeError as fault:
            self._forget(name, version, fault)
            raise

    async def _stream(
        self, name: str, version: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> AsyncIterator[Any]:
        try:
            model, inputs = await self._run(self._laying(name, version, args, named))
            question = self._questions.stream(model, version, inputs)
            async for part in self._transport.parts(question.request):
                yield read_result(model, question.read(part), lone=inputs.lone)
        except ServeError as fault:
            self._forget(name, version, fault)
            raise
