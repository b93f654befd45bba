"""How a version's requests are scheduled: chosen once, when its lanes open, from what its config says.

    plain        the lane itself: batches form in shared memory as rows arrive
    sequences    `stateful`: control inputs, states, a slot for each sequence
    ensemble     no lane at all, see `ensemble` and `hosting`

What a config asks for and is not here is refused by `check_schedule`, never passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastserve.engine.controls import Extras, read_extras
from fastserve.engine.door import Door, triton_of
from fastserve.engine.lane import Lane
from fastserve.engine.sealed import Sealed, sealed_config
from fastserve.engine.stateful import StatefulDoor, read_strategy
from fastserve.errors import Kind, ServeError
from fastserve.repository.model_config import ModelConfig, config_json
from fastserve.repository.version import Version
from fastserve.tensor import TensorSpec

Specs = Mapping[str, TensorSpec]


class Schedule:
    """What one version's config makes of its lanes."""

    def __init__(self, version: Version, fronts: int = 1) -> None:
        """Raises ServeError INVALID_ARGUMENT for what cannot be scheduled so."""
        config, triton = version.config, triton_of(version.config)
        check_schedule(config, fronts)
        self._version, self._triton = version, triton
        self.extras: Extras | None = None
        if triton.get("sequence_batching") is not None:
            self.extras = read_extras(triton, version.folder.parent)

    @property
    def lanes(self) -> int:
        """Lanes it needs: one, or one for each instance where requests belong to an instance."""
        return self._version.config.instances if self.extras else 1

    def worker_config(self) -> dict[str, Any]:
        """model.yaml for the workers of one lane, and for its arena."""
        config = config_json(self._version.config)
        if self.extras is None:
            return config
        config["inputs"] = {**config["inputs"], **self.extras.inputs}
        config["outputs"] = {**config["outputs"], **self.extras.outputs}
        return sealed_config({**config, "instances": 1})

    def describe(self, inputs: Specs, outputs: Specs) -> tuple[Specs, Specs]:
        """The tensors clients see, of those the workers have."""
        if self.extras is None:
            return inputs, outputs
        own = self.extras.inputs
        return (
            {name: spec for name, spec in inputs.items() if name not in own},
            {name: spec for name, spec in outputs.items() if name not in self.extras.hidden},
        )

    def open_door(self, lanes: Sequence[Lane]) -> Lane | Door:
        """What requests go through."""
        if self.extras is None:
            return lanes[0]
        senders = [Sealed(lane) for lane in lanes]
        return StatefulDoor(self._version.model, senders, self.extras, read_strategy(self._triton))


def check_schedule(config: ModelConfig, fronts: int) -> None:
    """Raises ServeError INVALID_ARGUMENT for scheduling that this server, or so many fronts, cannot do."""
    triton = triton_of(config)
    asked = _needs_one_front(triton)
    if asked and fronts > 1:
        raise ServeError(
            Kind.INVALID_ARGUMENT,
            f"{asked} is kept in one front process: frontends: given {fronts}, allowed: 1 with this model",
        )
    if triton.get("sequence_batching") is not None and _is_decoupled(triton):
        raise ServeError(
            Kind.INVALID_ARGUMENT, "sequence_batching: a decoupled model cannot be scheduled by sequences"
        )
    for field in unfinished(triton):
        raise ServeError(Kind.INVALID_ARGUMENT, f"{field}: not supported yet, leave it out")


def _needs_one_front(triton: Mapping[str, Any]) -> str:
    for field in ("sequence_batching", "ensemble_scheduling"):
        if triton.get(field) is not None:
            return field
    return ""


def _is_decoupled(triton: Mapping[str, Any]) -> bool:
    return bool((triton.get("model_transaction_policy") or {}).get("decoupled"))


def unfinished(triton: Mapping[str, Any]) -> list[str]:
    """Fields of the config that nothing here does yet."""
    dynamic = triton.get("dynamic_batching") or {}
    later = ("priority_levels", "default_queue_policy", "priority_queue_policy", "preserve_ordering")
    found = [f"dynamic_batching.{field}" for field in later if dynamic.get(field)]
    if (triton.get("response_cache") or {}).get("enable"):
        found.append("response_cache.enable")
    return found
