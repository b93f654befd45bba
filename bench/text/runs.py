"""Runs of the text engine, and when each token came."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.protocols import TextRequest
from fastserve.codec.generation import Finish, Sampling, TextNote


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Heard:
    """An Out that keeps when each token came, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: dict[int, list[float]] = {}

    def token(
        self, rid: int, token: int, finish: Finish = Finish.NONE, took_us: int = 0, extra: bytes = b""
    ) -> None:
        self.times.setdefault(rid, []).append(self.clock())

    def end(self, rid: int, finish: Finish, extra: bytes = b"") -> None:
        assert finish == Finish.CANCELLED

    def room(self, rid: int) -> bool:
        return True


class Bench:
    """One loaded engine and the sizes of its requests."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.clock = time.process_time if asked.cpu_time else time.perf_counter
        text = {"dtype": asked.dtype, "step_tokens": asked.step_tokens, "max_sequences": asked.concurrency}
        config = {"device": asked.device, "threads": asked.threads, "text": text}
        self.engine = TransformersBackend(config, asked.folder, 0)
        self.engine.load()
        self.rounds, self.new, self.prompt, self.concurrency = (
            asked.rounds,
            asked.new,
            asked.prompt,
            asked.concurrency,
        )
        self.dtype = getattr(torch, self.engine.info.dtype)
        self._dice = random.Random(0)
        self._rid = 0
        self.rate(self.prompts(2), 8)

    def prompts(self, count: int, length: int = 0) -> list[list[int]]:
        """Random ones, all of one length."""
        vocab = self.engine.info.vocab_size
        return [[self._dice.randrange(vocab) for _ in range(length or self.prompt)] for _ in range(count)]

    def submit(self, prompt: list[int], new: int, priority: int = 5, **settings: Any) -> int:
        """Its rid."""
        self._rid += 1
        sampling = Sampling(max_new_tokens=new, ignore_eos=True, **settings)
        note = TextNote(sampling=sampling, priority=priority)
        self.engine.submit(TextRequest(self._rid, prompt, note, time.monotonic_ns()))
        return self._rid

    def drain(self, heard: Heard) -> None:
        """Steps until nobody is left."""
        while self.engine.pending():
            self.engine.step(heard)

    def rate(self, prompts: list[list[int]], new: int) -> float:
        """Tokens per second."""
        start, heard = self.clock(), Heard(self.clock)
        for prompt in prompts:
            self.submit(prompt, new)
        self.drain(heard)
        assert sum(map(len, heard.times.values())) == len(prompts) * new
        return len(prompts) * new / (self.clock() - start)

    def share_outside(self, settings: dict[str, Any]) -> float:
        """Percent of the time of all steps that was not the model's forward."""
        model = self.engine._loaded._model
        plain, spent = model.forward, 0.0

        def timed(plan: Any) -> Any:
            nonlocal spent
            start = self.clock()
            try:
                return plain(plan)
            finally:
                spent += self.clock() - start

        for seed, prompt in enumerate(self.prompts(self.concurrency)):
            self.submit(prompt, self.new, **settings, **({"seed": seed} if settings else {}))
        model.forward = timed
        start = self.clock()
        self.drain(Heard(self.clock))
        whole = self.clock() - start
        del model.forward
        return 100 * (1 - spent / whole)

    def idle_firsts(self) -> list[float]:
        """Milliseconds to the first token, nobody else there."""
        return [self._first([prompt])[0] for prompt in self.prompts(20)]

    def at_once(self) -> tuple[list[float], list[float]]:
        """Milliseconds to first tokens, and between tokens, of as many as run at a time."""
        start, heard = self.clock(), Heard(self.clock)
        for prompt in self.prompts(self.concurrency):
            self.submit(prompt, self.new)
        self.drain(heard)
        firsts = [(times[0] - start) * 1e3 for times in heard.times.values()]
        return firsts, [gap for times in heard.times.values() for gap in _gaps(times)]

    def beside_long_prompt(self) -> float:
        """The worst gap, in milliseconds, of 16 that write while a long prompt arrives."""
        heard, room = Heard(self.clock), self.engine.info.max_prompt_tokens
        rids = [self.submit(prompt, 64) for prompt in self.prompts(16)]
        while len(heard.times) < 16 or min(map(len, heard.times.values())) < 8:
            self.engine.step(heard)
        self.submit(self.prompts(1, min(900, room - 64))[0], 2)
        before = {rid: len(heard.times[rid]) for rid in rids}
        self.drain(heard)
        return max(gap for rid in rids for gap in _gaps(heard.times[rid][before[rid] - 1 :]))

    def cancel(self) -> tuple[int, float]:
        """Steps and milliseconds until a cancelled sequence is gone, the others writing."""
        heard = Heard(self.clock)
        rids = [self.submit(prompt, 64) for prompt in self.prompts(self.concurrency)]
        while len(heard.times) < len(rids):
            self.engine.step(heard)
        there, start, steps = self.engine.pending(), self.clock(), 0
        self.engine.cancel(rids[0], Finish.CANCELLED)
        while self.engine.pending() == there:
            self.engine.step(heard)
            steps += 1
        took = (self.clock() - start) * 1e3
        self.drain(heard)
        return steps, took

    def priorities(self) -> tuple[float, float]:
        """Mean milliseconds to the first token of 4 urgent requests behind 40 that wait, and of those 40. All
        rows are taken when they come."""
        heard, start = Heard(self.clock), self.clock()
        for prompt in self.prompts(self.concurrency):
            self.submit(prompt, self.new)
        self.engine.step(heard)
        patient = [self.submit(prompt, self.new) for prompt in self.prompts(40)]
        urgent = [self.submit(prompt, self.new, priority=1) for prompt in self.prompts(4)]
        start = self.clock()
        self.drain(heard)
        waits = [[(heard.times[rid][0] - start) * 1e3 for rid in rids] for rids in (urgent, patient)]
        return sum(waits[0]) / len(urgent), sum(waits[1]) / len(patient)

    def _first(self, prompts: list[list[int]]) -> list[float]:
        start, heard = self.clock(), Heard(self.clock)
        for prompt in prompts:
            self.submit(prompt, 1)
        self.drain(heard)
        return [(times[0] - start) * 1e3 for times in heard.times.values()]


def _gaps(times: list[float]) -> list[float]:
    return [(later - sooner) * 1e3 for sooner, later in itertools.pairwise(times)]
