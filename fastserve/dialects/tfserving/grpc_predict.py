"""PredictionService/Predict over gRPC (spec 4.2, 4.3): the fast path, then the general one.

    message --skeleton--> (head, first axes, data)    the head is known: a version, a signature, its outputs
            --copy--> rows reserved in shared memory ... worker ... views of outputs --write--> reply

Tensors lie two messages deep, in entries of a map, so a change of rows changes the lengths around them, which
are fields of the skeleton too. Templates are cached of requests with all inputs of a signature, each in one
piece of numbers of a fixed size. `start` returns False for any other, without effect; the general path
then checks it in the original's order, and decodes tensors only when all of them are known to be good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from fastserve._ext.message_skeleton import DATA, LEAD, First, Scheme, Skeleton
from fastserve._ext.proto_wire import WireFault
from fastserve._ext.slab import blank_bytes
from fastserve._ext.tensor_proto import (
    CONTENT_FIELD,
    DTYPE_NUMBER,
    IS_VARINT,
    VALUE_FIELD,
    PredictMessage,
    WireTensor,
    read_predict_request,
    write_model_spec,
    write_predict_response,
)
from fastserve.dialects.tfserving.errors import TF_WORD
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import TFServingService, find_model, refuse_rpc
from fastserve.errors import Kind, ServeError, invalid
from fastserve.net.grpc import AwaitedExchange, Rpc
from fastserve.protos import load
from fastserve.repository.model_config import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange, deadline_of
from fastserve.serving.fast_path import Outcome
from fastserve.serving.prepared_requests import Described, Memory
from fastserve.serving.request_templates import FieldSource, MessageTemplate, MessageTemplates
from fastserve.serving.rpc import answer_rpc, read_in_place
from fastserve.serving.slow_path import SlowRequest
from fastserve.tensor import DTYPE_BY_CODE, DTYPES, DType, Tensor, count_items, fits_shape

# PredictRequest: of each entry of inputs its TensorProto, and of that the first axis, and its values.
_SHAPE = {2: First({1: LEAD})}
BYTES = DTYPES["bytes"].code
_VALUES = {CONTENT_FIELD, *VALUE_FIELD.values()} - {VALUE_FIELD[BYTES]}
SCHEME = Scheme({2: {2: {2: _SHAPE, **dict.fromkeys(_VALUES, DATA)}}})
TOO_LARGE = "the response is too large for a gRPC message"
API = "Predict"
Aliases = Mapping[str, str]  # the signature's names of outputs -> the model's
Writer = Callable[[Sequence[Memory]], bytes]  # the outputs that the model gave -> a response
Output = tuple[str, int, tuple[int, ...]]  # its alias, the code of its type, its shape

# The same, and where it is among those that the model gives.
Given = Sequence[tuple[str, int, int, tuple[int, ...]]]
PLAIN_BYTES = 65536  # of values, up to which a response is joined with the interpreter held


def names_of(aliases: Aliases) -> tuple[str, ...]:
    """The model's outputs to ask for."""
    return tuple(dict.fromkeys(aliases.values()))


def write_outputs(outputs: Mapping[str, Tensor], aliases: Aliases, spec: bytes, content: bool) -> bytes:
    """A serialized PredictResponse. Raises ServeError."""
    given = [(alias, outputs[name]) for alias, name in aliases.items()]
    described = [(alias, tensor.dtype.code, tensor.shape) for alias, tensor in given]
    return write_response(described, [tensor.data for _, tensor in given], spec, content)


def write_response(described: Any, raw: Sequence[Memory], spec: bytes, content: bool) -> bytes:
    """Return a serialized PredictResponse of described outputs and their memory. Raises ServeError."""
    try:
        return write_predict_response(described, raw, spec, content)
    except (WireFault, OverflowError):
        raise ServeError(Kind.RESOURCE_EXHAUSTED, TOO_LARGE) from None


def make_writer(found: Given, spec: bytes, content: bool) -> Writer:
    """Return a function that writes responses with these outputs."""
    order = [index for _, index, _, _ in found]
    described = [(alias, code, shape) for alias, _, code, shape in found]
    template = make_template(described, spec, content)

    def join(memory: Sequence[Memory]) -> bytes:
        pieces = template.copy()
        pieces[1::2] = [memory[index] for index in order]
        return b"".join(pieces)

    def write(memory: Sequence[Memory]) -> bytes:
        return write_response(described, [memory[index] for index in order], spec, content)

    return join if template else write


def make_template(described: Sequence[Output], spec: bytes, content: bool) -> list[Memory]:
    """Responses with such outputs: what stands before the values of the first, a place for these, and so on,
    and what stands behind the last. Empty where lengths change with the values, or a response is large."""
    if any(code == BYTES or (IS_VARINT[code] and not content) for _, code, _ in described):
        return []
    sizes = [DTYPE_BY_CODE[code].item_bytes * prod(shape) for _, code, shape in described]
    if sum(sizes) > PLAIN_BYTES:
        return []
    behind, template = write_response([], [], spec, content), list[Memory]()
    for output, size in zip(described, sizes, strict=True):
        alone = write_response([output], [bytes(size)], spec, content)
        template += (alone[: len(alone) - len(behind) - size], b"")
    return [*template, behind]


class PredictTemplate(MessageTemplate):
    """Messages with one head."""

    def __init__(
        self,
        service: TFServingService,
        message: PredictMessage,
        version: Version,
        signature: Signature,
        aliases: Aliases,
    ) -> None:
        self._aliases, self._content = aliases, service.options.tensor_content
        self._spec = write_model_spec(version.model, version.number, signature.name)
        catalog, model = service.catalog, message.model
        if message.label is not None:
            self.find_version = partial(catalog.labelled, model, message.label)
        else:
            self.find_version = partial(catalog.available, model, message.version)

    def make_writer(self, described: Described) -> Writer:
        given = {name: (index, dtype.code, shape) for index, (name, dtype, shape) in enumerate(described)}
        found = [(alias, *given[name]) for alias, name in self._aliases.items()]
        return make_writer(found, self._spec, self._content)

    def write(
        self, exchange: RpcExchange, writer: Writer, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        exchange.reply(writer(memory))

    def write_response(
        self, exchange: RpcExchange, response: InferResponse, request_id: str, held: None
    ) -> None:
        exchange.reply(write_outputs(response.outputs, self._aliases, self._spec, self._content))


def outcome_of(service: TFServingService, model: str) -> Outcome:
    """Return how RPCs of one model end."""

    def refused(exchange: RpcExchange, prepared: PredictTemplate, request_id: str, fault: ServeError) -> None:
        exchange.refuse(refuse_rpc(service, exchange, model, fault))

    return Outcome(refused, service.observer(model, API, "GRPC"))


def find_sources(
    skeleton: Skeleton, message: PredictMessage, signature: Signature, inputs: Mapping[str, Tensor]
) -> dict[str, FieldSource] | None:
    """Return the field of each input, by the model's names; None where an input has not exactly one."""
    if message.sent != len(message.inputs):
        return None
    if [owner for owner, _ in skeleton.fields] != list(range(message.sent)):
        return None
    sources = {}
    for placeholder, (alias, (_, field)) in enumerate(zip(message.inputs, skeleton.fields, strict=True)):
        name = signature.input_names[alias]
        dtype = inputs[name].dtype
        if field not in (CONTENT_FIELD, VALUE_FIELD[dtype.code]):
            return None
        varints = field != CONTENT_FIELD and IS_VARINT[dtype.code]
        sources[name] = FieldSource.of(placeholder, dtype, varints=varints)
    return sources if len(sources) == message.sent else None


DTYPE_BY_NUMBER: dict[int, DType] = {number: DTYPE_BY_CODE[code] for code, number in DTYPE_NUMBER.items()}
LENGTH_BYTES = 4  # of a packed string
MOST_STRINGS = 1 << 28  # of a tensor that is not over every limit by its lengths alone


def _type_words() -> dict[int, str]:
    names = load("tfserving").DataType
    words = {number: name[3:].lower() for name, number in names.items() if number}
    return words | {DTYPE_NUMBER[code]: word for code, word in TF_WORD.items()}


TYPE_WORDS = _type_words()
"""DataType -> its word in an error text; also for types that no model here takes."""


def read_sent(data: bytes) -> PredictMessage:
    """A serialized PredictRequest. Raises ServeError."""
    parts = "inputs, output filters and axes of shapes"
    return read_in_place(read_predict_request, data, "PredictRequest", parts, invalid)


class PredictRpc:
    """The RPC: the fast path first, and the general one for what it does not take."""

    def __init__(self, service: TFServingService) -> None:
        self._service = service
        self._fast: MessageTemplates[PredictTemplate] = MessageTemplates(service, SCHEME)
        # They take a request that is known, or leave it to the coroutine below.
        self.start, self.take = self._fast.take, self._fast.take_arrived

    async def __call__(self, data: bytes, rpc: Rpc) -> bytes:
        """A serialized PredictResponse. Raises ServeError."""
        return await answer_rpc(
            rpc.received_ns, partial(PredictRpcRequest, self._service, rpc, data, self._fast)
        )


class PredictRpcRequest(SlowRequest):
    """A request as the general path answers it; the fast one learns it."""

    service: TFServingService

    def __init__(
        self,
        service: TFServingService,
        rpc: Rpc,
        data: bytes,
        fast: MessageTemplates[PredictTemplate],
        exchange: AwaitedExchange,
    ) -> None:
        self.service, self._exchange, self._rpc, self._fast = service, exchange, rpc, fast
        self._data = data
        self._skeleton: Skeleton | None = fast.read(data)
        self._model = ""

    async def read(self) -> InferRequest:
        service, data = self.service, self._data
        message = self._message = await service.offload(len(data), read_sent, data)
        self._model = message.model
        if not message.has_spec:
            raise invalid("Missing ModelSpec")
        target = Target(message.model, message.version, message.label, "")
        version = self.version = find_model(service.catalog, target)
        planned = plan_predict(version, message, service.message_bytes)
        self._signature, self._aliases, sizes = planned.signature, planned.outputs, planned.sizes
        work = sum(sizes.values()) + len(data)
        inputs = await service.offload(work, decode_all, message, sizes, self._signature, version.batching)
        deadline_ns = deadline_of(self._rpc)
        self._request = InferRequest(inputs, names_of(self._aliases), deadline_ns=deadline_ns)
        return self._request

    async def write(self, response: InferResponse) -> None:
        outputs, version = response.outputs, self.version
        spec = write_model_spec(version.model, version.number, self._signature.name)
        offload, content = self.service.offload, self.service.options.tensor_content
        self._reply = await offload(response.nbytes, write_outputs, outputs, self._aliases, spec, content)

    async def send(self) -> None:
        self._exchange.reply(self._reply)

    def answered(self, took_ns: int) -> None:
        self.service.observe(self._model, API, took_ns, self.ran_ns, "GRPC")
        skeleton, message, signature = self._skeleton, self._message, self._signature
        if skeleton is None:
            return

        def prepare() -> tuple[PredictTemplate, dict[str, FieldSource]] | None:
            sources = find_sources(skeleton, message, signature, self._request.inputs)
            head = PredictTemplate(self.service, message, self.version, signature, self._aliases)
            return None if sources is None else (head, sources)

        outcome = outcome_of(self.service, self.version.model)
        self._fast.cache_template(skeleton, self.version, self._request, outcome, prepare)

    def refused(self, fault: ServeError) -> None:
        self._exchange.refuse(refuse_rpc(self.service, self._exchange, self._model, fault))


# --- the checks, in their order ------------------------------------------------------------------


class Planned(NamedTuple):
    """A request whose tensors are known to be good: bytes in memory of each input, and the wanted outputs."""

    signature: Signature
    sizes: dict[str, int]
    outputs: Aliases


def plan_predict(version: Version, message: PredictMessage, most_bytes: int) -> Planned:
    """Checks 4 and 6 to 12. Raises ServeError."""
    signature = find_predict_signature(version, message.signature)
    check_names(signature, list(message.inputs), optional_aliases(version, signature))
    sizes = {
        alias: measure(alias, message.inputs[alias]) for alias in signature.inputs if alias in message.inputs
    }
    check_total(sizes, most_bytes)
    outputs = choose_outputs(signature, message.output_filter)
    check_dtypes(signature, message)
    return Planned(signature, sizes, outputs)


def find_predict_signature(version: Version, name: str) -> Signature:
    """Raises ServeError in the words of Predict over gRPC."""
    signature = version.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise ServeError(Kind.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.')
    return signature


def optional_aliases(version: Version, signature: Signature) -> set[str]:
    """The inputs that may be left out: here these stand for those that have defaults."""
    options = version.config.options
    optional = set(options.optional_inputs).difference(options.signature_inputs)
    return {alias for alias, name in signature.input_names.items() if name in optional}


def check_names(signature: Signature, sent: list[str], optional: set[str]) -> None:
    """Raises ServeError unless there are all inputs of a signature, and no others (checks 6, 7, 9)."""
    wanted = signature.inputs.keys()
    extra, missing = set(sent) - wanted, wanted - set(sent)
    if len(sent) > len(wanted) or (len(sent) < len(wanted) and not optional):
        raise invalid(
            f"input size does not match signature: {len(sent)}!={len(wanted)} len({braced(sent)}) != "
            f"len({braced(wanted)}). Sent extra: {braced(extra)}. Missing but required: {braced(missing)}."
        )
    for alias in wanted:
        if alias in missing and alias not in optional:
            raise invalid(
                f"Signature input alias: {alias}(feed name: {signature.input_names[alias]}:0) not found in "
                "request and no default value provided. Inputs expected to be in the request "
                f"{braced(sent)}, or default input alias set: {listed(optional)}"
            )
    if extra:
        used = listed(set(sent) & wanted)
        raise invalid(
            f"Inputs contains invalid name. Used request inputs: {used}, request input: {listed(sent)}"
        )


def listed(names: Iterable[str]) -> str:
    """Names as the original prints them."""
    return ",".join(sorted(names))


def braced(names: Iterable[str]) -> str:
    """Names as the original prints a set of them."""
    return f"{{{listed(names)}}}"


def measure(alias: str, tensor: WireTensor) -> int:
    """Bytes of a tensor in memory; 0 for one of a type that no model here takes. Raises ServeError for one
    that cannot be decoded (check 8)."""
    dtype = DTYPE_BY_NUMBER.get(tensor.number)
    if dtype is None and tensor.number not in TYPE_WORDS:
        raise undecodable(alias)
    try:
        items = count_items(tensor.shape)
    except ServeError:
        raise undecodable(alias) from None
    if dtype is None:
        return 0
    if not dtype.item_bytes and items > MOST_STRINGS:
        return items * LENGTH_BYTES
    size = tensor.measure(dtype.code, items)
    if size < 0:
        raise undecodable(alias)
    return size


def undecodable(alias: str) -> ServeError:
    return invalid(f"tensor parsing error: {alias}")


def check_total(sizes: dict[str, int], most: int) -> None:
    """A value that stands for many is given in few bytes. Raises ServeError."""
    total = sum(sizes.values())
    if total > most:
        raise invalid(
            f"tensor parsing error: the inputs are {total} bytes in memory, allowed: up to {most} "
            "(grpc_options.message_bytes)"
        )


def choose_outputs(signature: Signature, wanted: Iterable[str]) -> Aliases:
    """The outputs of a filter, of none all of them (checks 10, 11). Raises ServeError."""
    names, chosen = signature.output_names, {}
    for alias in wanted:
        if alias not in names:
            raise invalid(
                f"output tensor alias not found in signature: {alias} Outputs expected to be in the set "
                f"{braced(names)}."
            )
        if alias in chosen:
            raise invalid(f"duplicate output tensor alias: {alias}")
        chosen[alias] = names[alias]
    return chosen or names


def check_dtypes(signature: Signature, message: PredictMessage) -> None:
    """Raises ServeError (check 12): nothing is converted."""
    for index, (alias, spec) in enumerate(signature.inputs.items()):
        tensor = message.inputs.get(alias)
        if tensor is not None and tensor.number != DTYPE_NUMBER[spec.dtype.code]:
            word = TYPE_WORDS[tensor.number]
            raise invalid(f"Expects arg[{index}] to be {TF_WORD[spec.dtype.code]} but {word} is provided")


def decode_all(
    message: PredictMessage, sizes: dict[str, int], signature: Signature, batching: bool
) -> dict[str, Tensor]:
    """Every input by the model's name. One of a shape that the model refuses is not decoded for that."""
    found = {}
    for alias, size in sizes.items():
        tensor, spec = message.inputs[alias], signature.inputs[alias]
        memory: bytes | bytearray = b""
        if spec.shape is None or fits_shape(tensor.shape[batching:], spec.shape):
            memory = blank_bytes(size)
            tensor.fill(spec.dtype.code, count_items(tensor.shape), memory)
        found[signature.input_names[alias]] = Tensor(spec.dtype, tensor.shape, memory)
    return found
