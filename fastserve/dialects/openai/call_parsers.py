"""Calls of tools in answers: the forms that models write them in, and a parser of text as it comes.

    hermes     <tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>     Hermes, Qwen
    llama3     {"name": "f", "parameters": {"a": 1}}, also after <|python_tag|>    Llama 3
    mistral    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]                 Mistral

    parser = CallParser(HERMES)
    parser.feed('So.\\n<tool_call>\\n{"name": "f", "argum')      [AnswerPart("So."), AnswerPart("", 0, "f")]
    parser.feed('ents": {"a": 1}}\\n</tool_call>')              [AnswerPart('{"a": 1}', 0)]
    parser.end()                                              []

Arguments are passed on as the model writes them. Text that belongs to no call is content; so is an object
that turns out to be no call before its name is known. White space beside a call is dropped. Each character is
looked at once, in an order that the cuts between pieces do not change.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection
from secrets import choice, token_hex
from typing import NamedTuple

SPACE = re.compile(r"\s*")
STRUCTURE = re.compile(r'["{}\[\]<]')
QUOTES = re.compile(r'["\\]')
SCALAR = re.compile(r"[^,}\]\s]*")
ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset((*ARGUMENTS, "name", "id", "type"))
"""Keys that a call's object may have before its name."""


class CallFormat(NamedTuple):
    """The form of a model's calls. `begin` stands before the first, or before each where there is no `more`
    between them; `open` and `close` stand around all of them, or around each."""

    name: str
    begin: str
    open: str = ""
    close: str = ""
    more: str = ""
    key: str = "arguments"
    """Key of the arguments."""
    bare: bool = False
    """Whether an answer may begin with the object of a call."""
    short_ids: bool = False
    """Whether ids are 9 letters and digits, as templates of Mistral insist."""

    def make_id(self) -> str:
        """Return an id for a new call."""
        if self.short_ids:
            return "".join(choice(string.ascii_letters + string.digits) for _ in range(9))
        return "call_" + token_hex(12)


HERMES = CallFormat("hermes", "<tool_call>", close="</tool_call>")
LLAMA3 = CallFormat("llama3", "<|python_tag|>", more=";", key="parameters", bare=True)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", open="[", close="]", more=",", short_ids=True)
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}


def detect_format(template: str) -> CallFormat | None:
    """Return the form of the calls in a chat template; None for one that is not known here."""
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    of_llama = "<|python_tag|>" in template or "ipython" in template
    return LLAMA3 if of_llama and '"parameters"' in template else None  # others write Python


class AnswerPart(NamedTuple):
    """A part of an answer: text of its content, or of the arguments of one of its calls."""

    text: str
    call: int = -1
    """Number of the call; -1: content."""
    name: str = ""
    """Function of a call, in its first part."""
    id: str = ""
    """Id of a call, beside its name, once one was made."""


class CallObject:
    """Reads the object of one call. It is `done` at its closing brace, and `broken` at a character that no
    call can have there. `name` is "" until `on_name` has taken it; arguments go to `on_arguments` as they
    come."""

    def __init__(self, on_name: Callable[[str], bool], on_arguments: Callable[[str], None]) -> None:
        self.name = ""
        self.done = self.broken = False
        self._on_name, self._on_arguments = on_name, on_arguments
        self._read: Callable[[str, int], int] = self._start
        self._then: Callable[[str], None] = self._take_key
        self._given = self._keeps = False  # arguments were there; the value that is being read is theirs
        self._depth, self._quoted, self._escaped = 0, False, False
        self._collected: list[str] = []
        self._early: list[str] = []  # arguments before the name

    def feed(self, text: str, at: int) -> int:
        """Read text from `at`; return the place of what was not read."""
        while at < len(text) and not (self.done or self.broken):
            at = self._read(text, at)
        return at

    def end(self) -> None:
        """Pass on the beginning of arguments that are written as a string or a plain value."""
        if self._keeps and self._collected and not (self.done or self.broken):
            self._pass_on("".join(self._collected))

    def _start(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", self._before_key)

    def _expect(self, text: str, at: int, wanted: str, then: Callable[[str, int], int]) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != wanted:
            self.broken = True
            return at
        self._read = then
        return at + 1

    def _before_key(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if text.startswith("}", at):
            return self._close(at)
        self._keeps, self._then = False, self._take_key
        return self._expect(text, at, '"', self._string)

    def _string(self, text: str, at: int) -> int:
        """Collect a string to its closing quote."""
        end, closed = self._find_quote(text, at)
        self._collected.append(text[at:end])
        if closed:
            literal = '"' + "".join(self._collected)
            self._collected.clear()
            self._then(literal)
        return end

    def _find_quote(self, text: str, at: int) -> tuple[int, bool]:
        """Return the place after a string's closing quote and True, or the end of the text and False."""
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = QUOTES.search(text, at)
            if found is None:
                return len(text), False
            at = found.end()
            if found[0] == '"':
                return at, True
            self._escaped = True
        return at, False

    def _take_key(self, literal: str) -> None:
        key = decode(literal)
        self.broken = key is None or (not self.name and key not in KEYS)
        self._keeps = key in ARGUMENTS and not self._given
        self._then = self._take_name if key == "name" and not self.name else self._drop
        self._read = self._colon

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._value)

    def _value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        first = text[at]
        if self._keeps:
            self._given, self._then = True, self._take_text
        elif self._then == self._take_name and first != '"':
            self.broken = True
            return at
        if first == '"':
            self._read = self._string
            return at + 1
        if first in "{[":
            self._read = self._nested
        elif SCALAR.match(text, at).end() > at:  # type: ignore[union-attr]  # it matches everywhere
            self._read = self._scalar
        else:
            self.broken = True
        return at

    def _nested(self, text: str, at: int) -> int:
        """Pass an object or a list on, to its end."""
        begin = at
        while at < len(text):
            if self._quoted:
                at, closed = self._find_quote(text, at)
                self._quoted = not closed
                continue
            found = STRUCTURE.search(text, at)
            if found is None:
                at = len(text)
                break
            mark, at = found[0], found.end()
            if mark == '"':
                self._quoted = True
            elif mark in "{[":
                self._depth += 1
            elif mark == "<":
                self.broken, at = True, at - 1
                break
            else:
                self._depth -= 1
                if not self._depth:
                    self._read = self._after_value
                    break
        if self._keeps and at > begin:
            self._pass_on(text[begin:at])
        return at

    def _scalar(self, text: str, at: int) -> int:
        end = SCALAR.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere
        self._collected.append(text[at:end])
        if end < len(text):
            value = "".join(self._collected)
            self._collected.clear()
            if self._keeps:
                self._pass_on("{}" if value == "null" else value)
            self._read = self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if text.startswith("}", at):
            return self._close(at)
        return self._expect(text, at, ",", self._before_key)

    def _close(self, at: int) -> int:
        if not self.name:
            self.broken = True
            return at
        if not self._given:
            self._on_arguments("{}")
        self.done = True
        return at + 1

    def _take_name(self, literal: str) -> None:
        name = decode(literal)
        if not name or not self._on_name(name):
            self.broken = True
            return
        self.name = name
        if self._early:
            self._on_arguments("".join(self._early))
        self._read = self._after_value

    def _take_text(self, literal: str) -> None:
        """Arguments as a string, which has their JSON."""
        text = decode(literal)
        self._pass_on(literal if text is None else text)
        self._read = self._after_value

    def _drop(self, literal: str) -> None:
        self._read = self._after_value

    def _pass_on(self, text: str) -> None:
        if self.name:
            self._on_arguments(text)
        else:
            self._early.append(text)


class CallParser:
    """Separates the calls of one answer from its content. `calls` counts the calls so far, and `complete`
    tells whether the last of them has ended; of a `bare` form, an object is no call unless it names one of
    `known`."""

    def __init__(self, form: CallFormat, known: Collection[str] = ()) -> None:
        self.calls = 0
        self.complete = True
        self._form, self._known = form, known
        self._read: Callable[[str, int], int] = self._first if form.bare else self._text
        self._object = CallObject(self._begin_call, self._add_arguments)
        self._bare = False
        self._parts: list[AnswerPart] = []
        self._raw: list[str] = []  # text since a call's beginning, until its name is known
        self._space: list[str] = []  # white space that is dropped if a call follows
        self._held = ""  # the beginning of a mark

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that more text completes."""
        self._parts = []
        text, self._held, at = self._held + text, "", 0
        while at < len(text):
            at = self._read(text, at)
        return self._parts

    def end(self) -> list[AnswerPart]:
        """Return the rest: no more text comes."""
        self._parts = []
        if self._read == self._call:
            self._object.end()
        if self._read in (self._text, self._opening):
            self._raw.append(self._held)
        self._add_content("".join(self._raw))
        if not self.calls and self._space:
            self._parts.append(AnswerPart("".join(self._space)))
        return self._parts

    def _first(self, text: str, at: int) -> int:
        """The beginning of an answer, of a form that has bare objects."""
        end = skip_space(text, at)
        self._space.append(text[at:end])
        if end < len(text):
            self._read = self._text
            if text[end] == "{":
                self._begin_object(bare=True)
        return end

    def _text(self, text: str, at: int) -> int:
        begin = self._form.begin
        found = text.find(begin, at)
        if found >= 0:
            self._add_content(text[at:found])
            self._raw.append(begin)
            self._read = self._opening
            if not self._form.open:
                self._begin_object()
            return found + len(begin)
        size = held_size(text, at, begin)
        self._held = text[len(text) - size :]
        self._add_content(text[at : len(text) - size])
        return len(text)

    def _opening(self, text: str, at: int) -> int:
        """Between the mark of all calls and their objects."""
        end = skip_space(text, at)
        self._raw.append(text[at:end])
        if text.startswith(self._form.open, end):
            self._raw.append(self._form.open)
            self._begin_object()
            return end + len(self._form.open)
        if end < len(text):
            self._give_up()
        return end

    def _begin_object(self, *, bare: bool = False) -> None:
        self._object, self._bare = CallObject(self._begin_call, self._add_arguments), bare
        self._read = self._call

    def _call(self, text: str, at: int) -> int:
        one = self._object
        end = one.feed(text, at)
        if not one.name:
            self._raw.append(text[at:end])
        if one.done:
            self.complete = True
            self._read = self._after
        elif one.broken:
            self._read = self._after if one.name else self._text
            if not one.name:
                self._give_up()
        return end

    def _after(self, text: str, at: int) -> int:
        """After an object: more of them, or their end."""
        form = self._form
        end = skip_space(text, at)
        self._space.append(text[at:end])
        rest = text[end : end + len(form.close or form.more)]
        if form.more and rest.startswith(form.more):
            self._begin_object()
            return end + len(form.more)
        if form.bare and rest == "{":
            self._begin_object(bare=True)
            return end
        if form.close and rest == form.close:
            self._space.clear()
            self._read = self._text
            return end + len(form.close)
        if rest and form.close.startswith(rest) and end + len(rest) == len(text):
            self._held = rest
            return len(text)
        if rest:
            self._read = self._text
        return end

    def _give_up(self) -> None:
        """Return to content: the text since the mark is no call."""
        raw, self._raw = "".join(self._raw), []
        self._read = self._text
        self._add_content(raw)

    def _begin_call(self, name: str) -> bool:
        if self._bare and self._known and name not in self._known:
            return False
        self._raw.clear()
        self._space.clear()
        self._parts.append(AnswerPart("", self.calls, name))
        self.calls += 1
        self.complete = False
        return True

    def _add_arguments(self, text: str) -> None:
        self._parts.append(AnswerPart(text, self.calls - 1))

    def _add_content(self, text: str) -> None:
        """Pass content on, but for white space at its end."""
        kept = text.rstrip()
        if kept:
            self._parts.append(AnswerPart("".join(self._space) + kept))
            self._space.clear()
        self._space.append(text[len(kept) :])


def skip_space(text: str, at: int) -> int:
    """Return the place of the next character that is no white space, or the end of the text."""
    return SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere


def held_size(text: str, at: int, mark: str) -> int:
    """Return how many characters at the end of text[at:] may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text) - at)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def decode(literal: str) -> str | None:
    """Return the text of a JSON string; None for one that is none."""
    try:
        found: str = json.loads(literal, strict=False)
    except ValueError:
        return None
    return found
