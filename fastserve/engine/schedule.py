"""How a version's requests are scheduled: chosen once, when its lanes open, from what its config says.

    plain        the lane itself: batches form in shared memory as rows arrive
    queued       `queued`: priority levels, queue policies, preferred batch sizes, kept order
    cached       `cache`, before a lane or a queue
    sequences    `stateful`: control inputs, states, a slot for each sequence
    ensemble     no lane at all, see `ensemble` and `hosting`

What a config asks for and is not here is refused by `check_schedule`, never passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastserve.engine.cache import CachedDoor, ResponseCache
from fastserve.engine.controls import Extras, read_extras
from fastserve.engine.counts import tally_of
from fastserve.engine.door import Door, triton_of
from fastserve.engine.lane import Lane
from fastserve.engine.priority import Levels, read_levels
from fastserve.engine.queued import Forming, QueuedDoor
from fastserve.engine.rate import RateLimiter, read_needs
from fastserve.engine.sealed import Sealed, sealed_config
from fastserve.engine.stateful import StatefulDoor, read_strategy
from fastserve.errors import Kind, ServeError
from fastserve.repository.model_config import ModelConfig, config_json
from fastserve.repository.triton_config import triton_view
from fastserve.repository.triton_refusals import idle
from fastserve.repository.version import Version
from fastserve.tensor import TensorSpec

log = logging.getLogger(__name__)

Specs = Mapping[str, TensorSpec]


class Schedule:
    """What one version's config makes of its lanes."""

    def __init__(
        self,
        version: Version,
        fronts: int = 1,
        cache: ResponseCache | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        """Raises ServeError INVALID_ARGUMENT for what cannot be scheduled so."""
        config, triton = version.config, triton_of(version.config)
        self._cache = cache if caches(triton) else None
        check_schedule(config, fronts, cached=self._cache is not None)
        if self._cache is None and caches(triton):
            log.warning("%r: response_cache.enable has no effect: response_cache_bytes is 0", version)
        for field in idle(triton_view(config, version.model)):
            log.warning("%r: %s has no effect on this server", version, field)
        self._version, self._triton = version, triton
        self._limiter = limiter
        self._needs, self._priority = read_needs(triton.get("instance_group") or ()) if limiter else ({}, 1)
        self._queue = read_queue(config, limited=bool(self._needs))
        if self._needs:
            _check_limited(triton, fronts)
        self.extras: Extras | None = None
        if triton.get("sequence_batching") is not None:
            self.extras = read_extras(triton, version.folder.parent)

    @property
    def lanes(self) -> int:
        """Lanes it needs: one, or one for each instance where requests belong to an instance."""
        return self._version.config.instances if self.extras else 1

    def worker_config(self, part: int = 0) -> dict[str, Any]:
        """model.yaml for the workers of one lane, and for its arena."""
        config = config_json(self._version.config)
        if self.extras is None:
            return config if self._queue is None else sealed_config(config)
        config["inputs"] = {**config["inputs"], **self.extras.inputs}
        config["outputs"] = {**config["outputs"], **self.extras.outputs}
        return sealed_config({**config, "instances": 1, "first_instance": part})

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
        inner = self._open_inner(lanes)
        tally = tally_of(self._version)
        if isinstance(inner, Door):
            tally.waiting = inner.pending
        return inner if self._cache is None else CachedDoor(self._cache, inner, tally)

    def _open_inner(self, lanes: Sequence[Lane]) -> Lane | Door:
        model, senders = self._version.model, [Sealed(lane) for lane in lanes]
        if self.extras is not None:
            return StatefulDoor(model, senders, self.extras, read_strategy(self._triton))
        if self._queue is not None:
            gate = None
            if self._limiter is not None and self._needs:
                gate = self._limiter.open_gate(self._needs, self._priority)
            return QueuedDoor(model, senders[0], *self._queue, gate)
        return lanes[0]


def read_queue(config: ModelConfig, *, limited: bool = False) -> tuple[Levels, Forming] | None:
    """How a model's requests queue and form batches; None when shared memory does it as well by itself."""
    dynamic = triton_of(config).get("dynamic_batching") or {}
    levels = read_levels(dynamic)
    preferred = frozenset(int(size) for size in dynamic.get("preferred_batch_size") or ())
    keep_order = bool(dynamic.get("preserve_ordering")) and config.instances > 1
    if not limited and levels.plain and not keep_order and preferred <= {config.max_batch_size}:
        return None
    return levels, Forming(config.instances, config.max_queue_delay_us * 1000, preferred, keep_order)


def check_schedule(config: ModelConfig, fronts: int, *, cached: bool = False) -> None:
    """Raises ServeError INVALID_ARGUMENT for scheduling that this server, or so many fronts, cannot do."""
    triton = triton_of(config)
    asked = _needs_one_front(config, cached=cached)
    if asked and fronts > 1:
        raise ServeError(
            Kind.INVALID_ARGUMENT,
            f"{asked} is kept in one front process: frontends: given {fronts}, allowed: 1 with this model",
        )
    if asked and (triton.get("model_transaction_policy") or {}).get("decoupled"):
        raise ServeError(
            Kind.INVALID_ARGUMENT,
            f"{asked}: model_transaction_policy.decoupled: given true, allowed: false with this",
        )
    if cached and triton.get("sequence_batching") is not None:
        raise ServeError(
            Kind.INVALID_ARGUMENT, "response_cache: answers of a sequence depend on more than the request"
        )


def _check_limited(triton: Mapping[str, Any], fronts: int) -> None:
    decoupled = (triton.get("model_transaction_policy") or {}).get("decoupled")
    if fronts > 1 or decoupled or triton.get("sequence_batching") is not None:
        raise ServeError(
            Kind.INVALID_ARGUMENT,
            "instance_group.rate_limiter: with rate_limit execution_count not for several frontends, "
            "decoupled models or sequences",
        )


def caches(triton: Mapping[str, Any]) -> bool:
    """True when the model's responses may be kept."""
    return bool((triton.get("response_cache") or {}).get("enable"))


def _needs_one_front(config: ModelConfig, *, cached: bool) -> str:
    """What of the config is kept in one process, where the order of all requests is known."""
    if triton_of(config).get("sequence_batching") is not None:
        return "sequence_batching"
    if read_queue(config) is not None:
        return "dynamic_batching with levels, policies, sizes or kept order"
    return "response_cache" if cached else ""
