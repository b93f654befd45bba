"""MindIE's `inputs` and `input_id`: a prompt as text, as texts and images, or as tokens (spec 1.1, 1.2).

Images are only read here, as what names them; fetching and looking at them is `serving.text.images`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastserve.config import TextgenOptions
from fastserve.dialects.textgen.bodies import is_integer
from fastserve.dialects.textgen.errors import Admission, refuse
from fastserve.errors import ServeError, invalid
from fastserve.serving.text import PromptTooLong, TextTooLong, UnknownToken

if TYPE_CHECKING:
    from fastserve.dialects.textgen.service import Service
    from fastserve.wire.call import Call

MOST_TOKENS = MOST_TOKEN = 1 << 20
OTHER_MEDIA = ("video_url", "audio_url")
LENGTH = (
    "Inputs must be necessary and data type must be string and length in (0, {}], "
    "but the length of inputs is {}"
)
TOKENS = f"Inputs token length must be in (0, {MOST_TOKENS}], but got {{}}"
ABNORMAL = "The type of inputs is abnormal"
BAD_TOKEN = "Data element in param input_id is invalid"


@dataclass(frozen=True, slots=True)
class Inputs:
    """A prompt: text or tokens, and what names its images."""

    prompt: str | Sequence[int]
    images: tuple[str, ...] = ()


def read_inputs(body: Mapping[str, Any], options: TextgenOptions) -> Inputs:
    """Raises ServeError."""
    if "inputs" in body and "input_id" in body:
        raise invalid("Input conflict.")
    if "input_id" in body:
        return Inputs(read_tokens(body["input_id"]))
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
    return Inputs(given)


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
        raise invalid(TOKENS.format(count))


def check_length(text: str, most: int) -> None:
    """Raises ServeError. What is counted are UTF-16 units."""
    units = len(text)
    if 2 * units > most and not text.isascii():
        units = len(text.encode("utf-16-le")) // 2
    if not 0 < units <= most:
        raise too_long(units, most)


def too_long(units: int, most: int) -> ServeError:
    return invalid(LENGTH.format(most, units))


def in_mindies_words(fault: ServeError) -> ServeError:
    """What is wrong with a prompt, found where it meets its model, as MindIE tells it."""
    if isinstance(fault, TextTooLong):
        return too_long(fault.got, fault.most)
    if isinstance(fault, UnknownToken):
        return invalid(BAD_TOKEN)
    if not isinstance(fault, PromptTooLong):
        return fault
    if not 0 < fault.got <= MOST_TOKENS:
        return invalid(TOKENS.format(fault.got))
    return Admission(fault.got, fault.most)


def refuse_prompt(service: Service, call: Call, fault: ServeError, model: str = "") -> None:
    """`refuse` of calls whose prompt may be what is wrong."""
    refuse(service, call, in_mindies_words(fault), model)


def read_items(items: list[Any], options: TextgenOptions) -> Inputs:
    """Texts and images, in their order. Raises ServeError."""
    if not items:
        raise invalid("Inputs arr is empty")
    texts: list[str] = []
    images: list[str] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            texts.append(_read_text(item.get("text"), options))
        elif kind == "image_url":
            images.append(_read_image(item.get(kind)))
            if len(images) > options.max_images:
                raise invalid(f"The number of multimodal url should be no more than {options.max_images}")
        else:
            raise _other(item, kind)
    text = "".join(texts)
    check_length(text, options.input_chars)
    return Inputs(text, tuple(images))


def _read_text(given: Any, options: TextgenOptions) -> str:
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


def _other(item: Any, kind: Any) -> ServeError:
    if kind not in OTHER_MEDIA:
        return invalid(ABNORMAL)
    what = "null" if item.get(kind) is None else "is not supported: models here take text and images"
    return invalid(f"Request param {kind} {what}")
