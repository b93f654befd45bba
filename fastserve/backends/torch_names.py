"""Which tensor of a model's config is which argument and which result of its `forward`.

The rules are those of Triton's pytorch backend (triton-inference-server/pytorch_backend, libtorch.cc):

    forward(self, batch: Dict[str, Tensor])     every input is an entry, by its name
    input names are forward's argument names    each goes where its name is
    NAME__0, NAME__1, ...                       each goes to the position its name ends with
    any other names                             in the order they are declared

Outputs: entries of a dict by name; else positions as their names end; else the order they are declared.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastserve.backends.outputs import output_fault
from fastserve.backends.torch_tensors import Tensors
from fastserve.errors import ConfigError

_INDEXED = re.compile(r".*?__(\d+)")


@dataclass(frozen=True, slots=True)
class Forward:
    """What is known of a model's `forward`. `names` are its arguments in order, those of `required` without a
    default; `keywords` are the ones it takes by name alone. `open`: it takes others too."""

    names: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    keywords: frozenset[str] = field(default_factory=frozenset)
    takes_dict: bool = False
    open: bool = False


def read_signature(forward: Any) -> Forward:
    """Of a function of Python's."""
    names, required, keywords, several = [], set(), set(), False
    for name, one in inspect.signature(forward).parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            several = True
            continue
        names.append(name)
        if one.default is one.empty:
            required.add(name)
        if one.kind is one.KEYWORD_ONLY:
            keywords.add(name)
    sole = list(inspect.signature(forward).parameters.values())[:1]
    takes_dict = len(names) == 1 and not several and _is_dict(sole[0].annotation)
    return Forward(tuple(names), frozenset(required), frozenset(keywords), takes_dict, several)


def _is_dict(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return bool(re.match(r"(typing\.)?(dict|Dict|Mapping)\b", text))


def read_schema(schema: Any) -> Forward:
    """Of a TorchScript method, whose first argument is the module."""
    arguments = schema.arguments[1:]
    return Forward(
        tuple(one.name for one in arguments),
        frozenset(one.name for one in arguments if not one.has_default_value()),
        takes_dict=len(arguments) == 1 and str(arguments[0].type).startswith("Dict"),
    )


class InputPlan:
    """Made once; calls a model with tensors by name."""

    def __init__(self, names: Sequence[str], forward: Forward) -> None:
        """Raises ConfigError when inputs and arguments cannot be brought together."""
        self._dict = forward.takes_dict
        self._order: list[str] = []
        self._named: dict[str, str] = {}
        if not self._dict:
            places = _places(list(names), forward)
            self._order = [name for name, place in places if isinstance(place, int)]
            self._named = {place: name for name, place in places if isinstance(place, str)}

    def call(self, model: Any, tensors: Tensors) -> Any:
        """What `forward` returns."""
        if self._dict:
            return model(dict(tensors))
        named = {argument: tensors[name] for argument, name in self._named.items() if name in tensors}
        return model(*[tensors[name] for name in self._order], **named)


def _places(names: list[str], forward: Forward) -> list[tuple[str, int | str]]:
    """Each input with its position, in the order of these, or with the name of its argument."""
    if all(name in forward.names for name in names):
        missing = forward.required.difference(names)
        if missing:
            raise ConfigError(f"forward needs arguments that are not declared as inputs: {_listed(missing)}")
        return _by_argument(names, forward)
    indexes = positions(names)
    places = list(range(len(names))) if indexes is None else indexes
    if sorted(places) != list(range(len(names))):
        raise ConfigError(
            f"inputs {_listed(names)}: the positions they end with must be 0 to {len(names) - 1}"
        )
    by_position = sorted(zip(places, names, strict=True))
    room = [name for name in forward.names if name not in forward.keywords]
    fewest = len(forward.required - forward.keywords)
    if not forward.open and not fewest <= len(names) <= len(room):
        wanted = f"{fewest} to {len(room)}" if fewest < len(room) else str(fewest)
        text = f"{len(names)} inputs are declared ({_listed(names)})"
        raise ConfigError(f"{text}, forward takes {wanted}: {_listed(forward.names) or 'nothing'}")
    return [(name, place) for place, name in by_position]


def _by_argument(names: list[str], forward: Forward) -> list[tuple[str, int | str]]:
    """Positions as long as none is left out, then by keyword."""
    found: list[tuple[str, int | str]] = []
    gap = False
    for place, argument in enumerate(forward.names):
        gap = gap or argument in forward.keywords or argument not in names
        if argument in names:
            found.append((argument, argument if gap else place))
    return found


def positions(names: Sequence[str]) -> list[int] | None:
    """The positions that all names end with (NAME__0); None when one of them does not."""
    found = [_INDEXED.fullmatch(name) for name in names]
    return [int(one[1]) for one in found if one] if names and all(found) else None


class OutputPlan:
    """Made once; gives what a model returned by the names that are declared."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._positions = positions(names)

    def read(self, result: Any) -> dict[str, Any]:
        """Raises ServeError INTERNAL naming what is missing."""
        if isinstance(result, Mapping):
            return self._of_mapping(result)
        values = list(result) if isinstance(result, list | tuple) and not _strings(result) else [result]
        if self._positions is None and len(values) != len(self._names):
            told = f"{len(self._names)} are declared ({_listed(self._names)})"
            raise output_fault(f"the model returned {len(values)} outputs, {told}")
        found = {}
        for place, name in enumerate(self._names):
            at = place if self._positions is None else self._positions[place]
            if at >= len(values):
                raise output_fault(f"the model returned {len(values)} outputs, there is none for {name!r}")
            found[name] = values[at]
        return found

    def _of_mapping(self, result: Mapping[Any, Any]) -> dict[str, Any]:
        missing = [name for name in self._names if name not in result]
        if missing and self._positions is not None and max(self._positions) < len(result):
            values = list(result.values())
            return {name: values[at] for name, at in zip(self._names, self._positions, strict=True)}
        if missing:
            raise output_fault(
                f"the model returned no output {missing[0]!r}, but {_listed(map(str, result))}"
            )
        return {name: result[name] for name in self._names}


def _strings(result: Any) -> bool:
    return bool(result) and isinstance(result, list) and all(isinstance(item, str) for item in result)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names) if isinstance(names, set | frozenset) else names)
