"""Structured answers: grammars compiled by llguidance, and the masks that keep a sequence within one.

    grammars = Grammars.open(folder, vocab, ends, slots)  None where llguidance is not installed
    compiled = grammars.compile(grammar)                 begins it in a thread; one object for equal grammars
    grammars.begin(slot, compiled)                       a sequence begins
    grammars.masks(slots)                                masks of the next tokens, for the sampler
    grammars.consume(slots, tokens)                      what was drawn

A grammar is a JSON schema, a regular expression, a list of choices, or a grammar in Lark's or GBNF's
syntax, as a front writes it for calls of tools. A token is allowed when the answer can go on with it; an end
of sequence, when the answer is complete.

Grammars that are held for sequences at a time are bounded, in number and in characters. They are compiled
one after the other, the shortest first. llguidance's limits bound the work and the
memory of each, at compilation and at each token.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.codec.generation import Grammar
from fastserve.errors import Kind, ServeError, invalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

MOST_HELD, MOST_HELD_CHARACTERS = 64, 1 << 20
"""Different grammars of all sequences, waiting ones among them. A compiled one takes up to 200 bytes for each
character."""
MOST_CACHED, MOST_CACHED_CHARACTERS = 32, 1 << 18
"""Compiled grammars that are kept for requests to come."""
MOST_FAULT = 400
WHITESPACE = r"(\r?\n[ \t]{0,60}| ?)"
"""Between the tokens of a JSON text: a space, or a line end and indentation. A model cannot fill its answer
with line ends."""
MOST_ITEMS, MOST_STATES, MOST_SYMBOLS = 1_000, 50_000, 200_000
"""Limits of llguidance for one grammar; a state of its lexer takes 1 to 2 KB."""
MOST_STEP_ITEMS = 5_000
"""Limit of the items for one mask, a tenth of llguidance's own: an ambiguous grammar took 310 ms for a mask,
for which all sequences of the worker waited, and takes 50 now. A schema of 200 properties that may be left
out stays below it; of 250 MOST_ITEMS refuses it as well."""


class CompiledGrammar:
    """A grammar that is compiled, or will be."""

    def __init__(self, grammar: Grammar, future: Future[Any]) -> None:
        self.grammar = grammar
        self.users = 0
        self._future = future

    def done(self) -> bool:
        """Return whether compilation has ended, well or not."""
        return self._future.done()

    def cancel(self) -> bool:
        """Drop a grammar whose compilation has not begun. Return False for another."""
        return self._future.cancel()

    def fault(self) -> ServeError | None:
        """Return why the grammar cannot be used; None for a good one. Waits for the compilation."""
        error = self._future.exception()
        if error is None or isinstance(error, ServeError):
            return error
        log.error("a grammar cannot be compiled", exc_info=error)
        return ServeError(Kind.INTERNAL, "the grammar cannot be compiled for this model's tokenizer")

    def matcher(self) -> Any:
        """Return a matcher at the beginning of an answer."""
        return self._future.result().deep_copy()

    def wait(self, seconds: float) -> None:
        """Wait for the compilation, so long at most."""
        wait([self._future], seconds)


class Grammars:
    """The grammars of one engine, and the matchers of its sequences by their slots of the sampler."""

    def __init__(self, tokenizer: Path, vocab: int, ends: Sequence[int], slots: int) -> None:
        self._path, self._vocab, self._ends = tokenizer, vocab, list(ends)
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: list[tuple[int, int, Grammar, Future[Any]]] = []
        """A heap, by length, then as they came; its tuples are compared without code of Python's."""
        self._came = 0
        self._tokenizer: Any = None
        self._matchers: dict[int, Any] = {}
        self._masks = np.zeros((slots, -(-vocab // 32)), np.int32)
        self._first, self._row_bytes = self._masks.ctypes.data, self._masks[0].nbytes

    @classmethod
    def open(cls, folder: Path, vocab: int, ends: Sequence[int], slots: int) -> Grammars | None:
        """Return the grammars of a model's folder; None where there is no tokenizer.json, no end of
        sequence, or no llguidance."""
        path = folder / "tokenizer.json"
        if not ends or not path.is_file() or importlib.util.find_spec("llguidance") is None:
            return None
        return cls(path, vocab, ends, slots)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar, whose compilation has begun; `release` it. Raises ServeError RESOURCE_EXHAUSTED
        while MOST_HELD others are in use."""
        found = self._compiled.get(grammar)
        if found is None:
            self._check_room(grammar)
            future: Future[Any] = Future()
            self._came += 1
            heappush(self._waiting, (len(grammar.text), self._came, grammar, future))
            self._thread.submit(self._make_next)
            found = self._compiled[grammar] = CompiledGrammar(grammar, future)
        self._compiled.move_to_end(grammar)
        found.users += 1
        self._shrink()
        return found

    def release(self, compiled: CompiledGrammar) -> None:
        """Give back a grammar that a sequence needs no more. One that nobody waits for is not compiled."""
        compiled.users -= 1
        if not compiled.users and compiled.cancel():
            del self._compiled[compiled.grammar]
        self._shrink()

    def begin(self, slot: int, compiled: CompiledGrammar) -> None:
        """Let the sequence of a slot answer by a grammar, which is compiled."""
        self._matchers[slot] = compiled.matcher()

    def end(self, slot: int) -> None:
        """Forget the sequence of a slot."""
        self._matchers.pop(slot, None)

    def masks(self, slots: Sequence[int]) -> NDArray[np.int32] | None:
        """Return masks, int32 [slots of the sampler, words], in which the rows of these slots are those of
        their next tokens; None where none of them has a grammar. Valid until the next call. A grammar that
        exceeds a limit at this token allows none."""
        if not self._matchers:
            return None
        found = [(slot, matcher) for slot in slots if (matcher := self._matchers.get(slot)) is not None]
        for slot, matcher in found:
            matcher.unsafe_compute_mask_ptr(self._first + slot * self._row_bytes, self._row_bytes)
            if matcher.is_error():
                self._masks[slot] = 0
        return self._masks if found else None

    def consume(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Take what was drawn for these slots; tokens below 0 are none."""
        if not self._matchers:
            return
        for slot, token in zip(slots, tokens, strict=True):
            if token >= 0 and (matcher := self._matchers.get(slot)) is not None:
                matcher.consume_token(token)

    def fault_of(self, slot: int) -> str:
        """Return why the grammar of a slot allows no token; empty for another reason."""
        matcher = self._matchers.get(slot)
        return "" if matcher is None or not matcher.is_error() else _first_line(matcher.get_error())

    def close(self) -> None:
        """End the thread; what it compiles is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._compiled.clear()
        self._matchers.clear()

    def _check_room(self, grammar: Grammar) -> None:
        """Raise ServeError where the grammars in use leave no room for another."""
        held = [len(one.grammar.text) for one in self._compiled.values() if one.users]
        if len(held) >= MOST_HELD:
            text = f"{MOST_HELD} different grammars are in use already"
        elif sum(held) + len(grammar.text) > MOST_HELD_CHARACTERS:
            text = f"different grammars of {sum(held)} characters are in use, allowed: {MOST_HELD_CHARACTERS}"
        else:
            return
        raise ServeError(Kind.RESOURCE_EXHAUSTED, text, retry_after_s=1)

    def _shrink(self) -> None:
        """Forget grammars that nobody uses beyond what is kept, the least recently used ones."""
        count = characters = 0
        for grammar, one in reversed(list(self._compiled.items())):
            if one.users:
                continue
            count, characters = count + 1, characters + len(grammar.text)
            if count > MOST_CACHED or characters > MOST_CACHED_CHARACTERS:
                del self._compiled[grammar]

    def _make_next(self) -> None:
        """Compile the shortest of the grammars that wait, in the thread: a long one may take seconds."""
        _, _, grammar, future = heappop(self._waiting)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._make(grammar))
            except Exception as error:
                future.set_exception(error)

    def _make(self, grammar: Grammar) -> Any:
        """Compile a grammar, in the thread. llguidance gives the interpreter's lock up meanwhile."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(self._path.read_text(), n_vocab=self._vocab, eos_token=self._ends)
        limits = LLParserLimits(
            max_items_in_row=MOST_ITEMS,
            step_max_items=MOST_STEP_ITEMS,
            max_lexer_states=MOST_STATES,
            max_grammar_size=MOST_SYMBOLS,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokenizer, _translate(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise invalid(_explain(grammar, matcher.get_error()))
        return matcher


def _translate(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form. Raises ServeError."""
    from llguidance import LLMatcher, grammar_from

    kind, text = grammar.kind, grammar.text
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
        if kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        return grammar_from(kind, text)
    except ValueError as error:
        raise invalid(_explain(grammar, str(error))) from None


def _explain(grammar: Grammar, text: str) -> str:
    what = "grammar of the tools" if grammar.kind == "lark" else grammar.kind.replace("_", " ")
    return f"the {what} cannot be used: {_first_line(text)}"


def _first_line(text: str) -> str:
    return " ".join(text.split())[:MOST_FAULT]
