"""The choice of a version's scheduler, made once from its config when its queues open.

    plain        the queue itself: batches form in shared memory as rows arrive
    queued       priority levels, queue policies, preferred batch sizes, kept order
    cached       a response cache before a queue or a scheduler with a queue
    sequence     control inputs, states, a slot for each sequence
    text         prompts in, tokens one by one
    ensemble     no queue at all; the loader makes it

A config that asks for anything else is refused by `check_schedule`, never passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastserve.engine.batch_queue import BatchQueue, QueueMetrics, Specs
from fastserve.engine.counters import counters_of
from fastserve.engine.engine import Scheduler
from fastserve.engine.schedulers.batch_sender import SealedQueue, sealed_config
from fastserve.engine.schedulers.cache import CachedScheduler, ResponseCache
from fastserve.engine.schedulers.plain import PlainScheduler
from fastserve.engine.schedulers.queued import BatchForming, PriorityLevels, QueuedScheduler, levels_of
from fastserve.engine.schedulers.rate_limiter import RateLimiter, needs_of
from fastserve.engine.schedulers.sequence import (
    SequenceInputs,
    SequenceScheduler,
    open_sequence_inputs,
    strategy_of,
)
from fastserve.engine.text_queue import TextQueue, TextScheduler
from fastserve.errors import invalid
from fastserve.repository.model_config import ModelConfig, config_json
from fastserve.repository.version import Version
from fastserve.settings.model_options import Needs, Options, QueueOptions
from fastserve.workers.arena import Arena

log = logging.getLogger(__name__)


class Schedule:
    """Queues and scheduler of one version, from its config."""

    def __init__(
        self,
        version: Version,
        cache: ResponseCache | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        """Raises ServeError INVALID_ARGUMENT for what cannot be scheduled so."""
        config, options = version.config, version.config.options
        self._cache = cache if options.cached else None
        check_schedule(config, cached=self._cache is not None)
        if self._cache is None and options.cached:
            log.warning("%r: %s has no effect: response_cache_bytes is 0", version, _cache_field(config))
        for field in options.idle:
            log.warning("%r: %s has no effect on this server", version, field)
        self._version, self._options = version, options
        self._limiter = limiter
        self._needs = needs_of(options.needs) if limiter else Needs()
        self._queue = read_queue(config, limited=bool(self._needs.resources))
        if self._needs.resources:
            _check_limited(options)
        self.extras: SequenceInputs | None = None
        if options.sequences is not None:
            self.extras = open_sequence_inputs(
                options.sequences, version.folder.parent, batching=version.config.batching
            )

    @property
    def relayed(self) -> bool:
        """Whether the owner decides what runs next, so that other front processes relay requests to it."""
        return self.extras is not None or self._queue is not None

    @property
    def queues(self) -> int:
        """Number of queues: one, or one for each instance where requests belong to an instance."""
        return self._version.config.instances if self.extras else 1

    def worker_config(self, part: int = 0) -> dict[str, Any]:
        """model.yaml for the workers of one queue, and for its arena."""
        config = config_json(self._version.config)
        if self.extras is None:
            return config if self._queue is None else sealed_config(config)
        config["inputs"] = {**config["inputs"], **self.extras.inputs}
        config["outputs"] = {**config["outputs"], **self.extras.outputs}
        return sealed_config({**config, "instances": 1, "first_instance": part})

    def describe(self, inputs: Specs, outputs: Specs) -> tuple[Specs, Specs]:
        """Return those of the workers' tensors that clients see."""
        if self.extras is None:
            return inputs, outputs
        own = self.extras.inputs
        return (
            {name: spec for name, spec in inputs.items() if name not in own},
            {name: spec for name, spec in outputs.items() if name not in self.extras.hidden},
        )

    def open_scheduler(self, queues: Sequence[BatchQueue]) -> Scheduler:
        """Make the version's scheduler."""
        inner = self._open_inner(queues)
        counters = counters_of(self._version)
        counters.waiting = inner.pending
        return inner if self._cache is None else CachedScheduler(self._cache, inner, counters)

    def _open_inner(self, queues: Sequence[BatchQueue]) -> Scheduler:
        model, senders = self._version.model, [SealedQueue(queue) for queue in queues]
        if self.extras is not None:
            assert self._options.sequences is not None
            config = self._version.config
            strategy = strategy_of(self._options.sequences, config.max_batch_size, config.max_queue_rows)
            return SequenceScheduler(model, senders, self.extras, strategy)
        if self._queue is not None:
            gate = None
            if self._limiter is not None and self._needs.resources:
                gate = self._limiter.open_gate(self._needs)
            return QueuedScheduler(model, senders[0], *self._queue, gate)
        return simple_scheduler(queues[0])


def open_queue(arena: Arena, front: int, inputs: Specs, outputs: Specs, metrics: QueueMetrics) -> BatchQueue:
    """Open the queue of an arena, of the class that fits it, on the running loop."""
    kind = TextQueue if arena.geometry.window else BatchQueue
    queue = kind(arena, front, inputs, outputs, metrics)
    queue.open()
    return queue


def simple_scheduler(queue: BatchQueue) -> Scheduler:
    """Return the default scheduler of a queue, which each front process has for itself."""
    return TextScheduler(queue) if isinstance(queue, TextQueue) else PlainScheduler(queue)


def read_queue(config: ModelConfig, *, limited: bool = False) -> tuple[PriorityLevels, BatchForming] | None:
    """How a model's requests queue and form batches; None when shared memory does it as well by itself."""
    asked = config.options.queue or QueueOptions()
    levels, preferred = levels_of(asked), frozenset(asked.preferred_sizes)
    keep_order = asked.keep_order and config.instances > 1
    if not limited and levels.plain and not keep_order and preferred <= {config.max_batch_size}:
        return None
    return levels, BatchForming(
        config.instances, config.max_queue_delay_us * 1000, preferred, keep_order, config.max_queue_rows
    )


def check_schedule(config: ModelConfig, *, cached: bool = False) -> None:
    """Raise ServeError INVALID_ARGUMENT for scheduling that this server cannot do."""
    options = config.options
    asked = _answers_once(config, cached=cached)
    if cached and options.decoupled and not config.triton:
        raise invalid("cache: given true, allowed: false with a model that answers in parts")
    if asked and options.decoupled:
        raise invalid(f"{asked}: model_transaction_policy.decoupled: given true, allowed: false with this")
    if cached and options.sequences is not None:
        raise invalid(f"{_cache_field(config)}: answers of a sequence depend on more than the request")


def _check_limited(options: Options) -> None:
    if options.decoupled or options.sequences is not None:
        raise invalid(
            "instance_group.rate_limiter: with rate_limit execution_count not for decoupled models "
            "or sequences"
        )


def _cache_field(config: ModelConfig) -> str:
    """Return the field that puts the cache before a model, as its own file calls it."""
    return "response_cache.enable" if config.triton else "cache"


def _answers_once(config: ModelConfig, *, cached: bool) -> str:
    """Return the option whose scheduler answers each request once; "" for none."""
    if config.options.sequences is not None:
        return "sequence_batching"
    if read_queue(config) is not None:
        return "dynamic_batching with levels, policies, sizes or kept order"
    return "response_cache" if cached else ""
