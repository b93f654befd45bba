"""Which input is which argument of forward, and which output which result: Triton's rules."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fastserve.backends.frameworks.torch_program import (
    ForwardParameters,
    InputPlan,
    OutputPlan,
    read_signature,
)
from fastserve.errors import ConfigError


def forward_of(*names: str, optional: tuple[str, ...] = ()) -> ForwardParameters:
    return ForwardParameters(names, frozenset(names).difference(optional))


def called(names: list[str], forward: ForwardParameters) -> tuple[Any, Any]:
    return InputPlan(names, forward).call(
        lambda *args, **named: (args, named), {name: name for name in names}
    )


@pytest.mark.parametrize(
    ("names", "forward", "wanted"),
    [
        (["b", "a"], forward_of("a", "b"), (("a", "b"), {})),
        (["INPUT__1", "INPUT__0"], forward_of("a", "b"), (("INPUT__0", "INPUT__1"), {})),
        (["IN__0", "OTHER__1"], forward_of("a", "b"), (("IN__0", "OTHER__1"), {})),
        (["q", "p"], forward_of("a", "b"), (("q", "p"), {})),
        (["a", "INPUT__1"], forward_of("a", "b"), (("a", "INPUT__1"), {})),
        (["c", "a"], forward_of("a", "b", "c", optional=("b",)), (("a",), {"c": "c"})),
        (["a"], forward_of("a", "b", optional=("b",)), (("a",), {})),
        (["q"], forward_of("a", "b", optional=("b",)), (("q",), {})),
        (["a", "b"], ForwardParameters(("a", "b"), frozenset("ab"), frozenset("b")), (("a",), {"b": "b"})),
        (
            ["k", "a"],
            ForwardParameters(("batch",), frozenset(("batch",)), takes_dict=True),
            (({"k": "k", "a": "a"},), {}),
        ),
    ],
)
def test_inputs_find_their_arguments(names: list[str], forward: ForwardParameters, wanted: Any) -> None:
    assert called(names, forward) == wanted


@pytest.mark.parametrize(
    ("names", "forward", "words"),
    [
        (["a"], forward_of("a", "b"), "forward needs arguments that are not declared as inputs: b"),
        (["q"], forward_of("a", "b"), "1 inputs are declared (q), forward takes 2: a, b"),
        (["p", "q", "r"], forward_of("a", "b"), "3 inputs are declared (p, q, r), forward takes 2: a, b"),
        (["IN__0", "IN__2"], forward_of("a", "b"), "the positions they end with must be 0 to 1"),
        (["IN__0", "X__0"], forward_of("a", "b"), "the positions they end with must be 0 to 1"),
    ],
)
def test_inputs_that_do_not(names: list[str], forward: ForwardParameters, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        InputPlan(names, forward)


def test_signatures() -> None:
    def plain(a, b=1, *, c): ...
    def takes(batch: dict[str, torch.Tensor]): ...
    def anything(*args, **more): ...

    assert read_signature(plain) == ForwardParameters(("a", "b", "c"), frozenset("ac"), frozenset("c"))
    assert read_signature(takes).takes_dict
    assert read_signature(anything).open


@pytest.mark.parametrize(
    ("names", "result", "wanted"),
    [
        (["y"], 1, {"y": 1}),
        (["b", "a"], (1, 2), {"b": 1, "a": 2}),
        (["OUT__1"], (1, 2), {"OUT__1": 2}),
        (["OUT__1", "OUT__0"], [1, 2], {"OUT__1": 2, "OUT__0": 1}),
        (["b"], {"a": 1, "b": 2}, {"b": 2}),
        (["OUT__0"], {"a": 1, "b": 2}, {"OUT__0": 1}),
    ],
)
def test_outputs_by_name_and_place(names: list[str], result: Any, wanted: Any) -> None:
    assert OutputPlan(names).read(result) == wanted
