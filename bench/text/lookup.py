"""Prompt look-up in the text engine, in process: tokens a second and CPU a token with drafts and without.

    python -m bench.text.lookup FOLDER [--tokens 8] [--streams 1 8] [--quantization int8]

The folder's model is computed as ever, and its logits are then changed so that the answer is a given text:
how much of a draft is accepted is a matter of the text alone, and what it costs one of the model. Texts:

    edit     the prompt is a Python file of the package, the answer the same, one token in 20 changed
    prose    the prompt is such a file, the answer one of the documentation's pages
    random   tokens without any order

Rounds are run in turns, with and without; the medians count.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tokenizers

from bench.text.runs import Heard
from fastserve.backends.llm.backend import TransformersBackend
from fastserve.backends.llm.protocols import TextRequest
from fastserve.codec.generation import Sampling, TextNote

ROOT = Path(__file__).parents[2]
PROMPT = 384
STEADY = 40.0
"""Added to the logit of the token that is to come."""


class Forced:
    """An engine whose answers are given texts."""

    def __init__(self, asked: argparse.Namespace, tokens: int) -> None:
        text = {
            "max_sequences": max(asked.streams),
            "max_tokens": PROMPT + asked.new + 1,
            "step_tokens": 1024,
            "quantization": asked.quantization,
            "prompt_lookup_num_tokens": tokens,
        }
        self.backend = TransformersBackend({"threads": asked.threads, "text": text}, asked.folder, 0)
        self.backend.load()
        self.engine: Any = self.backend._loaded
        self._plain = self.engine._model.forward
        self.engine._model.forward = self._forward
        self.answers: dict[int, list[int]] = {}
        self.steps = self.drafted = self.accepted = 0
        self._rid = 0
        self.engine._drafts.add = self._count

    def run(self, pairs: list[tuple[list[int], list[int]]]) -> tuple[float, float]:
        """Return seconds and CPU seconds a token of these prompts and answers, once all have begun."""
        heard = Heard(time.perf_counter)
        for prompt, answer in pairs:
            self._rid += 1
            self.answers[self._rid] = prompt + answer
            note = TextNote(sampling=Sampling(max_new_tokens=len(answer), ignore_eos=True))
            self.engine.submit(TextRequest(self._rid, prompt, note, time.monotonic_ns()))
        while len(heard.times) < len(pairs):
            self.engine.step(heard)
        self.steps = self.drafted = self.accepted = 0
        before = sum(map(len, heard.times.values()))
        start, cpu = time.perf_counter(), time.process_time()
        while self.engine.pending():
            self.engine.step(heard)
            self.steps += 1
        made = sum(map(len, heard.times.values())) - before
        return (time.perf_counter() - start) / made, (time.process_time() - cpu) / made

    def _forward(self, plan: Any) -> np.ndarray:
        logits: np.ndarray = self._plain(plan)
        owners = list(range(plan.writing))
        for chunk in plan.chunks:
            owners += [chunk.row] * chunk.count
        rows = self.engine._rows.sequences
        for row, at in zip(logits, plan.wanted.tolist(), strict=True):
            text, place = self.answers[rows[owners[at]].rid], int(plan.positions[at]) + 1
            if place < len(text):
                row[text[place]] += STEADY
        return logits

    def _count(self, drafts: list[Any]) -> None:
        self.drafted += sum(len(draft.tokens) for draft in drafts)
        self.accepted += sum(draft.accepted for draft in drafts)


def texts(kind: str, count: int, new: int, vocab: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers."""
    dice = random.Random(kind)
    if kind == "random":
        return [([dice.randrange(vocab) for _ in range(PROMPT)], [dice.randrange(vocab) for _ in range(new)])
                for _ in range(count)]  # fmt: skip
    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "fastserve/demo/scribe/1/tokenizer.json"))
    code = [_ids(tokenizer, path, PROMPT) for path in sorted((ROOT / "fastserve/engine").glob("*.py"))[1:]]
    if kind == "prose":
        pages = [_ids(tokenizer, path, new) for path in sorted((ROOT / "docs").glob("*.md"))]
        pages = [page for page in pages if len(page) == new]
        return [(code[at % len(code)], pages[at % len(pages)]) for at in range(count)]
    return [
        (
            code[at % len(code)],
            [one if dice.random() > 0.05 else dice.randrange(vocab) for one in code[at % len(code)][:new]],
        )
        for at in range(count)
    ]


def _ids(tokenizer: Any, path: Path, count: int) -> list[int]:
    ids: list[int] = tokenizer.encode(path.read_text()[: 8 * count]).ids[:count]
    return ids


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization", default="none")
    asked = parser.parse_args()
    plain, drafting = Forced(asked, 0), Forced(asked, asked.tokens)
    vocab = min(plain.backend.info.vocab_size, 3072)
    print(f"{asked.folder.name}, {asked.quantization}, drafts of {asked.tokens}, {asked.new} tokens")
    print("| text | streams | tokens/s | CPU ms a token | ratio of CPU | steps | drafted and accepted |")
    for kind in ("edit", "prose", "random"):
        for streams in asked.streams:
            pairs = texts(kind, streams, asked.new, vocab)
            runs = [(plain.run(pairs), drafting.run(pairs)) for _ in range(asked.rounds)]
            (wall, cpu), (fast, less) = (
                [median(run[way][clock] for run in runs) for clock in (0, 1)] for way in (0, 1)
            )
            ratio = median(run[1][1] / run[0][1] for run in runs)
            cells = (
                kind,
                streams,
                f"{1 / wall:.0f}, {1 / fast:.0f}",
                f"{1e3 * cpu:.2f}, {1e3 * less:.2f}",
                f"{ratio:.2f}",
                f"{plain.steps}, {drafting.steps}",
                f"{drafting.drafted}, {drafting.accepted}",
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
