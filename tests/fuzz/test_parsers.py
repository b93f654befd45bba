"""Compiled parsers under kept and mutated inputs: refused or read, within bounds on memory and CPU time.

Each call may hold ten times its bytes and 64 KiB, and 160 bytes for each object that the parser's own bound
allows. It takes 2 us a byte and 5 ms at most on a machine of usual speed. The input lies before a page that
nobody may read where the parser takes any buffer. `make debug` runs the corpora and short mutations under the
address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import random

import pytest

from tests.fuzz.mutator import CORPORA, GROWN, mutations, read_corpus
from tests.fuzz.parsers import PARSERS, Parser, ParserCost

SHORT, LONG = 3 * GROWN, 15_000
MOST_CORPORA_BYTES = 300_000


def check(name: str, parser: Parser, data: bytes) -> ParserCost:
    cost = parser.least(data)
    assert not cost.excess, f"{name}: {cost.excess}: {data[:200]!r}"
    return cost


@pytest.mark.parametrize("name", PARSERS)
def test_kept_inputs(name: str) -> None:
    parser = PARSERS[name]
    outcomes = {check(name, parser, data).outcome[0] for data in read_corpus(parser.corpus)}
    assert "read" in outcomes


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_inputs(name: str) -> None:
    parser = PARSERS[name]
    for data in mutations(read_corpus(parser.corpus), parser.pieces, random.Random(name), SHORT):
        check(name, parser, data)


@pytest.mark.torture
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("seed", range(3))
def test_many_mutated_inputs(name: str, seed: int) -> None:
    parser = PARSERS[name]
    rng = random.Random(f"{name} {seed} {random.SystemRandom().random()}")
    for data in mutations(read_corpus(parser.corpus), parser.pieces, rng, LONG):
        check(name, parser, data)


def test_the_corpora_are_small_and_all_used() -> None:
    files = sorted(CORPORA.glob("*.txt"))
    assert {file.stem for file in files} >= {parser.corpus for parser in PARSERS.values()}
    assert sum(file.stat().st_size for file in files) < MOST_CORPORA_BYTES
    assert all(read_corpus(file.stem) for file in files)


def test_a_greedy_and_a_slow_parser_are_found() -> None:
    greedy = Parser(lambda data: [bytearray(100) for _ in data], "json")
    assert "bytes held" in greedy.measure(b"x" * 10_000).excess
    slow = Parser(lambda data: sum(1 for _ in range(len(data) ** 2 // 4)), "json")
    assert "s of CPU" in slow.measure(b"x" * 2_000).excess
