"""Parts of the text APIs' endpoints: routes, the state of a front process, and bodies of requests.

    TextRoute(HttpRoute("infer", "/infer", {"POST": Scope.INFER}), infer, refuse, room=BodyUse.IMAGES)

`make` is called with the service and the parts of the target, once for each target that is requested (the
router caches those that were answered 200).

    read_typed(FreeJSON(ChatRequest, BOUNDS), b'{"temperature": 3}')
    -> InvalidBody("`temperature`: expected float <= 2.0", field="temperature")

Bodies are within BOUNDS before an object is made of them; large ones are read in a thread. MindIE's API takes
any document (`read_json`): whole numbers beyond 64 bits are floats there, as `is_integer` says.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from fastserve.codec.json_text import Bounds, DocumentFault, FreeJSON, JSONProblem
from fastserve.dialects.text_common.mindie_metrics import MindieMetrics
from fastserve.errors import Kind, ServeError, invalid
from fastserve.metrics import Metric, Registry
from fastserve.net.request import Call
from fastserve.net.router import Yields
from fastserve.serving.dialect import DialectService, HttpRoute, ServingContext
from fastserve.serving.text import TextModel, TextModels, TextStream
from fastserve.serving.text.images import ImageRules, Images
from fastserve.serving.text.models import TextCall, answer_text
from fastserve.settings import TextgenOptions

if TYPE_CHECKING:
    from fastserve.net.request import Endpoint


LEAST_BYTES, SEVERAL_BYTES = 8 << 20, 16 << 20
"""A body may have: one of one prompt, and one of several."""
OTHER_BYTES = 1 << 20
"""Bytes of a body besides its prompts."""
ESCAPED = 6
"""Bytes of a character as JSON may write it."""

# Words in capitals of a path -> what clients may write for them.
_WORDS = {
    "MODEL": r"(?P<model>[\w.\-]+)",
    "-N": r"-(?P<number>[0-9]{1,9})",
    "ROLE": r"(?P<role>\w+)",
    "NAME": r"(?P<name>.+)",
}
Refuse = Callable[["TextService", "Call", "ServeError"], None]


class TargetParts(NamedTuple):
    """The variable parts of a target. `target` is the whole, as sent."""

    target: str
    model: str = ""
    number: int | None = None
    role: str = ""
    name: str = ""
    """A model's, however it is written; not decoded."""


class BodyUse(Enum):
    """The largest content that a route's body may have."""

    TEXT = "one prompt, as text or tokens"
    TEXTS = "several"
    IMAGES = "one prompt with images"
    CHAT = "a conversation with images"


class TextRoute(NamedTuple):
    """One row of an API's table of routes."""

    row: HttpRoute
    make: Callable[[TextService, TargetParts], Endpoint]
    refuse: Refuse
    """Refuses a call that its scope does not allow, in the API's form."""
    gives_way: Yields = Yields.NEVER
    """Whether another dialect of the listener with this path goes first."""
    room: BodyUse | None = None
    """Bounds the route's bodies; None: `limits.body_bytes` alone does."""


class BodyTooLarge(ServeError):
    """A body beyond maxRequestLength."""

    def __init__(self, most_mb: int) -> None:
        text = f"Request body too large. Maximum allowed size is {most_mb}MB."
        super().__init__(Kind.INVALID_ARGUMENT, text)


class RouteTable:
    """The paths of all APIs by their targets. The first that fits counts."""

    def __init__(self, paths: Iterable[TextRoute]) -> None:
        self._plain: dict[tuple[str, str], TextRoute] = {}
        self._patterns: list[tuple[re.Pattern[str], TextRoute]] = []
        for path in paths:
            pattern = _compile(path.row.path)
            if pattern.groups:
                self._patterns.append((pattern, path))
            else:
                self._plain.update({(verb, path.row.path): path for verb in path.row.scopes})

    def find(self, method: str, target: str) -> tuple[TextRoute, TargetParts] | None:
        """The row, and what the target names; None for none."""
        written = target.partition("?")[0]
        path = self._plain.get((method, written))
        if path is not None:
            return path, TargetParts(target)
        for pattern, path in self._patterns:
            match = pattern.fullmatch(written)
            if match is not None and method in path.row.scopes:
                said = match.groupdict()
                number = int(said["number"]) if "number" in said else None
                return path, TargetParts(
                    target, said.get("model", ""), number, said.get("role", ""), said.get("name", "")
                )
        return None


@lru_cache(maxsize=256)
def _compile(path: str) -> re.Pattern[str]:
    text = re.escape(path).replace(r"\-N", "-N")
    for word, pattern in _WORDS.items():
        text = text.replace(word, pattern)
    return re.compile(text, re.ASCII)


def size_fault(service: TextService, room: BodyUse, size: int) -> BodyTooLarge | None:
    """Hold a body against what its route can use; the fault, None for none."""
    options, texts = service.options, service.texts
    if size <= min(LEAST_BYTES, options.request_mb << 20):
        return None
    least = SEVERAL_BYTES if room in (BodyUse.TEXTS, BodyUse.CHAT) else LEAST_BYTES
    most = max(least, ESCAPED * texts.most_characters) + OTHER_BYTES
    if room in (BodyUse.IMAGES, BodyUse.CHAT) and texts.see:
        most += options.max_images * (options.image_mb << 20) * 4 // 3
    most_mb = min(options.request_mb, -(-most >> 20))
    return BodyTooLarge(most_mb) if size > most_mb << 20 else None


def with_size_check(service: TextService, path: TextRoute, room: BodyUse, endpoint: Endpoint) -> Endpoint:
    """The endpoint, for bodies that came without a Content-Length too."""

    def run(call: Call) -> Coroutine[Any, Any, None] | None:
        fault = size_fault(service, room, len(call.body))
        if fault is None:
            return endpoint(call)
        path.refuse(service, call, fault)
        return None

    return run


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One running request. `stopped`: its client asked for an early, successful end."""

    stream: TextStream
    stopped: bool = False


REQUESTS = Metric("_textgen_requests", "Requests that run.", "gauge", ("model",))


class RunningRequests:
    """The running requests of one front process, and how many all of them have."""

    def __init__(self, registry: Registry) -> None:
        self._held: dict[str, RunningRequest] = {}
        self._registry, self._counts = registry, registry.gauges(REQUESTS)

    @contextlib.contextmanager
    def hold(self, model: str, request_id: str, stream: TextStream) -> Iterator[RunningRequest]:
        """Register a request while the block runs; "" is no id. Raises ServeError for an id in use."""
        if request_id in self._held:
            raise ServeError(Kind.ALREADY_EXISTS, "Duplicate request id")
        held = RunningRequest(stream)
        self._counts.of(model).add(1)
        if request_id:
            self._held[request_id] = held
        try:
            yield held
        finally:
            self._held.pop(request_id, None)
            self._counts.of(model).add(-1)

    def count(self, model: str) -> int:
        """Requests of a model, in all front processes."""
        (found,) = self._registry.read(REQUESTS)
        return int(found.get((model,), (0,))[0])

    def stop(self, request_id: str) -> bool:
        """End a request with what it has; False when there is none of that id."""
        held = self._held.get(request_id)
        if held is None:
            return False
        held.stopped = True
        held.stream.cancel()
        return True


NAME = "textgen"


def image_rules(options: TextgenOptions) -> ImageRules:
    """Return the rules for images that clients may name."""
    return ImageRules(
        root=options.image_root,
        urls=options.image_urls,
        private=options.image_urls_private,
        most_bytes=options.image_mb << 20,
    )


class TextService(DialectService):
    """The state of all text endpoints in one front process."""

    def __init__(self, context: ServingContext, options: TextgenOptions) -> None:
        super().__init__(context, NAME)
        self.options = options
        self.texts = TextModels(context, options.default_model)
        self.images = Images(image_rules(options))
        self.running, self.figures = (
            RunningRequests(context.registry),
            MindieMetrics(context.registry, context.state),
        )

    def read(self, call: Call, model: TextModel) -> None:
        """A call was read, and is about to be asked of the model."""
        decoded = self.traffic.stages(model.name, model.version.number)[0]
        decoded.observe_ns(monotonic_ns() - call.received_ns)

    async def answer(
        self,
        call: Call,
        answer: Callable[[TextCall], Awaitable[bool]],
        refuse: Callable[[TextService, Call, ServeError, str], None],
    ) -> None:
        """The life of one call (`answer_text`), refused by an API's own function."""
        await answer_text(call, self.traffic, answer, partial(refuse, self, call))

    def count(self, call: Call, model: TextModel) -> None:
        """A call was answered well."""
        self.traffic.answered(model.name, model.version.number, call.received_ns)


NOT_MINDIE_JSON = "Failed to parse request context to json"
WORK = 16
"""Times a body read into memory: an object is made for each value."""
P = ParamSpec("P")
T = TypeVar("T")


async def read_offloaded(
    service: TextService, call: Call, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what `read` makes of a call's body; a large one is read beside the loop. Raises ServeError."""
    return await service.offload(len(call.body) * WORK, read, *args, **kwargs)


async def read_body(service: TextService, call: Call) -> Any:
    """Return the JSON document of a call's body. Raises ServeError."""
    return await read_offloaded(service, call, read_json, call.body, service.options.json_depth)


@lru_cache(maxsize=8)
def _reader(most_deep: int) -> FreeJSON[Any]:
    return FreeJSON(Any, Bounds(depth=most_deep, values=MOST_VALUES, numbers=MOST_NUMBERS))


def read_json(body: bytes | bytearray, most_deep: int) -> Any:
    """A document. Raises ServeError."""
    try:
        return _reader(most_deep).read(body)
    except DocumentFault as fault:
        more = f": it has {fault.message}" if fault.problem is JSONProblem.TOO_LARGE else ""
        raise invalid(NOT_MINDIE_JSON + more) from None


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number of at most 64 bits, signed or not."""
    return type(value) is int and -(1 << 63) <= value < 1 << 64


Body = TypeVar("Body")
_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")
_NOTHING = re.compile(rb"null|false|-?0+(?:\.0*)?(?:[eE][+-]?[0-9]+)?|\"\"|\[\s*\]|\{\s*\}")
MOST_NOTHING = 64
"""Bytes of a value that may say nothing."""
MOST_VALUES, MOST_NUMBERS = 1 << 16, (1 << 20) + (1 << 14)
"""Limits of one body: a long conversation, and the tokens of the longest prompts."""
BOUNDS = Bounds(values=MOST_VALUES, numbers=MOST_NUMBERS)
TOO_DEEP = "The request body is nested too deeply."
TOO_LARGE = "The request body has "
NOT_JSON = "The request body is not valid JSON"
NOT_UTF8 = "The request body is not valid UTF-8."
MOST_FLOAT = 3.4028234663852886e38
"""Weights and scores are float32 at most."""


class InvalidBody(ServeError):
    """A body that is not what it should be. `field` is the path of what is wrong, "" for the whole;
    `malformed`, that it is no JSON at all."""

    def __init__(self, message: str, field: str = "", *, malformed: bool = False) -> None:
        super().__init__(Kind.INVALID_ARGUMENT, message)
        self.field = field
        self.malformed = malformed


def read_typed(reader: FreeJSON[Body], body: bytes | bytearray) -> Body:
    """The body as its struct. Raises InvalidBody."""
    try:
        return reader.read(body)
    except DocumentFault as fault:
        raise _misread(fault) from None


def _misread(fault: DocumentFault) -> InvalidBody:
    if fault.problem is JSONProblem.MISTYPED:
        return _in_words(fault.message)
    if fault.problem is JSONProblem.TOO_LARGE:
        return InvalidBody(f"{TOO_LARGE}{fault.message}", fault.field)
    if fault.problem is JSONProblem.TOO_DEEP:
        return InvalidBody(TOO_DEEP, malformed=True)
    words = NOT_UTF8 if fault.problem is JSONProblem.NOT_UTF8 else f"{NOT_JSON}: {fault.message}"
    return InvalidBody(words, malformed=True)


def _in_words(text: str) -> InvalidBody:
    found = _PLACE.match(text)
    what, field = found.groups() if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return InvalidBody(f"`{field}` is required", field)
    what = what.replace("`", "")
    what = what[:1].lower() + what[1:]
    return InvalidBody(f"`{field}`: {what}" if field else f"The request body: {what}", field)


def check(good: bool, field: str, what: str) -> None:
    """Raises InvalidBody, which names the field, unless it is good."""
    if not good:
        raise InvalidBody(f"`{field}` {what}", field)


def is_neutral(raw: msgspec.Raw | msgspec.UnsetType, neutral: tuple[bytes, ...] = ()) -> bool:
    """Return whether a key is absent or has no effect: null, false, 0, "" or empty, or one of `neutral`.
    Where true is neutral, null is, and nothing else."""
    if raw is msgspec.UNSET:
        return True
    if len(memoryview(raw)) > MOST_NOTHING:
        return False
    text = bytes(raw).strip()
    if text in neutral or b"true" in neutral:
        return text in (*neutral, b"null")
    return _NOTHING.fullmatch(text) is not None
