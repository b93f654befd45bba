"""MindIE's metrics (spec 4): its names for what every dialect counts in all front processes.

    request_received_total{model_name="llm"} 12

A metric is one of the server's under another name, or made of several. Throughputs are averages since the
previous scrape, at least a second ago. Missing features (swapping, pre-emption, a cache on the CPU) are 0;
the hit rate of a prefix cache is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from fastserve.metrics import Registry, names
from fastserve.metrics.exposition import write_head, write_histogram, write_labels, write_number
from fastserve.serving.replication import Content, ReplicatedPart, ReplicatedState

GOOD = ("eos", "length", "stop")
SHORTEST_S = 1.0
HELP = "As MindIE names it; see docs/dialects/textgen.md."
Labels = tuple[str, ...]
Found = Mapping[Labels, tuple[float, ...]]


class MindieMetric(NamedTuple):
    """One metric of one model. A histogram has `counts` by bucket, one more than `bounds`."""

    name: str
    kind: str
    value: float
    counts: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()


class MindieMetrics(ReplicatedPart):
    """MindIE's metrics of the server. The owner of the models keeps the previous scrape for the rates."""

    PART = "mindie rates"

    def __init__(self, registry: Registry, state: ReplicatedState) -> None:
        self._registry, self._state = registry, state
        if state.owned:
            state.add(self.PART, self)
        self._looked = (time.monotonic(), dict[str, tuple[float, float]]())
        self._rates: dict[str, tuple[float, float]] = {}

    def running(self, model: str) -> int:
        """Sequences of a model that run."""
        (found,) = self._registry.read(names.TEXT_RUNNING)
        return int(_total(found, model))

    def held_tokens(self, model: str) -> int:
        """Tokens in the cache."""
        (found,) = self._registry.read(names.TEXT_KV_USED)
        return int(_total(found, model))

    async def rates(self, models: list[str]) -> dict[str, tuple[float, float]]:
        """Return tokens a second of prompts and generated, by model. Raises ServeError."""
        told = await self._state.show(self.PART, {"models": models})
        return msgspec.json.decode(told, type=dict[str, tuple[float, float]])

    async def answer(self, question: Content) -> str:
        prompts, tokens = self._registry.read(names.TEXT_PROMPT_TOKENS, names.TEXT_TOKENS)
        models = question["models"]
        self._look({model: (_total(prompts, model), _total(tokens, model)) for model in models})
        return msgspec.json.encode({model: self._rates[model] for model in models}).decode()

    def read(
        self, models: list[str], rates: Mapping[str, tuple[float, float]]
    ) -> dict[str, list[MindieMetric]]:
        """Return all metrics of these models."""
        first, gap, took, prompts, tokens, ends, running, waiting, used, kv = self._registry.read(
            names.TEXT_FIRST_TOKEN, names.TEXT_TOKEN_GAP, names.REQUEST_DURATION, names.TEXT_PROMPT_TOKENS,
            names.TEXT_TOKENS, names.TEXT_SEQUENCES, names.TEXT_RUNNING, names.TEXT_WAITING,
            names.TEXT_KV_USED, names.TEXT_KV,
        )  # fmt: skip
        told = {}
        for model in models:
            good = sum(_total(ends, model, how) for how in GOOD)
            ended = _total(ends, model)
            now = _total(running, model), _total(waiting, model)
            told[model] = [
                *_requests(ended + sum(now), good, ended - good, *now),
                *_rates(*rates[model]),
                _histogram("time_to_first_token_seconds", first, model),
                _histogram("time_per_output_token_seconds", gap, model),
                _histogram("e2e_request_latency_seconds", took, model),
                _whole("request_prompt_tokens", _total(prompts, model), ended),
                _whole("request_generation_tokens", _total(tokens, model), ended),
                MindieMetric("prompt_tokens_total", "counter", _total(prompts, model)),
                MindieMetric("generation_tokens_total", "counter", _total(tokens, model)),
                MindieMetric("npu_cache_usage_perc", "gauge", _share(_total(used, model), _total(kv, model))),
                MindieMetric("cpu_cache_usage_perc", "gauge", 0.0),
                MindieMetric("num_preemptions_total", "counter", 0.0),
            ]
        return told

    def _look(self, totals: dict[str, tuple[float, float]]) -> None:
        before_s, before = self._looked
        now_s = time.monotonic()
        for model in totals:
            self._rates.setdefault(model, (0.0, 0.0))
        if now_s - before_s < SHORTEST_S:
            return
        self._looked = now_s, totals
        for model, (prompts, tokens) in totals.items():
            then = before.get(model, (0.0, 0.0))
            self._rates[model] = (
                (prompts - then[0]) / (now_s - before_s),
                (tokens - then[1]) / (now_s - before_s),
            )


def write_page(figures: dict[str, list[MindieMetric]]) -> bytes:
    """Prometheus text: each metric with the models that have it."""
    by_name: dict[str, list[tuple[str, MindieMetric]]] = {}
    for model, found in figures.items():
        for figure in found:
            by_name.setdefault(figure.name, []).append((model, figure))
    lines: list[str] = []
    for name, rows in by_name.items():
        lines += write_head(name, rows[0][1].kind, HELP)
        for model, figure in rows:
            lines += _lines(figure, {"model_name": model})
    return ("\n".join(lines) + "\n").encode() if lines else b""


def write_vector(figures: dict[str, list[MindieMetric]]) -> bytes:
    """Return the body of /metrics-json: one value each, a histogram's sum and count."""
    now_s = round(time.time(), 3)
    result = [
        {"metric": {"__name__": name, "model_name": model}, "value": [now_s, f"{value:g}"]}
        for model, found in figures.items()
        for figure in found
        for name, value in _values(figure)
    ]
    return msgspec.json.encode({"resultType": "vector", "result": result})


def _values(figure: MindieMetric) -> Iterator[tuple[str, float]]:
    if figure.kind != "histogram":
        yield figure.name, figure.value
        return
    yield f"{figure.name}_sum", figure.value
    yield f"{figure.name}_count", sum(figure.counts)


def _lines(figure: MindieMetric, labels: dict[str, str]) -> list[str]:
    if figure.kind == "histogram":
        counts = [int(count) for count in figure.counts]
        return write_histogram(labels, figure.name, figure.bounds, counts, figure.value)
    return [f"{figure.name}{write_labels(labels)} {write_number(figure.value)}"]


def _requests(
    received: float, good: float, failed: float, running: float, waiting: float
) -> list[MindieMetric]:
    return [
        MindieMetric("request_received_total", "counter", received),
        MindieMetric("request_success_total", "counter", good),
        MindieMetric("request_failed_total", "counter", failed),
        MindieMetric("num_requests_running", "gauge", running),
        MindieMetric("num_requests_waiting", "gauge", waiting),
        MindieMetric("num_requests_swapped", "gauge", 0.0),
        MindieMetric("failed_request_perc", "gauge", _share(failed, received)),
    ]


def _rates(prompt: float, generation: float) -> list[MindieMetric]:
    return [
        MindieMetric("avg_prompt_throughput_toks_per_s", "gauge", prompt),
        MindieMetric("avg_generation_throughput_toks_per_s", "gauge", generation),
    ]


def _histogram(name: str, found: Found, model: str) -> MindieMetric:
    bounds = names.STAGE_SECONDS
    none = [(0.0,) * (len(bounds) + 2)]
    rows = [values for labels, values in found.items() if _is_of(labels, model)] or none
    *counts, total = (sum(column) for column in zip(*rows, strict=True))
    return MindieMetric(name, "histogram", total, tuple(counts), bounds)


def _whole(name: str, total: float, count: float) -> MindieMetric:
    """A histogram of one bucket: how much there was of it, of how many."""
    return MindieMetric(name, "histogram", total, (count,))


def _total(found: Found, model: str, how: str = "") -> float:
    mine = ((labels, values[0]) for labels, values in found.items() if _is_of(labels, model))
    return sum(value for labels, value in mine if not how or labels[-1] == how)


def _is_of(labels: Labels, model: str) -> bool:
    """Return whether a series belongs to a model, in any version; durations count for this dialect alone."""
    return labels[0] == model and (len(labels) < 3 or labels[2] == "textgen" or labels[2] in names.FINISHES)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
