"""Text models for clients of tensors: text in, text out, like vLLM's backend in Triton.

    text_input, stream?, sampling_parameters? (JSON), exclude_input_in_output?  ->  text_output      each [1]

Settings are those of vLLM's SamplingParams, in `sampling_parameters` or, without it, among the parameters of
the request. A request that streams gets a response for all tokens since the one before; any other gets one
response, whose text begins with the prompt unless that is excluded.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve.codec.generation import Sampling
from fastserve.codec.json_text import DocumentFault, FreeJSON
from fastserve.errors import ConfigError, invalid
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.text.models import MOST_STOP_IDS, TextAsk, TextModels
from fastserve.serving.text.tokenizer import MOST_CHARACTERS
from fastserve.settings.fields import convert
from fastserve.tensor import DTYPES, Tensor

BYTES = DTYPES["bytes"]
MOST_TOKENS = 1 << 31
MOST_SETTINGS = 1 << 18
"""Bytes of `sampling_parameters`: 64 stop strings of 1024 characters, and everything else."""
# vLLM's own words.
NOT_BOTH = "When streaming, `exclude_input_in_output` = False is not allowed."
SETTINGS: FreeJSON[Any] = FreeJSON()
NO_PARTS = "stream: given true, allowed: false for a request that has one response"
StopTokens = Annotated[list[Annotated[int, Meta(ge=0, le=MOST_TOKENS - 1)]], Meta(max_length=MOST_STOP_IDS)]


class SamplingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one request, named as vLLM's SamplingParams."""

    max_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None = 16
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MOST_TOKENS)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    min_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: StopTokens | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Meta(ge=1, le=1)] = 1

    def sampling(self) -> Sampling:
        """Return the engine's settings: temperature 0 is greedy."""
        return Sampling(
            max_new_tokens=MOST_TOKENS if self.max_tokens is None else self.max_tokens,
            do_sample=self.temperature > 0,
            temperature=self.temperature or 1.0,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            min_new_tokens=self.min_tokens,
            logit_bias=self.logit_bias or {},
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
        )


class TextTensors:
    """Text models for requests of tensors (engine.TensorFace); one for a front process."""

    def __init__(self, texts: TextModels) -> None:
        self._texts = texts

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Return the only response. Raises ServeError."""
        if _flag(request, "stream"):
            raise invalid(NO_PARTS)
        ask = make_ask(request)
        async with await self._texts.of(version).start(ask) as stream:
            ending = await stream.rest()
        if ending.fault is not None:
            raise ending.fault
        before = "" if _flag(request, "exclude_input_in_output") else str(ask.prompt)
        return _response(before + ending.text)

    async def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yield responses. Raises ServeError, also after the first."""
        if not _flag(request, "stream"):
            yield await self.infer(version, request)
            return
        if not _flag(request, "exclude_input_in_output", absent=True):
            raise invalid(NOT_BOTH)
        async with await self._texts.of(version).start(make_ask(request)) as stream:
            async for tokens in stream:
                ending = stream.ending
                if ending is not None and ending.fault is not None:
                    raise ending.fault
                text = "".join(token.text for token in tokens)
                if text or ending is not None:
                    yield _response(text, final=ending is not None)


def make_ask(request: InferRequest) -> TextAsk:
    """Return a request of tensors as a text request. Raises ServeError INVALID_ARGUMENT."""
    settings = _settings(request)
    stop = settings.stop or ()
    return TextAsk(
        prompt=_text(request, "text_input"),
        sampling=settings.sampling(),
        seed=settings.seed,
        stop=(stop,) if isinstance(stop, str) else stop,
        include_stop=settings.include_stop_str_in_output,
        special=not settings.skip_special_tokens,
        priority=min(request.priority, 5) or 5,
        deadline_ns=request.deadline_ns,
        request_id=request.request_id,
    )


def _settings(request: InferRequest) -> SamplingSettings:
    try:
        if "sampling_parameters" in request.inputs:
            said = _object(_bytes(request, "sampling_parameters", MOST_SETTINGS))
            return convert(said, SamplingSettings, "sampling_parameters", lax=True)
        # Beside what else a request may say, such as a client's headers.
        own = {k: v for k, v in request.parameters.items() if k in SamplingSettings.__struct_fields__}
        return convert(own, SamplingSettings, "parameters", lax=True)
    except ConfigError as fault:
        raise invalid(str(fault)) from None


def _object(data: memoryview) -> dict[str, Any]:
    try:
        said = SETTINGS.read(bytes(data)) if data else {}
    except DocumentFault as fault:
        raise ConfigError(f"sampling_parameters: no JSON object: {fault.message}") from None
    if not isinstance(said, dict):
        raise ConfigError("sampling_parameters: no JSON object")
    return said


def _text(request: InferRequest, name: str) -> str:
    try:
        return bytes(_bytes(request, name, 4 * MOST_CHARACTERS)).decode()
    except UnicodeDecodeError as fault:
        raise invalid(f"input {name!r} is not UTF-8: byte {fault.start}") from None


def _bytes(request: InferRequest, name: str, most: int) -> memoryview:
    """The one string of an input. Raises ServeError where it is longer."""
    data = request.inputs[name].data
    size = memoryview(data).nbytes
    if size > most + 4:
        raise invalid(f"input {name!r} has {size - 4} bytes, allowed: at most {most}")
    return memoryview(unpack_bytes(data, 1)[0])


def _flag(request: InferRequest, name: str, *, absent: bool = False) -> bool:
    tensor = request.inputs.get(name)
    return absent if tensor is None else bool(memoryview(tensor.data).cast("B")[0])


def _response(text: str, *, final: bool = True) -> InferResponse:
    data = pack_bytes([text.encode("utf-8", "replace")])
    return InferResponse({"text_output": Tensor(BYTES, (1,), data)}, final=final)
