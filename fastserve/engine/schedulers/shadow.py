"""Shadow versions: copies of requests to a model's other versions run on one whose answers nobody gets.

    ShadowVersions      of a process: puts ShadowedSchedulers before versions, and takes them away
    ShadowedScheduler   before a version's scheduler: draws requests, copies their tensors and answers
    compare_outputs     what is different in the shadow's answer
    StickyScheduler     before a version whose requests are drawn by the value of an input

A copy runs after its request is answered, and nothing waits for it. While MOST_COPIES are under way, or
their tensors have MOST_BYTES, or there were `most_per_second`, further ones are dropped and counted, so a
shadow that is stopped costs a few comparisons. A request that is drawn takes the general path; one that no
copy can be made of stays on the fast path.

A request that was read for another version than its value leads to stops before it runs, and runs again
(net/traffic_split.py): the first draw is made before the body is read. A request that named its version, a
step of an ensemble, a copy for a shadow and a request of a stream run where they are.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Literal, NamedTuple

from fastserve._ext.shared_metrics import Counter
from fastserve.engine.engine import (
    SCHEDULER,
    DelegatingScheduler,
    Engine,
    Sampler,
    Scheduler,
    find_scheduler,
    scheduler_of,
)
from fastserve.engine.request_log import MOST_OWED, read_numbers
from fastserve.errors import Kind, ServeError
from fastserve.metrics import Registry, names
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Model, Version, VersionState
from fastserve.request import InferRequest, InferResponse
from fastserve.settings.model_options import ShadowOptions
from fastserve.tensor import ARRAY_CODE, Tensor
from fastserve.util.model_demand import DRAW, VersionDrawn
from fastserve.util.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
MOST_COPIES, MOST_BYTES = 32, 32 << 20
"""Of a model's copies under way in one front process, and of the tensors in them."""
RUN_S = 10.0
"""How long a copy may take until it has failed."""
MOST_COMPARED, AT_A_TIME = 16_384, 1_024
"""Elements of an output whose bytes differ that are compared, evenly spread, and how many in one turn of the
loop: 0.2 ms."""
MOST_VALUE_BYTES = 4096
"""How much of a string is read that draws a version."""
FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))


class ShadowVersions:
    """The shadows of one front process's models. It puts StickySchedulers before versions too: the rules ask
    for both."""

    def __init__(self, catalog: Catalog, registry: Registry) -> None:
        self._catalog, self._registry = catalog, registry
        self._shadows: dict[str, Shadow] = {}
        self._dressed: set[str] = set()  # models whose versions have schedulers before theirs
        catalog.on_rules.append(self.follow)

    def follow(self) -> None:
        """Give every available version the scheduler that the rules ask for."""
        for name in self._shadows.keys() - self._catalog.models.keys():
            del self._shadows[name]
        self._dressed &= self._catalog.models.keys()
        for model in self._catalog.models.values():
            options, sticky = model.rules.shadow, model.rules.sticky
            wears = sticky is not None and bool(sticky.input)
            if options is not None and options.percent:
                wears = True
                shadow = self._shadows.get(model.name)
                if shadow is None:
                    self._shadows[model.name] = Shadow(model, self._registry, options)
                elif shadow.options != options:
                    shadow.use(options)
            else:
                self._shadows.pop(model.name, None)
            if not wears and model.name not in self._dressed:
                continue
            for version in model.available():
                shadowed = version.number == model.rules.shadowed
                self._dress(
                    version,
                    None if shadowed else self._shadows.get(model.name),
                    "" if shadowed or sticky is None else sticky.input,
                )
            (self._dressed.add if wears else self._dressed.discard)(model.name)

    def _dress(self, version: Version, shadow: Shadow | None, tensor: str) -> None:
        """Put a ShadowedScheduler before the version's scheduler, and a StickyScheduler before that; neither
        for None and ""."""
        inner = find_scheduler(version)
        if inner is None or version.config.options.decoupled:
            return
        had_tensor, had_shadow = "", None
        if isinstance(inner, StickyScheduler):
            had_tensor, inner = inner.tensor, inner.inner
        if isinstance(inner, ShadowedScheduler):
            had_shadow, inner = inner.shadow, inner.inner
        if had_tensor == tensor and had_shadow is shadow:
            return
        if shadow is not None:
            inner = ShadowedScheduler(inner, shadow)
        SCHEDULER.put(version, StickyScheduler(inner, tensor) if tensor else inner)
        self._catalog.renew(version)


class ShadowCounts(NamedTuple):
    """Copies by their results."""

    equal: Counter
    different: Counter
    failed: Counter
    dropped: Counter


@dataclass(slots=True)
class Copy:
    """A request's copy for a shadow, and the answer that its client got."""

    options: ShadowOptions
    counts: ShadowCounts
    request: InferRequest
    nbytes: int
    answer: dict[str, Tensor] = field(default_factory=dict)


class Shadow:
    """A model's copies in one front process."""

    def __init__(self, model: Model, registry: Registry, options: ShadowOptions) -> None:
        self._model, self._registry = model, registry
        self._copies = self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._limited_log = RateLimitedLog(log)
        self.use(options)

    def use(self, options: ShadowOptions) -> None:
        """Take over the rules of now."""
        counters = self._registry.counters(names.SHADOW_REQUESTS)
        who = self._model.name, options.version
        self.options, self.share = options, options.percent / 100
        # Copies that may be made at once, and when they were counted.
        self._left, self._at_s = max(options.most_per_second, 1.0), time.monotonic()
        self._counts = ShadowCounts(*(counters.of(*who, result) for result in names.SHADOW_RESULTS))

    def check_room(self, nbytes: int = 0) -> bool:
        """Return whether there is room for one more copy of so many bytes; count it as dropped if not."""
        now_s, rate = time.monotonic(), self.options.most_per_second
        self._left = min(self._left + (now_s - self._at_s) * rate, max(rate, 1.0))
        self._at_s = now_s
        fits = self._copies < MOST_COPIES and self._bytes + nbytes <= MOST_BYTES and self._left >= 1
        if not fits:
            self._counts.dropped.add()
        return fits

    def copy(self, request: InferRequest) -> Copy | None:
        """Return a copy of a request; None where there is no room, and for what a copy would not answer
        alike: a request of a sequence, or one with tensors on a GPU."""
        nbytes = sum(memoryview(tensor.data).nbytes for tensor in request.inputs.values())
        if request.sequence_id or request.lent or request.placed or not self.check_room(nbytes):
            return None
        self._copies += 1
        self._bytes += nbytes
        self._left -= 1
        copied = InferRequest(
            _copy_tensors(request.inputs.items()),
            request.outputs,
            parameters=dict(request.parameters),
            account=None,  # nobody is charged for it
        )
        return Copy(self.options, self._counts, copied, nbytes)

    def forget(self, copy: Copy) -> None:
        """Give the room of a copy back."""
        self._copies -= 1
        self._bytes -= copy.nbytes

    def compare_later(self, engine: Engine, copy: Copy, number: int, response: InferResponse) -> None:
        """Run a copy once the response, of version `number`, is on its way, and compare the answers."""
        nbytes = response.nbytes
        if self._bytes + nbytes > MOST_BYTES:
            copy.counts.dropped.add()
            self.forget(copy)
            return
        copy.nbytes += nbytes
        self._bytes += nbytes
        copy.answer = _copy_tensors(response.in_order())
        task = asyncio.get_running_loop().create_task(self._compare(engine, copy, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, engine: Engine, copy: Copy, number: int) -> None:
        shadow = f"model {self._model.name}: shadow version {copy.options.version}"
        try:
            difference = await asyncio.wait_for(self._run(engine, copy), RUN_S)
        except (ServeError, asyncio.TimeoutError) as fault:
            copy.counts.failed.add()
            why = fault.message if isinstance(fault, ServeError) else f"no answer within {RUN_S:g} s"
            self._say(f"{shadow} failed: {why}", "failed")
        except Exception as error:
            copy.counts.failed.add()
            self._limited_log.error(f"{shadow} failed", error)
        else:
            (copy.counts.different if difference else copy.counts.equal).add()
            if difference:
                self._say(f"{shadow} differs from version {number} in {difference}", "different")
        finally:
            self.forget(copy)

    async def _run(self, engine: Engine, copy: Copy) -> str:
        """Return what is different, "" for nothing. Raises ServeError."""
        number = copy.options.version
        version = self._model.versions.get(number)
        if version is None or version.state is not VersionState.AVAILABLE:
            raise ServeError(Kind.UNAVAILABLE, f"version {number} is not available")
        copy.request.deadline_ns = time.monotonic_ns() + int(RUN_S * 1e9)
        response = await scheduler_of(version).infer(engine, version, copy.request)
        try:
            return await compare_outputs(copy.answer, dict(response.in_order()), copy.options.tolerance)
        finally:
            response.release()

    def _say(self, text: str, cause: str) -> None:
        held = self._limited_log.few(cause)
        if held is not None:
            log.warning("%s%s", text, held)


class ShadowSampler:
    """Draws the requests of one version that are copied, beside those of its log. One that the fast path has
    drawn is `owed` by the general path."""

    __slots__ = ("_inner", "_owed", "_random", "_shadow")

    def __init__(self, shadow: Shadow, inner: Sampler | None) -> None:
        self._shadow, self._inner, self._owed = shadow, inner, 0
        self._random = random.Random().random

    def draw(self) -> bool:
        """Draw a request on the fast path; never one that there is no room for."""
        if self._inner is not None and self._inner.draw():
            return True
        if self._random() >= self._shadow.share or not self._shadow.check_room():
            return False
        self._owed = min(self._owed + 1, MOST_OWED)  # not all of them get as far as the scheduler
        return True

    def take(self) -> bool:
        """Draw a request on the general path."""
        if self._owed:
            self._owed -= 1
            return True
        return self._random() < self._shadow.share


class ShadowedScheduler(DelegatingScheduler):
    """A shadow before another scheduler: some requests are copied, and the copies run after them."""

    def __init__(self, inner: Scheduler, shadow: Shadow) -> None:
        super().__init__(inner)
        self.shadow = shadow
        self.sampler = ShadowSampler(shadow, inner.request_sampler())

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        copy = self.shadow.copy(request) if self.sampler.take() else None
        if copy is None:
            return await self.inner.infer(engine, version, request)
        try:
            response = await self.inner.infer(engine, version, request)
        except BaseException:
            self.shadow.forget(copy)
            raise
        self.shadow.compare_later(engine, copy, version.number, response)
        return response

    def request_sampler(self) -> ShadowSampler:
        return self.sampler


class StickyScheduler(DelegatingScheduler):
    """A draw by the input `tensor` before another scheduler. All requests take the general path: the fast one
    does not look at values."""

    def __init__(self, inner: Scheduler, tensor: str) -> None:
        super().__init__(inner)
        self.tensor = tensor

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        draw = DRAW.get()
        if draw is not None and draw.version is version:
            value = read_value(request.inputs.get(self.tensor))
            if value is not None and draw.leads_away(version.model, value):
                raise VersionDrawn
        return await self.inner.infer(engine, version, request)

    def request_sampler(self) -> Sampler:
        return EVERY_REQUEST


class _EveryRequest:
    """Draws every request of the fast path."""

    def draw(self) -> bool:
        """Return True."""
        return True


EVERY_REQUEST = _EveryRequest()


def read_value(tensor: Tensor | None) -> bytes | None:
    """Return the first element of a tensor as a header says it: a string's bytes, or an integer in decimals;
    None for no tensor, no element and other types."""
    if tensor is None:
        return None
    data, dtype = memoryview(tensor.data).cast("B"), tensor.dtype
    if dtype.name == "bytes":
        size = int.from_bytes(data[:4], "little")
        return bytes(data[4 : 4 + min(size, MOST_VALUE_BYTES)]) if len(data) >= 4 else None
    if ARRAY_CODE.get(dtype.name, "f") in "fd" or len(data) < dtype.item_bytes:
        return None
    signed = dtype.name.startswith("int")
    return b"%d" % int.from_bytes(data[: dtype.item_bytes], "little", signed=signed)


def _copy_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: Tensor(one.dtype, one.shape, bytes(one.data)) for name, one in tensors}


async def compare_outputs(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float) -> str:
    """Return what is different in `found`, "" for nothing: names, dtypes and shapes, floats by more than the
    relative tolerance, other values at all. It names no values."""
    for name in wanted.keys() ^ found.keys():
        return f"output '{name}', which only one of them has"
    for name, tensor in wanted.items():
        other = found[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return (
                f"output '{name}': {other.dtype.name} {list(other.shape)} "
                f"for {tensor.dtype.name} {list(tensor.shape)}"
            )
        data, others = bytes(tensor.data), bytes(other.data)
        if data == others:
            continue
        if tensor.dtype.name not in FLOATS:
            return f"output '{name}': other values"
        place = await _find_difference(tensor.dtype.name, data, others, tolerance)
        if place >= 0:
            return f"output '{name}': element {place} by more than {tolerance:g}"
    return ""


async def _find_difference(dtype: str, data: bytes, others: bytes, tolerance: float) -> int:
    """Return the index of the first compared float that is different; -1 for none."""
    word: Literal["H", "I", "Q"] = "I" if dtype == "float32" else "Q" if dtype == "float64" else "H"
    words, other_words = memoryview(data).cast(word), memoryview(others).cast(word)
    step = -(-len(words) // MOST_COMPARED)
    for begin in range(0, len(words), step * AT_A_TIME):
        part = slice(begin, begin + step * AT_A_TIME, step)
        pairs = zip(
            chain.from_iterable(read_numbers(words[part].tobytes(), dtype)),
            chain.from_iterable(read_numbers(other_words[part].tobytes(), dtype)),
            strict=True,
        )
        for index, (one, other) in enumerate(pairs):
            # Infinities are equal to themselves alone, and NaN, which is unequal to itself, to NaN.
            if one != other and not (one != one and other != other):
                bound = tolerance * max(abs(one), abs(other))
                if not (abs(one - other) <= bound < inf):
                    return begin + index * step
        await asyncio.sleep(0)
    return -1
