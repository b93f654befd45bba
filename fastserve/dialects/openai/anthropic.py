"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat, over the same call.

    {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
    -> {"type":"message","content":[{"type":"text","text":"Hello"}],"stop_reason":"end_turn",...}

A stream has the events `message_start`, `content_block_start`, `content_block_delta`, `content_block_stop`,
`message_delta` and `message_stop`. Errors have Anthropic's form and types. Tools are those of a chat: a block
`tool_use` is a call, a block `tool_result` a message of the role `tool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from secrets import token_hex
from typing import Annotated, Any, Literal

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
)
from fastserve.dialects.openai.errors import status_of
from fastserve.dialects.openai.requests import (
    ChatRequest,
    CompletionTask,
    Count,
    Refused,
    Text,
    find_model,
    make_chat_task,
    refused_keys,
)
from fastserve.dialects.openai.tools import ToolCall, ToolPlaces, check_count, name_results, plan_calls
from fastserve.dialects.text_common.endpoint_parts import (
    BOUNDS,
    BodyUse,
    TargetParts,
    TextRoute,
    TextService,
    check,
    is_neutral,
    read_offloaded,
    read_typed,
)
from fastserve.dialects.text_common.event_streams import EVENTS
from fastserve.dialects.text_common.structured import NamedSchema, ResponseFormat, Value, is_absent
from fastserve.errors import ServeError
from fastserve.net.access_control import Scope
from fastserve.net.request import Call, Endpoint
from fastserve.net.router import fault_headers
from fastserve.serving.dialect import HttpRoute
from fastserve.serving.text import EventTemplate, Placeholder
from fastserve.serving.text.models import TextCall

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> Anthropic's type of error; api_error for any other."""
PLACES = ToolPlaces(".name", ".input_schema")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_encode = msgspec.json.Encoder().encode


class ImageSource(msgspec.Struct):
    type: Literal["base64", "url"]
    media_type: str = "image/png"
    data: str = ""
    url: str = ""


class TextBlock(msgspec.Struct):
    """One block of the result of a call."""

    type: str
    text: str | None = None


class ContentBlock(msgspec.Struct):
    """One block of a message's content; `_read_blocks` checks its type."""

    type: str
    text: str | None = None
    source: ImageSource | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    """Of a call."""
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    """Of the result of a call."""


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class OutputFormat(msgspec.Struct):
    type: str
    schema: Value = UNSET


class OutputConfig(msgspec.Struct):
    """The form of an answer, and how much effort it is worth: a variable of the chat template."""

    format: OutputFormat | None = None
    effort: Annotated[str, Meta(max_length=64)] | None = None


class ThinkingConfig(msgspec.Struct):
    """`thinking`, which may be chosen not to be used."""

    type: str = ""


class OfferedTool(msgspec.Struct):
    """A function that the model may call; tools of Anthropic's own have another type."""

    name: str
    description: str | None = None
    input_schema: Value = UNSET
    type: str | None = None


class ChosenTool(msgspec.Struct):
    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class TokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens, and what a message is made of."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=65536)]
    system: str | list[ContentBlock] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ChosenTool | None = None


class MessagesRequest(TokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[Text] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    container: Refused = UNSET


_messages: FreeJSON[MessagesRequest] = FreeJSON(MessagesRequest, BOUNDS)
_tokens: FreeJSON[TokensRequest] = FreeJSON(TokensRequest, BOUNDS)


def read_messages(data: bytes | bytearray, most_stops: int) -> CompletionTask:
    """Return the task of a body. Raises InvalidBody."""
    body = read_typed(_messages, data)
    task = _make_task(
        body,
        most_stops,
        max_tokens=body.max_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        response_format=_read_format(body.output_config),
    )
    task.stop = body.stop_sequences or []
    most = len(task.stop)
    check(most <= most_stops, "stop_sequences", f"has {most} strings, allowed: at most {most_stops}")
    return task


def read_tokens(data: bytes | bytearray) -> CompletionTask:
    """Return the task whose prompt is counted. Raises InvalidBody."""
    return _make_task(read_typed(_tokens, data), 0, max_tokens=1)


def _make_task(body: TokensRequest, most_stops: int, **settings: Any) -> CompletionTask:
    for key in refused_keys(type(body)):
        check(is_neutral(getattr(body, key)), key, "is not supported")
    thinks = body.thinking is not None and body.thinking.type not in ("", "disabled")
    check(not thinks, "thinking", "is not supported: this server has no budget of thinking")
    images: list[tuple[str, str]] = []
    messages = _read_conversation(body, images)
    effort = None if body.output_config is None else body.output_config.effort
    chosen = body.tool_choice or ChosenTool("auto")
    chat = ChatRequest(
        messages=[],
        model=body.model,
        reasoning_effort=effort,
        tools=_write_tools(body.tools or []),
        tool_choice=_write_choice(chosen),
        parallel_tool_calls=not chosen.disable_parallel_tool_use,
        **settings,
    )
    return make_chat_task(chat, most_stops, messages, images, asked=body, places=PLACES)


def _write_tools(tools: list[OfferedTool]) -> Raw | UnsetType:
    """Return tools as a chat has them."""
    check_count(tools)
    written = []
    for i, tool in enumerate(tools):
        own = tool.type in (None, "custom")
        check(own, f"tools[{i}].type", f"'{tool.type or '':.64}' is not supported: custom is")
        function: dict[str, Any] = {"name": tool.name}
        if not is_absent(tool.input_schema):
            function["parameters"] = tool.input_schema
        if tool.description is not None:
            function["description"] = tool.description
        written.append({"type": "function", "function": function})
    return Raw(_encode(written)) if written else UNSET


def _write_choice(chosen: ChosenTool) -> Raw:
    """Return the choice as a chat has it."""
    if chosen.type == "tool":
        return Raw(_encode({"type": "function", "function": {"name": chosen.name}}))
    return Raw(_encode("required" if chosen.type == "any" else chosen.type))


def _read_format(config: OutputConfig | None) -> ResponseFormat | None:
    given = None if config is None else config.format
    if given is None:
        return None
    place = "output_config.format"
    check(given.type == "json_schema", f"{place}.type", f"'{given.type:.64}' is not supported")
    check(not is_absent(given.schema), f"{place}.schema", "is required")
    return ResponseFormat("json_schema", json_schema=NamedSchema(given.schema))


def _read_conversation(body: TokensRequest, images: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The messages of a conversation, as templates know them. Raises InvalidBody."""
    system, messages = body.system, []
    if isinstance(system, list):
        pictures: list[tuple[str, str]] = []
        system = _read_blocks(list(enumerate(system)), "system", pictures)
        check(not pictures, "system", "must be texts")
    if system:
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        else:
            messages += _read_turn(message.role, message.content, f"messages[{i}].content", images)
    name_results(messages)
    last = body.messages[-1].role
    where = f"messages[{len(body.messages) - 1}].role"
    check(last == "user", where, "must be user: the beginning of an answer cannot be given")
    return messages


def _read_turn(
    role: str, blocks: list[ContentBlock], place: str, images: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The messages of one turn: results of calls, each by itself, and then everything else."""
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    others: list[tuple[int, ContentBlock]] = []
    for i, block in enumerate(blocks):
        if block.type == "tool_use" and role == "assistant":
            check(block.name is not None, f"{place}[{i}].name", "is required")
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result" and role == "user":
            check(block.tool_use_id is not None, f"{place}[{i}].tool_use_id", "is required")
            content = _read_result(block.content, f"{place}[{i}].content")
            results.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
        else:
            others.append((i, block))
    if not others and not calls and results:
        return results
    text = _read_blocks(others, place, images)
    said: dict[str, Any] = {"role": role, "content": text}
    return [*results, {**said, "content": text or None, "tool_calls": calls} if calls else said]


def _read_result(content: str | list[TextBlock] | None, place: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for i, block in enumerate(content):
        check(block.type == "text", f"{place}[{i}].type", f"'{block.type:.64}' is not supported")
    return "\n".join(block.text or "" for block in content)


def _read_blocks(blocks: list[tuple[int, ContentBlock]], place: str, images: list[tuple[str, str]]) -> str:
    """The texts of blocks, by their places, a line each; their images are put into `images`."""
    texts = []
    for i, block in blocks:
        if block.type == "text":
            check(block.text is not None, f"{place}[{i}].text", "is required")
            texts.append(block.text or "")
        elif block.type == "image":
            source = block.source or ImageSource("url")
            check(block.source is not None, f"{place}[{i}].source", "is required")
            url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
            images.append((f"{place}[{i}].source", url))
        else:
            check(False, f"{place}[{i}].type", f"'{block.type:.64}' is not supported")
    return "\n".join(texts)


class MessagesWriter(AnswerEncoder):
    """Writer of one message, whole or as events."""

    content_type = EVENTS
    done = b""
    ends_with_usage = True

    def __init__(self, model: str, version: object, form: AnswerForm = PLAIN) -> None:
        super().__init__(model, version, form)
        self._model, self._id = model, "msg_" + token_hex(12)
        self._may_call = bool(form.asked.tools)
        self._block, self._open = -1, ""
        """Index of the last block, and its type while it is open."""

    def write(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        (choice,) = choices
        content: list[dict[str, Any]] = []
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        content += [_write_call(call) for call in choice.calls]
        stopped = _stopped(choice.finish, choice.stop)
        return _encode(self._message(content, stopped, usage.prompt_tokens, usage.completion_tokens))

    def begin(self, index: int, prompt_tokens: int = 0) -> bytes:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, prompt_tokens, 0)
        begun = _event("message_start", message=message)
        return begun if self._may_call else begun + self._begin_block(type="text", text="")

    def part(self, index: int, part: AnswerPart, scored: Sequence[ScoredToken] = ()) -> bytes:
        """Return the events of a part of an answer that may call tools: blocks begin with their first."""
        if part.call < 0:
            before = b"" if self._open == "text" or not part.text else self._begin_block(type="text", text="")
            return before + self._delta(type="text_delta", text=part.text) if part.text else b""
        if not part.name:
            return self._delta(type="input_json_delta", partial_json=part.text) if part.text else b""
        return self._begin_block(type="tool_use", id=part.id, name=part.name, input={})

    def _begin_block(self, **block: Any) -> bytes:
        before = self._end_block()
        self._block, self._open = self._block + 1, block["type"]
        return before + _event("content_block_start", index=self._block, content_block=block)

    def _end_block(self) -> bytes:
        ended, self._open = self._open, ""
        return _event("content_block_stop", index=self._block) if ended else b""

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def piece(self, index: int, text: str, scored: Sequence[ScoredToken] = ()) -> bytes:
        return self._delta(type="text_delta", text=text)

    def frames(self, index: int) -> EventTemplate:
        return FRAMES

    def last(
        self, index: int, finish: str, usage: TokenUsage | None = None, stop: str | None = None
    ) -> bytes:
        made = 0 if usage is None else usage.completion_tokens
        delta = _event("message_delta", delta=_stopped(finish, stop), usage={"output_tokens": made})
        return self._end_block() + delta + _event("message_stop")

    def usage(self, usage: TokenUsage) -> bytes:
        return b""

    def _message(
        self, content: list[dict[str, Any]], stopped: dict[str, str | None], prompt: int, made: int
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stopped,
            "usage": {"input_tokens": prompt, "output_tokens": made},
        }


def _write_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as a block. What an answer that was cut off left of the arguments is no object, and is
    left out."""
    try:
        given = msgspec.json.decode(call.arguments or "{}", type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        given = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stopped(finish: str, stop: str | None) -> dict[str, str | None]:
    reason = STOP_REASONS[finish] if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _event(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **more}))


_BEFORE, _AFTER = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": ""}).rsplit(
    b'""', 1
)
FRAMES = EventTemplate((_BEFORE, Placeholder.TEXT, _AFTER), skip_empty=True)


def write_error(fault: ServeError) -> bytes:
    """A fault as JSON."""
    kind = ERROR_TYPES.get(status_of(fault, flat=False), "api_error")
    message = fault.message.encode("utf-8", "replace").decode()
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


def refuse(service: TextService, call: Call, fault: ServeError, model: str = "") -> None:
    """Reply with an error, and count it."""
    service.count_fault(model, fault, call)
    call.reply(status_of(fault, flat=False), write_error(fault), headers=fault_headers(fault))


def tell(service: TextService, fault: ServeError) -> bytes:
    """Return the event of an error within a stream, on which the client raises."""
    return b"event: error\ndata: %b\n\n" % write_error(fault)


def count_tokens(service: TextService, named: TargetParts) -> Endpoint:
    """POST /v1/messages/count_tokens."""

    async def answer(call: Call, about: TextCall) -> bool:
        task = await read_offloaded(service, call, read_tokens, call.body)
        model = about.model = find_model(service, task.body.model or "")
        check(not task.images, "messages", "have images, whose tokens are not counted")
        shown = None if task.tools is None else (await plan_calls(task.tools, model, None)).use.shown
        prompt = await model.chat(task.messages, shown, **task.template)
        call.reply(200, _encode({"input_tokens": len(await model.tokens(prompt, special=False))}))
        return True

    return lambda call: service.answer(call, partial(answer, call), refuse)


MESSAGES = CompletionApi(read_messages, MessagesWriter, refuse, tell, BodyUse.CHAT)
PATHS = (
    completion_route("messages", "/v1/messages", MESSAGES, refuse),
    TextRoute(
        HttpRoute("count_tokens", "/v1/messages/count_tokens", {"POST": Scope.INFER}),
        count_tokens,
        refuse,
        room=BodyUse.CHAT,
    ),
)
