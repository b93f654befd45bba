"""POST /v1/responses: OpenAI's newer form of a chat, as a reader and a writer over the same call.

    {"model": "m", "instructions": "Be brief.", "input": "Hi"}
    -> {"object":"response","status":"completed","output":[{"type":"message","content":[...]}],...}

A stream has typed events with numbers, from `response.created` to `response.completed` or
`response.incomplete`. Nothing is stored: a request has the whole conversation, and keys that name an earlier
response are refused. Tools are those of a chat: an item `function_call` is a call, an item
`function_call_output` a message of the role `tool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from time import time
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from fastserve.codec.json_text import FreeJSON
from fastserve.dialects.openai.call_parsers import AnswerPart
from fastserve.dialects.openai.completions import (
    PLAIN,
    AnswerChoice,
    AnswerEncoder,
    AnswerForm,
    CompletionApi,
    ScoredToken,
    TokenUsage,
    completion_route,
    write_scored,
)
from fastserve.dialects.openai.errors import error_body, refuse
from fastserve.dialects.openai.requests import (
    ChatRequest,
    CompletionTask,
    Count,
    Refused,
    ToolKey,
    make_chat_task,
    refused_keys,
)
from fastserve.dialects.openai.tools import (
    CalledFunction,
    ToolCall,
    ToolPlaces,
    check_count,
    name_results,
    write_past_call,
)
from fastserve.dialects.text_common.endpoint_parts import (
    BOUNDS,
    BodyUse,
    InvalidBody,
    TextService,
    check,
    is_neutral,
    read_typed,
)
from fastserve.dialects.text_common.event_streams import EVENTS
from fastserve.dialects.text_common.structured import NamedSchema, ResponseFormat, Value, is_absent
from fastserve.errors import ServeError
from fastserve.serving.text import EventTemplate

NOT_STORED = "is not supported: nothing is stored here; send the whole conversation in `input`"
STORED = ("previous_response_id", "conversation", "store", "background")
LOGPROBS = "message.output_text.logprobs"
PLACES = ToolPlaces(".name", ".parameters", strict=True)
_encode = msgspec.json.Encoder().encode


class ResponsePart(msgspec.Struct):
    """One part of an item's content; `_read_parts` checks its type."""

    type: str
    text: str | None = None
    image_url: str | None = None


class ResponseItem(msgspec.Struct):
    """One item of a conversation: a message, a call of a function, or its output."""

    role: str | None = None
    content: str | list[ResponsePart] | None = None
    type: str = "message"
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponsePart] | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function that the model may call, as answers repeat it; tools of OpenAI's own have another type."""

    type: str = "function"
    name: str = ""
    description: str | UnsetType | None = UNSET
    parameters: Value = UNSET
    strict: bool | None = None


class TextFormat(msgspec.Struct):
    """`text.format`: `response_format` of a chat, in one object."""

    type: str = "text"
    name: str = ""
    schema: Value = UNSET


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None


class ReasoningConfig(msgspec.Struct):
    """`effort` is a variable of the chat template; a summary there is none."""

    effort: Annotated[str, Meta(max_length=64)] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[ResponseItem], Meta(min_length=1, max_length=65536)]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    """`include_obfuscation` has no effect: events are not padded."""
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=1, le=5)] | None = None
    timeout: Annotated[int, Meta(ge=1, le=65535)] | None = None
    previous_response_id: Refused = UNSET
    conversation: Refused = UNSET
    store: Refused = UNSET
    background: Refused = UNSET
    tools: list[ResponseTool] | None = None
    tool_choice: ToolKey = UNSET
    prompt: Refused = UNSET
    truncation: Refused = UNSET
    context_management: Refused = UNSET
    background_options: Refused = UNSET
    image: Refused = UNSET
    moderation: Refused = UNSET


NEUTRAL = {"truncation": (b'"disabled"',)}
_reader: FreeJSON[ResponsesRequest] = FreeJSON(ResponsesRequest, BOUNDS)


def read_responses(data: bytes | bytearray, most_stops: int) -> CompletionTask:
    """Return the task of a body. Raises InvalidBody."""
    body = read_typed(_reader, data)
    for key in refused_keys(ResponsesRequest):
        neutral = is_neutral(getattr(body, key), NEUTRAL.get(key, ()))
        check(neutral, key, NOT_STORED if key in STORED else "is not supported")
    images: list[tuple[str, str]] = []
    messages = _read_input(body, images)
    scored = _wants_logprobs(body)
    chat = ChatRequest(
        messages=[],
        model=body.model,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        max_completion_tokens=body.max_output_tokens,
        logprobs=scored,
        top_logprobs=body.top_logprobs if scored else None,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=_read_format(body.text),
        seed=body.seed,
        priority=body.priority,
        timeout=body.timeout,
        tools=_write_tools(body.tools or []),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    return make_chat_task(chat, most_stops, messages, images, source="input", asked=body, places=PLACES)


def _write_tools(tools: list[ResponseTool]) -> Raw | UnsetType:
    """Return tools as a chat has them. Raises InvalidBody."""
    check_count(tools)
    written = []
    for i, tool in enumerate(tools):
        own = tool.type == "function"
        check(own, f"tools[{i}].type", f"'{tool.type:.64}' is not supported: function is")
        given: dict[str, Any] = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        }
        if tool.strict is not None:
            given["strict"] = tool.strict
        function = {key: value for key, value in given.items() if value is not UNSET}
        written.append({"type": "function", "function": function})
    return Raw(_encode(written)) if written else UNSET


def _wants_logprobs(body: ResponsesRequest) -> bool:
    for place, each in enumerate(body.include or ()):
        if each != LOGPROBS:
            raise InvalidBody(f"`include[{place}]`: '{each:.64}' is not supported", f"include[{place}]")
    return bool(body.include) or bool(body.top_logprobs)


def _read_format(text: TextConfig | None) -> ResponseFormat | None:
    given = None if text is None else text.format
    if given is None:
        return None
    if given.type != "json_schema":
        check(
            given.type in ("text", "json_object"), "text.format.type", f"'{given.type:.64}' is not supported"
        )
        return ResponseFormat(given.type)
    check(not is_absent(given.schema), "text.format.schema", "is required")
    return ResponseFormat(given.type, json_schema=NamedSchema(given.schema))


def _read_input(body: ResponsesRequest, images: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The messages of a conversation, as templates know them. Raises InvalidBody."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        _read_item(item, f"input[{i}]", messages, images)
    name_results(messages)
    return messages


def _read_item(
    item: ResponseItem, place: str, messages: list[dict[str, Any]], images: list[tuple[str, str]]
) -> None:
    """Add one item to the messages; a call, to the message of the assistant before it. Raises InvalidBody."""
    if item.type == "function_call":
        check(item.name is not None, f"{place}.name", "is required")
        call = write_past_call(item.call_id, CalledFunction(item.name or "", item.arguments), place)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
        return
    if item.type == "function_call_output":
        check(item.call_id is not None, f"{place}.call_id", "is required")
        check(item.output is not None, f"{place}.output", "is required")
        text = item.output
        if isinstance(text, list):
            text = _read_parts(text, f"{place}.output", images)
        messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})
        return
    taken = "a message, a function_call and a function_call_output are"
    check(item.type == "message", f"{place}.type", f"'{item.type:.64}' is not supported: {taken}")
    known = item.role in ("system", "developer", "user", "assistant")
    check(known, f"{place}.role", "must be system, developer, user or assistant")
    content = item.content
    if isinstance(content, list):
        content = _read_parts(content, f"{place}.content", images)
    check(content is not None, f"{place}.content", "is required")
    messages.append({"role": item.role, "content": content})


def _read_parts(parts: list[ResponsePart], place: str, images: list[tuple[str, str]]) -> str:
    """The texts of a content, a line each; its images are put into `images`."""
    texts = []
    for i, part in enumerate(parts):
        if part.type in ("input_text", "output_text", "text"):
            check(part.text is not None, f"{place}[{i}].text", "is required")
            texts.append(part.text or "")
        elif part.type == "input_image":
            check(part.image_url is not None, f"{place}[{i}].image_url", "is required")
            images.append((f"{place}[{i}].image_url", part.image_url or ""))
        else:
            check(False, f"{place}[{i}].type", f"'{part.type:.64}' is not supported")
    return "\n".join(texts)


class MessageScores:
    """Scores of the tokens that wrote a message's text: those of a call that follows are left out."""

    def __init__(self) -> None:
        self._all: list[ScoredToken] = []
        self._told = 0

    def add(self, scored: Sequence[ScoredToken], characters: int) -> list[dict[str, Any]]:
        """Add tokens; return the new ones that begin in a text of so many characters."""
        self._all += scored
        begin = self._told
        while self._told < len(self._all) and self._all[self._told].offset < characters:
            self._told += 1
        return write_scored(self._all[begin : self._told])

    def end(self, *, called: bool) -> list[dict[str, Any]]:
        """Return all; of a message before a call, those of its text."""
        return write_scored(self._all[: self._told] if called else self._all)


class ResponsesWriter(AnswerEncoder):
    """Writer of one response, whole or as typed events."""

    content_type = EVENTS
    done = b""
    ends_with_usage = True

    def __init__(self, model: str, version: object, form: AnswerForm = PLAIN) -> None:
        super().__init__(model, version, form)
        self._model, self._asked = model, form.asked
        self._id = "resp_" + token_hex(12)
        self._created = int(time())
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The item that is being written; the others have ended."""
        self._texts: list[str] = []
        self._characters = 0
        self._scores = MessageScores()

    def write(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        (choice,) = choices
        status = status_of(choice.finish)
        output: list[dict[str, Any]] = []
        if choice.text or not choice.calls:
            self._scores.add(choice.scored, len(choice.text))
            content = _write_content(choice.text, self._scores.end(called=bool(choice.calls)))
            output.append(_begin_message() | _end_message("completed" if choice.calls else status, content))
        for i, call in enumerate(choice.calls, 1):
            whole = i < len(choice.calls) or choice.finish == "tool_calls"
            output.append(_begin_call(call) | {"status": "completed" if whole else "incomplete"})
        return _encode(self._response(status, output, usage))

    def begin(self, index: int, prompt_tokens: int = 0) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def piece(self, index: int, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        before = b"" if self._writes("message") else self._begin_item(_begin_message())
        self._texts.append(text)
        self._characters += len(text)
        written = self._scores.add(scored, self._characters)
        return before + self._part("response.output_text.delta", delta=text, logprobs=written)

    def part(self, index: int, part: AnswerPart, scored: Sequence[ScoredToken] = ()) -> bytes:
        """Return the events of a part of an answer that may call tools: items begin with their first."""
        if part.call < 0:
            if part.text:
                return self.piece(index, part.text, scored)
            self._scores.add(scored, self._characters)
            return b""
        if part.name:
            return self._begin_item(_begin_call(ToolCall(part.id, part.name, "")))
        self._texts.append(part.text)
        return self._item_event("response.function_call_arguments.delta", delta=part.text)

    def frames(self, index: int) -> EventTemplate | None:
        """Return None: events are numbered."""
        return None

    def last(
        self, index: int, finish: str, usage: TokenUsage | None = None, stop: str | None = None
    ) -> bytes:
        status = status_of(finish)
        before = b"" if self._open or self._items else self._begin_item(_begin_message())
        cut = self._writes("function_call") and finish != "tool_calls"
        ended = self._end_item("incomplete" if cut else status, called=False)
        response = self._response(status, self._items, usage)
        return before + ended + self._event(f"response.{status}", response=response)

    def usage(self, usage: TokenUsage) -> bytes:
        return b""

    def _writes(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        before = self._end_item("completed", called=item["type"] == "function_call")
        self._open = item
        begun = before + self._event("response.output_item.added", output_index=len(self._items), item=item)
        if not self._writes("message"):
            return begun
        return begun + self._part("response.content_part.added", part=_write_content("", []))

    def _end_item(self, status: str, *, called: bool) -> bytes:
        """End the item that is being written, if any; `called`: a call follows."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return b""
        if item["type"] == "message":
            content = _write_content(text, self._scores.end(called=called))
            told = {"text": text, "logprobs": content["logprobs"]}
            ended = self._part("response.output_text.done", **told) + self._part(
                "response.content_part.done", part=content
            )
            item |= _end_message(status, content)
        else:
            ended = self._item_event("response.function_call_arguments.done", arguments=text)
            item |= {"arguments": text, "status": status}
        ended += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        self._texts.clear()
        self._scores = MessageScores()
        return ended

    def _event(self, kind: str, **more: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))

    def _item_event(self, kind: str, **more: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._items), **more)

    def _part(self, kind: str, **more: Any) -> bytes:
        return self._item_event(kind, content_index=0, **more)

    def _repeat(self, tool: ResponseTool) -> ResponseTool:
        """Return a tool with what came of a `strict` that the request left open."""
        if tool.strict is not None:
            return tool
        return msgspec.structs.replace(tool, strict=tool.name in self.held)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: TokenUsage | None = None
    ) -> dict[str, Any]:
        body = self._asked
        reasoning = None if body.reasoning is None else body.reasoning.effort
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _repeat_format(body.text)},
            "tool_choice": "auto" if is_neutral(body.tool_choice) else body.tool_choice,
            "tools": [self._repeat(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else write_usage(usage),
        }


def _begin_message() -> dict[str, Any]:
    begun = {"type": "message", "id": "msg_" + token_hex(12), "status": "in_progress"}
    return {**begun, "role": "assistant", "content": []}


def _end_message(status: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return what has changed at a message's end."""
    return {"status": status, "content": [content]}


def _begin_call(call: ToolCall) -> dict[str, Any]:
    begun = {"type": "function_call", "id": "fc_" + token_hex(12), "status": "in_progress"}
    return {**begun, "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _write_content(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def status_of(finish: str) -> str:
    """Return the status of a response that has ended well."""
    return "incomplete" if finish == "length" else "completed"


def write_usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _repeat_format(text: TextConfig | None) -> dict[str, Any]:
    given = None if text is None else text.format
    if given is None:
        return {"type": "text"}
    if given.type != "json_schema":
        return {"type": given.type}
    return {"type": "json_schema", "name": given.name, "schema": given.schema, "strict": True}


def tell(service: TextService, fault: ServeError) -> bytes:
    """Return the event of an error within a stream, on which the client raises."""
    flat = service.options.openai_flavor == "mindie"
    return b'event: error\ndata: {"type":"error",%b\n\n' % error_body(fault, flat=flat)[1:]


RESPONSES = CompletionApi(read_responses, ResponsesWriter, refuse, tell, BodyUse.CHAT)
PATHS = (completion_route("responses", "/v1/responses", RESPONSES, refuse),)
