"""Dataclasses and tensors of torch as safe bytes, and pickle as the named choice."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fastserve.codec.object_codecs import CODECS
from fastserve.codec.safe_msgpack import MAIN, SCRIPT, CannotTravel, Damaged, decode, encode

called: list[str] = []


@dataclass
class Point:
    """An ordinary one, whose methods are not called in reading."""

    x: float
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        called.append("post")


@dataclass(frozen=True)
class Frozen:
    """One that refuses assignments."""

    point: Point
    pair: tuple[int, int]


class Slotted:
    __slots__ = ()


@dataclass
class Late:
    """One whose field has no value before it is set."""

    x: int = field(init=False)


@dataclass
class Number(int):
    """One that is made by a `__new__` of its own."""

    x: int = 0


class Undecorated(Point):
    """A subclass whose own fields nobody declared."""


def test_dataclasses_are_kept_with_their_types() -> None:
    value = {"a": [Frozen(Point(0.5, ["t"]), (1, 2)), None], "b": (Point(1.0),)}
    called.clear()
    assert decode(encode(value)) == value
    assert called == []
    assert type(decode(encode(value))["a"][0].pair) is tuple


def test_dataclasses_that_would_change_are_named() -> None:
    @dataclass
    class Local:
        x: int

    odd = Point(1.0)
    odd.extra = 1  # type: ignore[attr-defined]
    for value, said in (
        (Local(1), "not found by that name"),
        ([odd], r"value\[0\]: .*no fields: extra"),
        (Late(), "without a value of x"),
        (Number(), "__new__"),
        (Undecorated(1.0), "Undecorated cannot travel"),
        (Point(1.0, [object()]), r"value\.tags\[0\]: objects of type object"),  # type: ignore[list-item]
    ):
        with pytest.raises(CannotTravel, match=said):
            encode(value)


def test_a_message_makes_no_class_that_is_not_a_known_dataclass() -> None:
    good = encode(Point(1.0))
    for other in (b"Slots", b"Moved"):
        with pytest.raises(Damaged, match="not known here"):
            decode(good.replace(b"Point", other))
    changed = encode(Point(1.0)).replace(b"\xa4tags", b"\xa4gats")
    with pytest.raises(Damaged, match="other fields"):
        decode(changed)
    module = __name__.encode()
    unimported = b"x" * len(module)
    with pytest.raises(Damaged, match="not known here"):
        decode(good.replace(module, unimported))
    assert unimported.decode() not in sys.modules


@pytest.mark.parametrize("name", ["msgpack", "pickle"])
def test_classes_of_a_script_have_one_name_in_both_processes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script is __main__ where it was started, and a module of another name in its workers."""
    codec = CODECS[name]
    text = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(): pass\n"

    def script(module_name: str) -> types.ModuleType:
        made = types.ModuleType(module_name)
        monkeypatch.setitem(sys.modules, module_name, made)
        exec(text, made.__dict__)
        return made

    main = script(MAIN)
    sent = codec.encode([main.P(1)])
    there = script(SCRIPT)
    received = codec.decode(sent)
    assert type(received[0]) is there.P
    back = codec.encode(received)
    monkeypatch.delitem(sys.modules, SCRIPT)
    assert type(codec.decode(back)[0]) is main.P
    if name == "pickle":
        monkeypatch.setitem(sys.modules, SCRIPT, there)
        named = codec.encode((there.P, there.f))
        monkeypatch.delitem(sys.modules, SCRIPT)
        assert codec.decode(named) == (main.P, main.f)


TENSORS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
    lambda: torch.ones(3, dtype=torch.bfloat16),
    lambda: torch.tensor(1.5),
    lambda: torch.empty(0, 4),
    lambda: torch.tensor([True, False]),
    lambda: torch.tensor([1 + 2j]).conj(),
    lambda: torch.ones(2, requires_grad=True),
]


@pytest.mark.parametrize("make", TENSORS)
def test_tensors_of_torch_are_kept(make: Callable[[], torch.Tensor]) -> None:
    value = make()
    found = decode(encode([value]))[0]
    assert (type(found), found.dtype, found.shape) == (torch.Tensor, value.dtype, value.shape)
    assert torch.equal(found, value.detach())
    assert not found.requires_grad
    found.zero_()  # the receiver's own
    assert torch.equal(make().detach(), value.detach())


@pytest.mark.parametrize(
    "make",
    [lambda: torch.eye(2).to_sparse(), lambda: torch.nn.Parameter(torch.ones(1)), lambda: torch.float32],
)
def test_what_is_no_dense_tensor_is_named(make: Callable[[], Any]) -> None:
    with pytest.raises(CannotTravel, match="objects of type torch"):
        encode(make())


def test_pickle_takes_what_msgpack_refuses() -> None:
    value = {1 + 2j, Slotted}
    assert CODECS["pickle"].decode(CODECS["pickle"].encode(value)) == value
    with pytest.raises(CannotTravel, match="a function cannot be pickled"):
        CODECS["pickle"].encode(lambda: None)
