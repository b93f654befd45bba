"""LoRA adapters of one model on torch: what each adds to linear layers, for the tokens that have it.

    y = W x + scale * B A x          A [rank, inputs], B [outputs, rank]

W is never changed: a step computes it once for all tokens, in float or int8. Then each adapter of the step
adds its two small products to the rows of its tokens:

    tokens     t0 t1 t2 t3 t4        y[1], y[3] += B1 A1 x[1], x[3]
    adapters    0  1  2  1  0        y[2]       += B2 A2 x[2]

A step without adapters runs the layers alone. Folders are those of PEFT (folder.find_adapters).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from fastserve.backends.llm.folder import ADAPTER_WEIGHTS, ADAPTERS, AdapterConfig
from fastserve.errors import ConfigError

log = logging.getLogger(__name__)
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class LowRank(NamedTuple):
    """The part of an adapter for one linear layer: `down` [rank, inputs], `up` [rank, outputs], with its
    scale."""

    down: torch.Tensor
    up: torch.Tensor

    def to(self, device: torch.device) -> LowRank:
        """Return it on a device."""
        return LowRank(self.down.to(device), self.up.to(device))


class Adapters:
    """The adapters of a model by number, from 1; and which tokens of the running step have them."""

    def __init__(
        self, names: list[str], layers: Mapping[str, Mapping[int, LowRank]], widths: Mapping[str, int]
    ) -> None:
        """`layers`: by a layer's name, then by adapter. `widths`: the outputs of all linear layers."""
        self.names = names
        self.groups: list[tuple[int, torch.Tensor | None]] = []
        """The adapters of the running step with the places of their tokens, None for all."""
        self.tokens = 0
        """Tokens of the running step, where it has adapters."""
        self._joined: set[str] = set()
        self._layers, self._widths, self._device = layers, widths, torch.device("cpu")

    @classmethod
    def read(cls, found: Mapping[str, AdapterConfig], model: Any) -> Adapters:
        """Read the weights of adapters for transformers' model, in its dtype. Raises ConfigError for weights
        that do not fit it."""
        layers: dict[str, dict[int, LowRank]] = {}
        shapes = _linear_shapes(model)
        for number, (name, config) in enumerate(found.items(), 1):
            try:
                for layer, one in _read_layers(config, shapes, model.dtype).items():
                    layers.setdefault(layer, {})[number] = one
            except ConfigError as error:
                raise ConfigError(f"{ADAPTERS}/{name}/{ADAPTER_WEIGHTS}: {error}") from None
        made = cls(list(found), layers, {layer: outputs for layer, (_, outputs) in shapes.items()})
        if found:
            log.info("%d adapters take %d bytes", len(found), made.nbytes)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for layer in self._layers.values() for one in layer.values() for part in one)

    def to(self, device: torch.device) -> Adapters:
        """Move all weights to a device. Raises torch's own error when memory is short."""
        self._layers = {
            name: {number: one.to(device) for number, one in layer.items()}
            for name, layer in self._layers.items()
        }
        self._device = device
        return self

    def begin(self, numbers: np.ndarray | None) -> None:
        """Begin a step whose tokens have the adapters of these numbers, 0 for none; None: no token has
        one."""
        self.groups = []
        if numbers is None:
            return
        self.tokens = len(numbers)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            whole = len(places) == self.tokens
            if number:
                at = None if whole else torch.from_numpy(places).to(self._device)
                self.groups.append((number, at))

    @property
    def layers(self) -> list[str]:
        """The names of the layers to which any of them adds."""
        return list(self._layers)

    def join(self, names: list[str]) -> dict[int, JoinedRank]:
        """Return what each adapter adds to a product that joins the layers of these names, by its number."""
        found: dict[int, list[tuple[slice, LowRank]]] = {}
        self._joined.update(names)
        start = 0
        for name in names:
            columns = slice(start, start + self._widths[name])
            start = columns.stop
            for number, one in self._layers.get(name, {}).items():
                found.setdefault(number, []).append((columns, one))
        return {number: JoinedRank.of(parts) for number, parts in found.items()}

    def check_joined(self) -> None:
        """Raise ConfigError for a layer that nothing was joined for: its adapters would have no effect."""
        left = sorted(set(self._layers) - self._joined)
        if left:
            raise ConfigError(f"{ADAPTERS}: {left[0]} takes no adapters")


class JoinedRank:
    """The parts of an adapter for a product that joins several layers: one product with all `down`, then one
    for each layer's columns."""

    def __init__(self, down: torch.Tensor, parts: list[tuple[slice, slice, torch.Tensor]]) -> None:
        """`parts`: rows of `down`, columns of the output, `up`."""
        self._down, self._parts = down, parts

    @classmethod
    def of(cls, given: list[tuple[slice, LowRank]]) -> JoinedRank:
        """Join layers, with the columns of each."""
        down = torch.cat([one.down for _, one in given]) if len(given) > 1 else given[0][1].down
        parts, start = [], 0
        for columns, one in given:
            rows = slice(start, start + len(one.down))
            start = rows.stop
            parts.append((rows, columns, one.up))
        return cls(down, parts)

    def add(self, made: torch.Tensor, given: torch.Tensor, places: torch.Tensor | None, scale: float) -> None:
        """Add to rows of `made` [tokens, outputs] what the adapter makes of `given` [tokens, inputs], times a
        scale."""
        low = linear(given if places is None else given[places], self._down)
        for rows, columns, up in self._parts:
            target = made[:, columns]
            if places is None:
                target.addmm_(low[:, rows], up, alpha=scale)
            else:
                target.index_add_(0, places, low[:, rows] @ up, alpha=scale)


def _linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear layers that are computed for each token of a step, by name.
    Logits are not: they are computed for the last tokens alone."""
    head, shapes = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if type(module) not in (torch.nn.Linear, Conv1D) or module is head or ".experts." in name:
            continue
        rows, columns = module.weight.shape
        shapes[name] = (rows, columns) if type(module) is Conv1D else (columns, rows)
    return shapes


def _read_layers(
    config: AdapterConfig, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> dict[str, LowRank]:
    try:
        tensors = load_file(config.folder / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"not safetensors: {error}") from None
    names = {name.removesuffix(end) for name in tensors for end in (_DOWN, _UP) if name.endswith(end)}
    others = sorted(name for name in tensors if not name.endswith((_DOWN, _UP)))
    if others or not names:
        given = others[0] if others else "no tensor"
        raise ConfigError(f"given {given}, allowed: tensors NAME{_DOWN} and NAME{_UP}")
    made = {}
    for name in sorted(names):
        layer = name.removeprefix(_PREFIX)
        if layer not in shapes:
            raise ConfigError(f"{layer} is no linear layer of the model that takes adapters")
        inputs, outputs = shapes[layer]
        want = {_DOWN: (config.rank, inputs), _UP: (outputs, config.rank)}
        for end, shape in want.items():
            given = tuple(tensors[name + end].shape) if name + end in tensors else None
            if given != shape:
                raise ConfigError(f"{layer}{end}: given shape {given}, allowed: {shape}")
        up = tensors[name + _UP].float().mul_(config.scale).t().contiguous()
        made[layer] = LowRank(tensors[name + _DOWN].to(dtype), up.to(dtype))
    return made
