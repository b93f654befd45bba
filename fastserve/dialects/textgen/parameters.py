"""MindIE's parameters: their types, bounds and words, in the order in which they are checked (spec 1.2).

The first that is wrong is told. null is absent; keys that nobody knows are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastserve.config import TextgenOptions
from fastserve.dialects.textgen.bodies import is_integer
from fastserve.errors import invalid

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
    """One parameter. `refusal` says what its value is outside of; `{}` is the value."""

    name: str
    kind: str
    holds: Callable[[Any], bool] = lambda value: True
    refusal: str = ""

    def read(self, given: Mapping[str, Any]) -> Any:
        """Its value, None for none. Raises ServeError."""
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


TEMPERATURE = _positive("temperature", "temperature must be in (0.0,3.40282e+38]")
TOP_K = Rule(
    "top_k",
    "integer",
    lambda value: value == -1 or 0 < value <= MOST_INT,
    f"Parameter top_k must be in -1 || (0,{MOST_INT}], got {{}}",
)
TOP_P = _share("top_p", lambda value: 0 < value < 1)


@lru_cache(maxsize=8)
def make_rules(options: TextgenOptions) -> tuple[Rule, ...]:
    """Those of /infer."""
    timeout_s, seed = options.most_timeout_s, (1 << options.seed_bits) - 1
    short = f"strictly positive and small than {timeout_s} seconds"
    return (
        TEMPERATURE,
        TOP_K,
        TOP_P,
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
    """Every parameter that is there. Raises ServeError for the first that is wrong."""
    read = ((rule.name, rule.read(given)) for rule in rules)
    return {name: value for name, value in read if value is not None}
