"""MindIE's requests and errors: the bounds and messages of its parameters, inputs and refusals (spec 1).

OpenAI's and TGI's endpoints use them in MindIE's compatibility mode. Parameters are checked in the
original's order and the first wrong one is reported; null counts as absent, unknown keys are ignored.
Images are only read as references here; serving.text.images fetches them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from fastserve.codec.generation import Sampling
from fastserve.dialects.text_common.endpoint_parts import BodyTooLarge, is_integer
from fastserve.errors import Kind, ServeError, invalid
from fastserve.net.router import common_status, fault_headers
from fastserve.serving.text import PromptTooLong, TextTooLong, UnknownToken
from fastserve.settings import TextgenOptions

if TYPE_CHECKING:
    from fastserve.dialects.text_common.endpoint_parts import TextService
    from fastserve.net.request import Call


STATUS: dict[Kind, int] = {
    Kind.CANCELLED: 500,
    Kind.UNKNOWN: 500,
    Kind.INVALID_ARGUMENT: 422,
    Kind.DEADLINE_EXCEEDED: 500,
    Kind.NOT_FOUND: 404,
    Kind.ALREADY_EXISTS: 400,
    Kind.PERMISSION_DENIED: 403,
    Kind.RESOURCE_EXHAUSTED: 503,
    Kind.FAILED_PRECONDITION: 422,
    Kind.ABORTED: 500,
    Kind.OUT_OF_RANGE: 424,
    Kind.UNIMPLEMENTED: 501,
    Kind.INTERNAL: 500,
    Kind.UNAVAILABLE: 503,
    Kind.DATA_LOSS: 500,
    Kind.UNAUTHENTICATED: 401,
}
ERROR_TYPE = {
    400: "Bad Request",
    404: "NotFoundError",
    422: "Input Validation Error",
    424: "Generation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}
SERVER = "MindIE Server"
NO_ANSWER = "Failed to get engine response"


class PromptOverLimit(ServeError):
    """A prompt of more tokens than the model takes."""

    def __init__(self, got: int, most: int) -> None:
        text = (
            "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than "
            f"{most},the input ids length is {got}"
        )
        super().__init__(Kind.OUT_OF_RANGE, text)


def envelope(status: int, message: str) -> bytes:
    """An error as JSON. Characters that UTF-8 has not are replaced."""
    told = ERROR_TYPE.get(status) or HTTPStatus(status).phrase
    text = msgspec.json.encode(message.encode("utf-8", "replace").decode())
    return b'{"error":%b,"error_type":"%b"}' % (text, told.encode())


def refuse(service: TextService, call: Call, fault: ServeError, model: str = "") -> None:
    """Reply with an error, count it, and close the connection as the original does."""
    service.count_fault(model, fault, call)
    if isinstance(fault, BodyTooLarge):
        call.reply(413, b'{"message":"%b"}' % fault.message.encode(), close=True)
        return
    status = common_status(fault) or STATUS[fault.kind]
    call.reply(status, envelope(status, fault.message), headers=fault_headers(fault), close=True)


def tell(service: TextService, fault: ServeError, model: str) -> bytes:
    """An error in a stream that has begun, which is the last of it; it is counted."""
    service.traffic.refused(model, fault.kind.name)
    if service.options.stream_errors == "event":
        return b"data: %b\n\n" % envelope(common_status(fault) or STATUS[fault.kind], fault.message)
    return (fault.message if fault.kind is Kind.DEADLINE_EXCEEDED else NO_ANSWER).encode()


MOST_TOKENS = MOST_TOKEN = 1 << 20
OTHER_MEDIA = ("video_url", "audio_url")
LENGTH = (
    "Inputs must be necessary and data type must be string and length in (0, {}], "
    "but the length of inputs is {}"
)
TOKEN_COUNT = f"Inputs token length must be in (0, {MOST_TOKENS}], but got {{}}"
ABNORMAL = "The type of inputs is abnormal"
BAD_TOKEN = "Data element in param input_id is invalid"


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """A prompt: text or tokens, and what names its images."""

    prompt: str | Sequence[int]
    images: tuple[str, ...] = ()


def read_inputs(body: Mapping[str, Any], options: TextgenOptions) -> PromptInputs:
    """Raises ServeError."""
    if "inputs" in body and "input_id" in body:
        raise invalid("Input conflict.")
    if "input_id" in body:
        return PromptInputs(read_tokens(body["input_id"]))
    if "inputs" not in body:
        raise invalid("Not found inputs.")
    given = body["inputs"]
    if given is None:
        raise invalid("Inputs must not be null")
    if isinstance(given, list):
        return read_items(given, options)
    if not isinstance(given, str):
        raise invalid(ABNORMAL)
    check_length(given, options.input_chars)
    return PromptInputs(given)


def read_tokens(given: Any) -> list[int]:
    """Raises ServeError."""
    if given is None:
        raise invalid("Input_id should not be empty")
    if not isinstance(given, list):
        raise invalid("Parameter input_id must be an array")
    for token in given:
        if not is_integer(token):
            raise invalid("Parameter input_id must be integer")
        if not 0 <= token <= MOST_TOKEN:
            raise invalid(BAD_TOKEN)
    check_tokens(len(given))
    return given


def check_tokens(count: int) -> None:
    """Raises ServeError."""
    if not 0 < count <= MOST_TOKENS:
        raise invalid(TOKEN_COUNT.format(count))


def check_length(text: str, most: int) -> None:
    """Raises ServeError. What is counted are UTF-16 units."""
    units = len(text)
    if 2 * units > most and not text.isascii():
        units = len(text.encode("utf-16-le")) // 2
    if not 0 < units <= most:
        raise too_long(units, most)


def too_long(units: int, most: int) -> ServeError:
    return invalid(LENGTH.format(most, units))


def as_mindie_fault(fault: ServeError) -> ServeError:
    """Return a fault of a prompt, found by its model, with MindIE's message."""
    if isinstance(fault, TextTooLong):
        return too_long(fault.got, fault.most)
    if isinstance(fault, UnknownToken):
        return invalid(BAD_TOKEN)
    if not isinstance(fault, PromptTooLong):
        return fault
    if not 0 < fault.got <= MOST_TOKENS:
        return invalid(TOKEN_COUNT.format(fault.got))
    return PromptOverLimit(fault.got, fault.most)


def refuse_prompt(service: TextService, call: Call, fault: ServeError, model: str = "") -> None:
    """`refuse` of calls whose prompt may be what is wrong."""
    refuse(service, call, as_mindie_fault(fault), model)


def read_items(items: list[Any], options: TextgenOptions) -> PromptInputs:
    """Texts and images, in their order. Raises ServeError."""
    if not items:
        raise invalid("Inputs arr is empty")
    texts: list[str] = []
    images: list[str] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            texts.append(_read_text_item(item.get("text"), options))
        elif kind == "image_url":
            images.append(_read_image(item.get(kind)))
            if len(images) > options.max_images:
                raise invalid(f"The number of multimodal url should be no more than {options.max_images}")
        else:
            raise _refuse_item(item, kind)
    text = "".join(texts)
    check_length(text, options.input_chars)
    return PromptInputs(text, tuple(images))


def _read_text_item(given: Any, options: TextgenOptions) -> str:
    if not isinstance(given, str):
        raise invalid("Request param text must be string")
    check_length(given, options.input_chars)
    return given


def _read_image(given: Any) -> str:
    if isinstance(given, dict):
        given = given.get("url")
    if given is None:
        raise invalid("Request param image_url null")
    if not isinstance(given, str):
        raise invalid("Request param image_url must be string")
    return given


def _refuse_item(item: Any, kind: Any) -> ServeError:
    if kind not in OTHER_MEDIA:
        return invalid(ABNORMAL)
    what = "null" if item.get(kind) is None else "is not supported: models here take text and images"
    return invalid(f"Request param {kind} {what}")


MOST_FLOAT = 3.4028234663852886e38
MOST_INT = (1 << 31) - 1
WANTED: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": is_integer,
    "unsigned": lambda value: is_integer(value) and value >= 0,
    "float": lambda value: type(value) in (int, float),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter: its type, its bound, and the message for a value out of bounds, with `{}` for the
    value."""

    name: str
    kind: str
    holds: Callable[[Any], bool] = lambda value: True
    refusal: str = ""

    def read(self, given: Mapping[str, Any]) -> Any:
        """Return the parameter's value, None when it is absent. Raises ServeError."""
        value = take(given, self.name, self.kind)
        if value is not None and not self.holds(value):
            raise invalid(self.refusal.format(show(value)))
        return value


def take(given: Mapping[str, Any], name: str, kind: str) -> Any:
    """The value of a key, None where it is null or absent. Raises ServeError where it is of another type."""
    value = given.get(name)
    if value is not None and not WANTED[kind](value):
        raise invalid(f"{name} must be {kind} type.")
    return value


def show(value: float) -> str:
    """A number as C++ prints it."""
    return str(value) if is_integer(value) else f"{as_float(value):g}"


def as_float(value: float) -> float:
    """A number of any size."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _positive(name: str, told: str) -> Rule:
    """A float above 0. The words of one have no dot at the end of its range, of another quotes."""
    return Rule(
        name, "float", lambda value: 0 < as_float(value) <= MOST_FLOAT, f"Parameter {told}, got {{}}."
    )


def _share(name: str, holds: Callable[[Any], bool]) -> Rule:
    """A share of probability. 1 is within these words, and not within the bounds of every one."""
    return Rule(name, "float", holds, f"Parameter {name} must be in (0.0,1.0], got {{}}.")


def _whole(name: str, kind: str, least: int, most: int, told: str) -> Rule:
    return Rule(
        name, kind, lambda value: least <= value <= most, f"Parameter {name} must be {told}, got {{}}."
    )


@lru_cache(maxsize=8)
def make_rules(options: TextgenOptions) -> tuple[Rule, ...]:
    """Return the rules of /infer."""
    timeout_s, seed = options.most_timeout_s, (1 << options.seed_bits) - 1
    short = f"strictly positive and small than {timeout_s} seconds"
    return (
        _positive("temperature", "temperature must be in (0.0,3.40282e+38]"),
        Rule(
            "top_k",
            "integer",
            lambda value: value == -1 or 0 < value <= MOST_INT,
            f"Parameter top_k must be in -1 || (0,{MOST_INT}], got {{}}",
        ),
        _share("top_p", lambda value: 0 < value < 1),
        _share("typical_p", lambda value: 0 < value <= 1),
        Rule("do_sample", "boolean"),
        _whole("seed", "unsigned", 0, seed, f"in [0, {seed})"),  # its words there; the last one is allowed
        _positive("repetition_penalty", "'repetition_penalty' must be in (0.0, 3.40282e+38]"),
        Rule("watermark", "boolean"),
        _whole("priority", "unsigned", 1, 5, "in [1,5]"),
        _whole("max_new_tokens", "integer", 1, MOST_INT, f"in (0,{MOST_INT}]"),
        _whole("timeout", "unsigned", 1, timeout_s, short),
        Rule("details", "boolean"),
    )


def read_parameters(rules: tuple[Rule, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all given parameters. Raises ServeError for the first that is wrong."""
    read = ((rule.name, rule.read(given)) for rule in rules)
    return {name: value for name, value in read if value is not None}


SEED_BITS = 53
"""Size of a seed that is chosen here: every client can read it, and send it again."""
CHOOSING = ("temperature", "top_p")
"""Parameters that turn sampling on, unless do_sample is given."""


@dataclass(frozen=True, slots=True)
class MindieRequest:
    """One request of MindIE's API, as read."""

    inputs: PromptInputs
    sampling: Sampling
    seed: int | None = None
    priority: int = 5
    timeout_s: int = 600
    details: bool = False
    stream: bool = False
    request_id: str = ""
    """The client's own, "" for none."""
    output: str = ""
    """The name of a token infer's output."""


def read_infer(body: Any, rules: tuple[Rule, ...], options: TextgenOptions) -> MindieRequest:
    """Raises ServeError."""
    body = body if isinstance(body, dict) else {}
    inputs = read_inputs(body, options)
    given = read_parameters(rules, take(body, "parameters", "object") or {})
    return make_request(inputs, given, options, stream=bool(take(body, "stream", "boolean")))


def make_request(
    inputs: PromptInputs,
    given: dict[str, Any],
    options: TextgenOptions,
    *,
    stream: bool,
    request_id: str = "",
) -> MindieRequest:
    """A request of parameters that are right."""
    return MindieRequest(
        inputs,
        read_sampling(given),
        seed=given.get("seed"),
        priority=given.get("priority", 5),
        timeout_s=given.get("timeout", min(options.timeout_s, options.most_timeout_s)),
        details=given.get("details", False),
        stream=stream,
        request_id=request_id,
    )


def read_sampling(given: dict[str, Any]) -> Sampling:
    """typical_p and watermark are checked and do nothing, as in the original."""
    top_k = max(0, given.get("top_k", 0))
    chosen = any(name in given for name in CHOOSING) or top_k > 0
    return Sampling(
        max_new_tokens=given.get("max_new_tokens", 20),
        do_sample=given.get("do_sample", chosen),
        temperature=float(given.get("temperature", 1.0)),
        top_k=top_k,
        top_p=float(given.get("top_p", 1.0)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
    )
