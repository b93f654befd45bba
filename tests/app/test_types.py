"""Types of parameters: what a body that does not fit is told, by field and place, for each kind of type."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pydantic
import pytest
from PIL import Image

from fastserve.backends.script.json_body import BodyReader, write_json
from fastserve.errors import Kind, ServeError


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0)


class Point(msgspec.Struct):
    x: Annotated[float, msgspec.Meta(le=1)]


@dataclass
class Span:
    begin: int
    end: int

    def __post_init__(self) -> None:
        if self.end < self.begin:
            raise ValueError("end: before begin")


class Box(TypedDict):
    width: int


class Color(enum.Enum):
    RED = "red"


def people(people: list[Person], best: Person | None = None) -> Any:
    return people


def one(person: Person) -> Any:
    return person


def mixed(points: list[Point], span: Span, box: Box, color: Color, how: Literal["a", "b"]) -> Any:
    return points, span, box, color, how


GOOD = (
    b'{"points": [{"x": 1}], "span": {"begin": 1, "end": 2}, "box": {"width": 1}, "color": "red", "how": "a"}'
)


def read(function: Callable[..., Any], body: bytes) -> Any:
    positional, named = BodyReader(inspect.signature(function, eval_str=True), "f").read(body)
    return function(*positional, **named)


def test_good_ones_are_made() -> None:
    assert read(one, b'{"name": "Ann", "age": 3}') == Person(name="Ann", age=3)
    assert read(people, b'{"people": [{"name": "Ann", "age": 3}]}') == [Person(name="Ann", age=3)]
    assert read(mixed, GOOD) == ([Point(1)], Span(1, 2), {"width": 1}, Color.RED, "a")
    told = write_json({"all": [Person(name="Ann", age=3), Point(0.5), Span(1, 2), Color.RED]})
    assert told == b'{"all":[{"name":"Ann","age":3},{"x":0.5},{"begin":1,"end":2},"red"]}'


def picture(image: Image.Image) -> None: ...


@pytest.mark.parametrize(
    ("function", "body", "said"),
    [
        (one, b'{"name": "Ann", "age": -1}', "age: Input should be greater than or equal to 0"),
        (one, b"{}", "name: Field required; age: Field required"),
        (
            people,
            b'{"people": [{"name": "A", "age": 1}, {"name": "B"}]}',
            "age: Field required - at `$.people[1]`",
        ),
        (
            people,
            b'{"people": [], "best": {"name": 5, "age": 1}}',
            "name: Input should be a valid string - at `$.best`",
        ),
        (mixed, GOOD.replace(b'"x": 1', b'"x": 2'), "at `$.points[0].x`"),
        (mixed, GOOD.replace(b'"end": 2', b'"end": 0'), "end: before begin - at `$.span`"),
        (mixed, GOOD.replace(b'"width": 1', b'"width": "1"'), "at `$.box.width`"),
        (mixed, GOOD.replace(b'"red"', b'"blue"'), "Invalid enum value 'blue' - at `$.color`"),
        (mixed, GOOD.replace(b'"a"', b'"c"'), "at `$.how`"),
        (one, b'{"name": "\xfe", "age": 1}', "the body is not UTF-8, at byte "),
        (people, b'{"people": [{"name": "\xe2\x82"}]}', "the body is not UTF-8, at byte "),
        (
            picture,
            b'{"image": "aGVsbG8="}',
            "no image that can be read: Unidentified",
        ),
    ],
)
def test_an_error_names_field_and_place(function: Callable[..., Any], body: bytes, said: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(function, body)
    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert said in caught.value.message, caught.value.message
