"""Tools of a chat: what a request says of them, how the answer is held to them, and the calls in it.

    tools          [{"type": "function", "function": {"name": "f", "parameters": {...}}}]
    tool_choice    "none" | "auto" | "required" | {"type": "function", "function": {"name": "f"}}

    use = read_tools(body.tools, body.tool_choice, parallel=True)      None: there are none to use
    plan = await plan_calls(use, model, grammar)                       before the sequences start
    reader = plan.reader()                                             of one sequence
    reader.feed(text) -> [AnswerPart, ...]

The model's chat template shows it the tools. A call that has to come (`required`, or a function by name) is
guaranteed by a grammar in the model's own form of calls (`call_parsers`), which the model's worker follows.
With `auto` the answer is parsed; where a tool is `strict`, a grammar begins with the first call. In Responses
a tool is strict unless it says otherwise, where its schema is one that a grammar holds for certain.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fastserve.codec.generation import Grammar
from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.openai.call_parsers import FORMATS, AnswerPart, CallFormat, CallParser, detect_format
from fastserve.dialects.text_common.endpoint_parts import (
    BOUNDS,
    InvalidBody,
    check,
    is_neutral,
    read_typed,
)
from fastserve.errors import ServeError
from fastserve.serving.text import TextModel
from fastserve.serving.text.models import MOST_GRAMMAR_CHARACTERS
from fastserve.serving.text.tokenizer import Tokenizer

MOST_TOOLS = 128
MOST_TOOL_BYTES = MOST_GRAMMAR_CHARACTERS
"""Bytes of the tools of a request, which become a grammar."""
MOST_KEPT = 8
"""Sets of tools, and grammars of them, that a front process keeps: an agent sends the same with each request.
Of 65536 bytes one has 2 MB of objects at most."""
MOST_CALLS = 64
"""Calls of an answer that a grammar lets a model write."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of a call's JSON, as llguidance takes it: that of Python's json, which chat templates write."""
OPEN_KEYS = {"$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties"}
"""Keywords of a schema that may allow other properties than its own."""
BARE_CALL = (
    r'\s*\{{(\s*"(type|id)"\s*:\s*("([^"\\]|\\.)*"|[^,}}\]\s"{{\[]+)\s*,)*\s*'
    r'("name"\s*:\s*"(({})"|[^"\\]*\\)|"(parameters|arguments)"\s*:|"(type|id)"\s*:\s*[{{\[]|"[a-z]*\\)'
)
"""Beginnings of a text that a parser of bare calls may take for a call of a name, as a regular expression:
the name itself, perhaps after other keys that calls have; the arguments; what is written with escapes."""
OBJECT = Raw(b'"object"')
NO_PARAMETERS = {"type": OBJECT, "properties": Raw(b"{}")}
EXPECTED: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
MOST_IMPLIED_BYTES = 12 << 10
"""Bytes of the tools of a request up to which they are strict without saying so: their grammar is then short
enough to be followed."""
MOST_IMPLIED_OBJECTS = 100
"""Objects in the JSON of such a tool's schema: one of many alternatives, or of many properties that may be
left out, exceeds limits of llguidance while an answer is written, the worst one with 142."""
BOUNDS_OF_NUMBERS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
MOST_BOUND, LEAST_BOUND = 1e15, 1e-6
"""Bounds of numbers beyond these become regular expressions that llguidance may refuse."""
KEYWORDS: Mapping[str, set[str]] = {
    "string": {"minLength", "maxLength", "format"},
    "integer": {key for keys in BOUNDS_OF_NUMBERS for key in keys},
    "number": {key for keys in BOUNDS_OF_NUMBERS for key in keys},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set(),
    "null": set(),
}
"""Keywords for each type of a schema that is held without saying so."""
REMARKS = {"title", "description", "default", "examples", "deprecated"}
TEXT_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
TYPE_NAMES = {bool: "boolean", str: "string", int: "integer", float: "number", type(None): "null"}
NO_PLACE = "cannot be used: the chat template of model '{}' has no place for tools"
UNKNOWN_FORM = (
    "cannot be used: the chat template of model '{}' has calls in a form that is not known here; "
    "`text.tool_parser` in its model.yaml names the form, or none"
)
ChoiceWord = Literal["none", "auto", "required"]
NOT_PARSED = "must be auto or none: `text.tool_parser` of model '{}' is none"


class ToolPlaces(NamedTuple):
    """Places of a tool's parts in an item of `tools`, and the keys of tools and their choice: an API's faults
    name them."""

    name: str = ".function.name"
    parameters: str = ".function.parameters"
    tools: str = "tools"
    choice: str = "tool_choice"
    strict: bool = False
    """Whether a tool is strict that does not say, where its schema allows that."""


CHAT_PLACES = ToolPlaces()
FUNCTION_PLACES = ToolPlaces(".name", ".parameters", "functions", "function_call")


class ToolFunction(msgspec.Struct):
    """A function that the model may call."""

    name: str
    parameters: Raw | UnsetType = UNSET
    strict: bool | None = None


class ToolDefinition(msgspec.Struct):
    """A tool of a request."""

    function: ToolFunction
    type: str = "function"


class ToolList(msgspec.Struct):
    """The tools of a request, so that faults have their paths."""

    tools: list[ToolDefinition]


class OlderFunction(msgspec.Struct):
    """A function in the form that OpenAI had before tools."""

    name: str
    description: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET


class FunctionList(msgspec.Struct):
    """The functions of a request, so that faults have their paths."""

    functions: list[OlderFunction]


class FunctionName(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct):
    """A function by name, as OpenAI's API has it; `name` alone is that of its responses."""

    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None


class ToolChoice(msgspec.Struct):
    """`tool_choice`, so that faults have their paths."""

    tool_choice: str | NamedChoice


class CalledFunction(msgspec.Struct):
    name: str
    arguments: Any = None


class PastCall(msgspec.Struct):
    """A call in a message of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


_LIST: FreeJSON[ToolList] = FreeJSON(ToolList, BOUNDS)
_FUNCTIONS: FreeJSON[FunctionList] = FreeJSON(FunctionList, BOUNDS)
_CHOICE: FreeJSON[ToolChoice] = FreeJSON(ToolChoice, BOUNDS)
_PLAIN: FreeJSON[list[dict[str, Any]]] = FreeJSON(list[dict[str, Any]], BOUNDS)
_OBJECT: FreeJSON[dict[str, Any]] = FreeJSON(dict[str, Any], BOUNDS)
_SCHEMA: FreeJSON[dict[str, Raw]] = FreeJSON(dict[str, Raw], BOUNDS)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, eq=False)
class ToolUse:
    """The tools of a request, and how they are to be used. Requests with the same tools share it."""

    shown: Sequence[Mapping[str, Any]]
    """The tools as they were sent, for the chat template; `description` and `parameters` are always there."""
    functions: Sequence[ToolFunction]
    choice: Literal["auto", "required"] = "auto"
    named: str = ""
    """The only function that may be called, which has to be."""
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The names of all functions."""
        return frozenset(function.name for function in self.functions)


def check_count(tools: Sequence[object], key: str = "tools") -> None:
    """Refuse more tools than a request may have, before any is looked at. Raises InvalidBody."""
    most = f"has {len(tools)} items, allowed: at most {MOST_TOOLS}"
    check(len(tools) <= MOST_TOOLS, key, most)


def write_functions(functions: Raw) -> Raw:
    """Return functions of OpenAI's older form as tools. Raises InvalidBody."""
    size = len(memoryview(functions))
    check(size <= MOST_TOOL_BYTES, "functions", f"have {size} bytes, allowed: at most {MOST_TOOL_BYTES}")
    given = read_typed(_FUNCTIONS, b'{"functions":%b}' % bytes(functions)).functions
    check_count(given, "functions")
    return Raw(_encode([{"type": "function", "function": each} for each in given]))


def read_tools(
    tools: Raw | UnsetType, choice: Raw | UnsetType, *, parallel: bool, places: ToolPlaces = CHAT_PLACES
) -> ToolUse | None:
    """Return the use of tools, which have the form of a chat's; None for no tools, and for tools that are not
    to be called. Raises InvalidBody."""
    wanted = _read_choice(choice, places.choice)
    if wanted == "none":
        return None
    if isinstance(tools, UnsetType) or is_neutral(tools):
        check(wanted == "auto", places.choice, f"wants `{places.tools}`")
        return None
    size = len(memoryview(tools))
    check(size <= MOST_TOOL_BYTES, places.tools, f"have {size} bytes, allowed: at most {MOST_TOOL_BYTES}")
    chosen = wanted if isinstance(wanted, str) else ToolName(_name_of(wanted))
    return _read_use(bytes(tools), chosen, parallel, places)


class ToolName(NamedTuple):
    """A function that is to be called."""

    name: str


@lru_cache(maxsize=MOST_KEPT)
def _read_use(tools: bytes, wanted: ChoiceWord | ToolName, parallel: bool, places: ToolPlaces) -> ToolUse:
    functions = [tool.function for tool in _read_list(b'{"tools":%b}' % tools, places)]
    if places.strict and len(tools) <= MOST_IMPLIED_BYTES:
        for function in functions:
            if function.strict is None:
                function.strict = _is_narrow(function) and can_hold(_schema_of(function))
    shown = read_typed(_PLAIN, tools)
    for tool in shown:
        _complete(tool["function"])
    if isinstance(wanted, str):
        return ToolUse(shown, functions, "auto" if wanted == "auto" else "required", parallel=parallel)
    name = wanted.name
    use = ToolUse(shown, functions, "required", name, parallel=False)
    check(name in use.names, places.choice, f"names '{name:.64}', which is none of `{places.tools}`")
    return use


def _name_of(wanted: NamedChoice) -> str:
    return wanted.name or ("" if wanted.function is None else wanted.function.name)


def _complete(function: dict[str, Any]) -> None:
    """Give a function the keys that chat templates count on."""
    for key in [key for key, value in function.items() if value is None]:
        del function[key]
    for key, value in EXPECTED.items():
        function.setdefault(key, value)


def _read_choice(raw: Raw | UnsetType, key: str) -> ChoiceWord | NamedChoice:
    if isinstance(raw, UnsetType) or is_neutral(raw):
        return "auto"
    try:
        given = read_typed(_CHOICE, b'{"tool_choice":%b}' % bytes(raw)).tool_choice
    except InvalidBody as fault:
        told = (text.replace("tool_choice", key, 1) for text in (fault.message, fault.field))
        raise InvalidBody(*told) from None
    if isinstance(given, str):
        words = {"none", "auto", "required"}
        return cast(ChoiceWord, given) if given in words else NamedChoice(name=given)  # a name: TGI's form
    check(given.type == "function", f"{key}.type", f"'{given.type:.64}' is not supported")
    return given


def _read_list(text: bytes, places: ToolPlaces) -> list[ToolDefinition]:
    tools = read_typed(_LIST, text).tools
    check_count(tools, places.tools)
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        place, name = f"{places.tools}[{i}]", tool.function.name
        check(tool.type == "function", f"{place}.type", f"'{tool.type:.64}' is not supported")
        check(
            NAME.fullmatch(name) is not None,
            f"{place}{places.name}",
            "must be 1 to 64 letters, digits, underscores, dots and dashes",
        )
        check(name not in seen, f"{place}{places.name}", f"'{name}' is the name of a tool before it")
        seen.add(name)
        _read_parameters(tool.function, f"{place}{places.parameters}")
    return tools


def _read_parameters(function: ToolFunction, place: str) -> dict[str, Raw]:
    """Return the keywords of the schema of a function's arguments. Raises InvalidBody."""
    raw = function.parameters
    if isinstance(raw, UnsetType) or bytes(raw).strip() in (b"null", b""):
        return NO_PARAMETERS
    check(bytes(raw).lstrip().startswith(b"{"), place, "must be an object, a JSON schema")
    found = read_typed(_SCHEMA, bytes(raw))
    check(bytes(found.get("type", OBJECT)) == b'"object"', f"{place}.type", "must be object")
    return found


def _is_narrow(function: ToolFunction) -> bool:
    raw = function.parameters
    return isinstance(raw, UnsetType) or bytes(raw).count(b"{") <= MOST_IMPLIED_OBJECTS


def _schema_of(function: ToolFunction) -> dict[str, Any]:
    """Return the schema of a function's arguments, which has been read before, as Python's objects."""
    raw = function.parameters
    read = {} if isinstance(raw, UnsetType) or is_neutral(raw) else read_typed(_OBJECT, bytes(raw))
    return {"type": "object", **read}


def can_hold(schema: Mapping[str, Any]) -> bool:
    """Return whether a grammar certainly holds the arguments of a function to their schema: it has no
    keywords but the most common ones, and no bounds that exclude each other."""
    schema, named = dict(schema), dict[str, object]()
    for key in ("$defs", "definitions"):
        given = schema.pop(key, {})
        if not isinstance(given, dict):
            return False
        named |= {f"#/{key}/{name}": one for name, one in given.items()}
    refers = any(isinstance(one, dict) and "$ref" in one for one in named.values())  # perhaps to itself
    return not refers and all(_holds(one, named) for one in (schema, *named.values()))


def _holds(schema: object, named: Mapping[str, object]) -> bool:
    if not isinstance(schema, dict):
        return False
    keys = schema.keys() - REMARKS
    if "$ref" in keys:
        return keys == {"$ref"} and isinstance(schema["$ref"], str) and schema["$ref"] in named
    if "anyOf" in keys:
        some = schema["anyOf"]
        return keys == {"anyOf"} and isinstance(some, list) and bool(some) and _all_hold(some, named)
    types = schema.get("type", list(KEYWORDS))
    types = types if isinstance(types, list) else [types]
    if not types or not all(isinstance(each, str) and each in KEYWORDS for each in types):
        return False
    if keys & {"enum", "const"}:
        values = schema.get("enum", [schema.get("const")])
        fits = keys <= {"type", "enum"} or keys <= {"type", "const"}
        return (
            fits and isinstance(values, list) and bool(values) and all(_type_of(v) in types for v in values)
        )
    return keys <= {"type"}.union(*(KEYWORDS[each] for each in types)) and _parts_hold(schema, named)


def _type_of(value: object) -> str:
    return TYPE_NAMES.get(type(value), "")


def _all_hold(schemas: Iterable[object], named: Mapping[str, object]) -> bool:
    return all(_holds(each, named) for each in schemas)


def _parts_hold(schema: Mapping[str, Any], named: Mapping[str, object]) -> bool:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    inner = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return (
        all(isinstance(name, str) and name in properties for name in required)
        and _all_hold([*properties.values(), *(each for each in inner if not isinstance(each, bool))], named)
        and schema.get("items", True) is not False
        and (isinstance(schema.get("format", "date"), str) and schema.get("format", "date") in TEXT_FORMATS)
        and _ordered([schema.get(key) for key in ("minLength", "maxLength")])
        and _ordered([schema.get(key) for key in ("minItems", "maxItems")])
        and _bounded(schema)
    )


def _ordered(sizes: Sequence[object]) -> bool:
    """Return whether bounds of a length are numbers from 0, the first the smaller one."""
    given = [each for each in sizes if each is not None]
    whole = all(type(each) is int and 0 <= each <= MOST_BOUND for each in given)
    return whole and given == sorted(cast("list[int]", given))


def _bounded(schema: Mapping[str, Any]) -> bool:
    """Return whether there are numbers between the bounds, which are of a size that texts of numbers have."""
    lows, highs = ([schema[key] for key in keys if key in schema] for keys in BOUNDS_OF_NUMBERS)
    given = [*lows, *highs]
    whole = "integer" in schema.get("type", ())
    if not all(type(each) is int or (type(each) is float and not whole) for each in given):
        return False
    if not all(each == 0 or LEAST_BOUND <= abs(each) <= MOST_BOUND for each in given):
        return False
    if not lows or not highs:
        return True
    room = min(highs) - max(lows)
    excludes = sum(key in schema for key in ("exclusiveMinimum", "exclusiveMaximum"))
    return bool(room >= excludes if whole else room > 0 or (room == 0 and not excludes))


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give results of tools the names of the functions that were called: templates of Hermes want them."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            called = names.get(message.get("tool_call_id") or "")
            if called is not None:
                message["name"] = called


def read_past_calls(given: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """Return the calls of a message of the assistant as chat templates take them: arguments are objects.
    Raises InvalidBody."""
    found = []
    for i, each in enumerate(given):
        at = f"{place}[{i}]"
        try:
            call = msgspec.convert(each, PastCall)
        except msgspec.ValidationError as fault:
            check(False, at, f"is no call of a function: {str(fault)[:200]}")
            raise
        check(call.type == "function", f"{at}.type", f"'{call.type:.64}' is not supported")
        found.append(write_past_call(call.id, call.function, f"{at}.function"))
    return found


def write_past_call(id: str | None, function: CalledFunction, place: str) -> dict[str, Any]:
    """Return a call as chat templates take it: its arguments are an object. Raises InvalidBody."""
    arguments = _read_arguments(function.arguments, f"{place}.arguments")
    written: dict[str, Any] = {"id": id} if id is not None else {}
    return {**written, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def name_older_results(messages: Sequence[dict[str, Any]]) -> None:
    """Make messages of the role `function` results of tools: of the last call of their name."""
    ids: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            ids[call["function"]["name"]] = call.get("id", "")
        if message["role"] == "function":
            message["role"] = "tool"
            if ids.get(message.get("name", "")):
                message["tool_call_id"] = ids[message["name"]]


def _read_arguments(given: object, place: str) -> dict[str, Any]:
    if given is None or given == "":
        return {}
    if isinstance(given, str):
        check(given.lstrip().startswith("{"), place, "must be a JSON object")
        try:
            return read_typed(_OBJECT, given.encode("utf-8", "surrogatepass"))
        except ServeError as fault:
            raise InvalidBody(f"`{place}` must be a JSON object: {fault.message}", place) from None
    check(isinstance(given, dict), place, "must be a JSON object")
    return cast("dict[str, Any]", given)


class ToolCall(NamedTuple):
    """A call of a whole answer; `arguments` is the text of an object."""

    id: str
    name: str
    arguments: str

    def write(self) -> dict[str, Any]:
        """Return an item of `message.tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def write_call_part(part: AnswerPart) -> dict[str, Any]:
    """Return an item of `delta.tool_calls`."""
    if not part.name:
        return {"index": part.call, "function": {"arguments": part.text}}
    return {"index": part.call, **ToolCall(part.id, part.name, part.text).write()}


class ToolReader:
    """Finds the calls in one sequence. Without `parallel`, those after the first are left out."""

    def __init__(self, form: CallFormat, use: ToolUse) -> None:
        self._parser, self._form = CallParser(form, use.names), form
        self._most = sys.maxsize if use.parallel else 1

    @property
    def calls(self) -> bool:
        """Whether the answer, which has ended, ends in a whole call."""
        return self._parser.calls > 0 and self._parser.complete

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that more text completes."""
        return self._take(self._parser.feed(text))

    def end(self) -> list[AnswerPart]:
        """Return the rest."""
        return self._take(self._parser.end())

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content of a whole answer, and its calls."""
        content: list[str] = []
        begun: list[tuple[str, str, list[str]]] = []
        for part in [*self.feed(text), *self.end()]:
            if part.call < 0:
                content.append(part.text)
            elif part.name:
                begun.append((part.id, part.name, []))
            else:
                begun[-1][2].append(part.text)
        return "".join(content), [ToolCall(id, name, "".join(pieces)) for id, name, pieces in begun]

    def _take(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        kept = [part for part in parts if part.call < self._most]
        return [part._replace(id=self._form.make_id()) if part.name else part for part in kept]


class ToolPlan(NamedTuple):
    """How the calls of one request's answers are written and read. Without a form, calls stay text."""

    use: ToolUse
    form: CallFormat | None = None
    grammar: Grammar | None = None
    """The language of the whole answer."""
    marks: Sequence[str] = ()
    """Tokens that have to be part of the text."""
    held: frozenset[str] = frozenset()
    """Functions whose arguments the grammar holds to their schemas."""

    def reader(self) -> ToolReader | None:
        """Return the reader of one sequence."""
        return None if self.form is None else ToolReader(self.form, self.use)


async def plan_calls(use: ToolUse, model: TextModel, content: Grammar | None) -> ToolPlan:
    """Return how a model is to call tools, in answers of which the content belongs to a grammar. Raises
    ServeError."""
    template = await model.tool_template()
    check(bool(template), "tools", NO_PLACE.format(model.name))
    named = model.tool_parser
    if named == "none":
        check(use.choice == "auto", "tool_choice", NOT_PARSED.format(model.name))
        return ToolPlan(use, grammar=content)
    form = detect_format(template) if named == "auto" else FORMATS[named]
    if form is None:
        raise InvalidBody(f"`tools` {UNKNOWN_FORM.format(model.name)}", "tools")
    fits = content is None or content.kind == "json_schema"
    check(fits, "tools", "cannot be combined with a grammar other than a JSON schema")
    await asyncio.sleep(0)  # to read the tools took 2 ms, to write their grammar takes 1 ms
    text = write_grammar(use, form, find_marks(form, model.tokenizer), content, model.info.grammars)
    marks = [mark for mark in (form.begin, form.close) if mark]
    if text is None:
        return ToolPlan(use, form, None, marks)
    all_held = use.choice == "required" or content is not None
    held = frozenset(one.name for one in use.functions if all_held or one.strict)
    return ToolPlan(use, form, Grammar("lark", text), marks, held)


Marks = tuple[tuple[str, int], ...]
"""The marks of a form that are tokens of a vocabulary, and these tokens."""


def find_marks(form: CallFormat, tokenizer: Tokenizer) -> Marks:
    """Return the marks of a form that are tokens."""
    found = [(mark, tokenizer.added_token(mark)) for mark in (form.begin, form.open, form.close) if mark]
    return tuple((mark, token) for mark, token in found if token is not None)


@lru_cache(maxsize=MOST_KEPT)
def write_grammar(
    use: ToolUse, form: CallFormat, marks: Marks, content: Grammar | None, can: bool
) -> str | None:
    """Return the grammar of an answer with calls, in Lark's syntax as llguidance reads it; None for any text.
    Unless the model `can` follow grammars, those of strict tools are left out."""
    return _GrammarText(use, form, marks).write(content, can)


class _GrammarText:
    """Writes one grammar."""

    def __init__(self, use: ToolUse, form: CallFormat, marks: Marks) -> None:
        self._use, self._form, self._tokens = use, form, dict(marks)

    def write(self, content: Grammar | None, can: bool) -> str | None:
        use, form = self._use, self._form
        if use.choice == "required":
            return self._rules("start: calls", self._mark(form.begin))
        if content is not None:
            schema = write_schema(_read_keywords(content.text))
            start = f"start: calls | content\ncontent: %json {schema}"
            return self._rules(start, self._mark(form.begin))
        if not can or not any(function.strict for function in use.functions):
            return None
        token = self._tokens.get(form.begin)
        if form.bare:
            return self._rules(self._bare_start(token), "", strictly=False)
        if token is None:
            ends = f"text[suffix={json.dumps(form.begin)}]: ANY\nANY: /(?s:.*)/"
            return self._rules(f"start: ANY | calls\n{ends}", "text", strictly=False)
        return self._rules(f"start: free* calls?\nfree: <[^{token}]>", f"<[{token}]>", strictly=False)

    def _bare_start(self, token: int | None) -> str:
        """Return the beginning of a grammar of texts that do not begin as a call does, or calls. A terminal
        is of whole characters only where an expression in it says so."""
        begun = BARE_CALL.format("|".join(re.escape(name) for name in sorted(self._use.names)))
        text = f"/(?s:.*)/ & ~/(?s:{begun}.*)/"
        if token is not None:
            return f"start: TEXT | TEXT? <[{token}]> calls | calls\nTEXT: {text}"
        mark = f"(?s:.*){re.escape(self._form.begin)}"
        marked = f"{text} & /{mark}/ & ~/{mark}(?s:.+)/"
        return f"start: TEXT | MARKED calls | calls\nTEXT: {text} & ~/{mark}(?s:.*)/\nMARKED: {marked}"

    def _rules(self, start: str, first: str, *, strictly: bool = True) -> str:
        """Return all rules. `first` matches up to the first mark of a call; `strictly`, the arguments of
        every function belong to its schema."""
        use, form = self._use, self._form
        begin, end = self._mark(form.begin), self._mark(form.close)
        more = f"{{0,{MOST_CALLS - 1}}}"
        if form.bare:
            others = f'("{form.more}" function){more}' if use.parallel and not strictly else ""
            calls = f"function {others}"
        elif form.open:
            others = f'(", " function){more}' if use.parallel else ""
            calls = f'{first} " "? {self._mark(form.open)} function {others} {end}'
        else:
            one = f'"\\n" function "\\n" {end}'
            others = f'("\\n" {begin} {one}){more}' if use.parallel else ""
            calls = f"{first} {one} {others}"
        written = [start, f"calls: {calls}"]
        functions = [each for each in use.functions if use.named in ("", each.name)]
        written.append("function: " + " | ".join(f"f{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            before = f'{{"name": {json.dumps(function.name)}, "{form.key}": '
            begun = json.dumps(before)
            if form.bare and not strictly:  # white space of its own would be text to the lexer
                begun = f"B{i}"
                written.append(f"{begun}: /\\s*{re.escape(before)}/")
            keywords = keywords_of(function) if strictly or function.strict else {"type": OBJECT}
            written.append(f'f{i}: {begun} a{i} "}}"')
            written.append(f"a{i}: %json {write_schema(keywords)}")
        return "\n".join(written)

    def _mark(self, text: str) -> str:
        token = self._tokens.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def keywords_of(function: ToolFunction) -> dict[str, Any]:
    """Return the keywords of the schema of a function's arguments, an object. Where it lists properties and
    says nothing of others, there are no others: a model cannot make parameters up."""
    given = _read_parameters(function, "parameters")
    closed = "properties" in given and not OPEN_KEYS & given.keys()
    return {"type": OBJECT, **given, **({"additionalProperties": False} if closed else {})}


def _read_keywords(text: str) -> dict[str, Raw]:
    """Return the keywords of a schema that the content belongs to. Raises InvalidBody."""
    try:
        return _SCHEMA.read(text)
    except ServeError as fault:
        raise InvalidBody(f"the json schema cannot be used: {fault.message}") from None


def write_schema(keywords: Mapping[str, Any]) -> str:
    """Return a schema as a grammar has it."""
    return _encode({**keywords, "x-guidance": COMPACT}).decode()
