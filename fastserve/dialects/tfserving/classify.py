"""Classify and regress over REST, and what a model's outputs must be for them (spec 3.4, 3.5).

    plan_results                            what to ask a signature's model for, or why it cannot be
    classify_results   regress_results      labels, scores and values of its answer, or what is wrong
    ExamplesEndpoint                        POST ...:classify and ...:regress

Examples are read the general way, an object per value, so these bodies have a bound of their own, and from 64
KiB on are read in a thread.

Bodies become examples, and these a model's input tensors (spec 3.4, 3.5, 4.1). An example is a mapping of
feature name to feature; a feature is a flat list of one kind.

    {"examples": [{"x": 1.0}]}  ->  ExampleList("", [{"x": Feature("float", [1.0])}], None)

A model is fed as TensorFlow's parse_example op does it: one string input called `inputs` takes serialized
tf.Example bytes; otherwise each declared feature fills the input it is mapped to, one row an example.
"""

from __future__ import annotations

from array import array
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from fastserve._ext.json_value import Members, ShownFloat
from fastserve._ext.json_writer import WriterCode, WriterFault, write_classifications, write_regressions
from fastserve.codec.byte_formats import pack_strings, pack_values, write_field, write_varint
from fastserve.codec.json_text import to_bytes, to_text
from fastserve.dialects.tfserving.errors import TF_NAME, TF_WORD, shape_text, writer_error
from fastserve.dialects.tfserving.json_body import (
    decode_base64_object,
    format_error,
    is_base64_object,
    kind_word,
    read_document,
    read_signature_name,
)
from fastserve.dialects.tfserving.metadata import signature_text
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import RestRequest, TFServingService, find_signature, find_version
from fastserve.errors import invalid
from fastserve.net.request import Call
from fastserve.repository.model_config import Signature
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.slow_path import answer_slowly
from fastserve.tensor import DTYPES, DType, Tensor, TensorSpec

if TYPE_CHECKING:
    from fastserve._ext.json_value import Value


FeatureKind = Literal["", "int64", "float", "bytes"]
FLOATS = frozenset({float, ShownFloat})

_KIND_OF: dict[type, FeatureKind] = {
    int: "int64",
    bool: "int64",
    float: "float",
    ShownFloat: "float",
    bytes: "bytes",
}

INT64_MAX = 2**63 - 1
MOST_REPEATED = 1 << 22
"""Values that a body is made into by repetition: what it says once, for every example."""

REPEATED_BYTES = 16
"""Bytes that count as one of them."""


def check_repeated(count: int, what: str) -> None:
    """Raises ServeError where a small body would become too much."""
    if count > MOST_REPEATED:
        raise invalid(f"The {what}, repeated for every example, are over the limit of {MOST_REPEATED}")


@dataclass(slots=True)
class Feature:
    """One feature: `kind` is "" while it has no element. Floats are already rounded to float32."""

    kind: FeatureKind = ""
    values: list[int] | list[float] | list[bytes] = field(default_factory=list)


Example = dict[str, Feature]


@dataclass(slots=True)
class ExampleList:
    """A classify or regress body as read. `context` is None when the body has none."""

    signature_name: str
    examples: list[Example]
    context: Example | None

    def merged(self) -> list[Example]:
        """Every example on top of the context; an example's own feature wins. Raises ServeError."""
        context = self.context
        check_repeated(len(context or ()) * len(self.examples), "features of the context")
        return [{**context, **example} for example in self.examples] if context else self.examples

    def serialized(self) -> list[bytes]:
        """Every example as the bytes of a tf.Example, the context's own bytes in front. Raises ServeError."""
        head = serialize_example(self.context) if self.context is not None else b""
        check_repeated(len(head) * len(self.examples) // REPEATED_BYTES, "bytes of the context")
        return [head + serialize_example(example) for example in self.examples]


def read_examples(body: bytes | bytearray) -> ExampleList:
    """A classify or regress body. Raises ServeError with the original's text."""
    document = read_document(body)
    name = read_signature_name(document)
    context = _read_example(document.get(b"context")) if b"context" in document else None
    if b"examples" not in document:
        # The original says "classify" for both verbs.
        raise format_error(document, "When method is classify, key 'examples' is expected and was not found")
    given = document.get(b"examples")
    if not isinstance(given, list):
        raise format_error(document, "Expecting 'examples' value to be an list/array")
    if not given:
        raise format_error(document, "'examples' value is an empty array")
    return ExampleList(name, [_read_example(value) for value in given], context)


def _read_example(value: Value) -> Example:
    if not isinstance(value, Members):
        raise invalid(f"Example must be JSON object but got JSON {kind_word(value)}")
    example = {}
    for key, given in value:
        name = to_text(key)
        example[name] = _read_feature(name, given)
    return example


def _read_feature(name: str, given: Value) -> Feature:
    values: list[Any] = given if isinstance(given, list) else [given]
    if values and set(map(type, values)) <= FLOATS:
        return Feature("float", array("f", values).tolist())  # beyond the range of float32: infinite
    kind: FeatureKind = ""
    read: list[Any] = []
    for value in values:
        kind = _kind_of(name, value, kind)
        if isinstance(value, Members):
            read.append(decode_base64_object(value))
        else:
            read.append(int(value) if isinstance(value, bool) else value)
    return Feature(kind, read)


def _kind_of(name: str, value: Value, expected: FeatureKind) -> FeatureKind:
    kind = _KIND_OF.get(type(value)) or ("bytes" if is_base64_object(value) else "")
    if not kind:
        raise invalid(f"Feature: {name} has element with unexpected JSON type: {kind_word(value)}")
    if isinstance(value, int) and value > INT64_MAX:
        raise invalid(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
    if expected and kind != expected:
        raise invalid(f"Unexpected element type in feature: {name} expecting type: {expected}")
    return kind


# tf.Example on the wire: Example{1: Features{1: map<string, Feature>}}; Feature is one of the lists,
# each with its values in field 1. Only length-delimited fields and varints occur.
_LIST_FIELD = {"bytes": 1, "float": 2, "int64": 3}


def serialize_example(example: Mapping[str, Feature]) -> bytes:
    """An example as tf.Example bytes, features in the order given."""
    entries = (
        write_field(1, to_bytes(name)) + write_field(2, _serialize_feature(feature))
        for name, feature in example.items()
    )
    return write_field(1, b"".join(write_field(1, entry) for entry in entries))


def _serialize_feature(feature: Feature) -> bytes:
    if not feature.kind:
        return b""
    values: Sequence[Any] = feature.values
    if feature.kind == "float":
        data = write_field(1, pack_values(values, DTYPES["float32"]))
    elif feature.kind == "int64":
        data = write_field(1, b"".join(map(write_varint, values)))
    else:
        data = b"".join(write_field(1, value) for value in values)
    return write_field(_LIST_FIELD[feature.kind], data)


SERIALIZED = "inputs"
_ABSENT = Feature()
_KIND_WORD: dict[FeatureKind, str] = {"int64": "int64", "float": "float", "bytes": "string"}


def takes_serialized(signature: Signature) -> bool:
    """Whether examples are fed as tf.Example bytes: one string input called `inputs`, no other features."""
    spec = signature.inputs.get(SERIALIZED)
    only = len(signature.inputs) == 1 and spec is not None and spec.dtype.name == "bytes"
    return only and set(signature.features) <= {SERIALIZED}


def feed(examples: ExampleList, signature: Signature, *, batching: bool) -> dict[str, Tensor]:
    """Tensors by the model's own input names, first axis the examples. Raises ServeError."""
    names = signature.input_names
    if takes_serialized(signature):
        rows = examples.serialized()
        return {names[SERIALIZED]: Tensor(DTYPES["bytes"], (len(rows),), pack_strings(rows))}
    merged = examples.merged()
    return {
        names[alias]: decode_feature(name, _row_spec(signature.inputs[alias], batching), merged)
        for name, alias in signature.features.items()
    }


def decode_feature(name: str, spec: TensorSpec, examples: Sequence[Example]) -> Tensor:
    """One feature of every example as a tensor of shape (examples, *row shape of `spec`).

    An axis of -1 takes any length and is padded to the longest with zeros or empty strings; every
    other shape must be met exactly, and for an unknown rank the first example sets the length.
    Raises ServeError.
    """
    wanted = _feature_kind(spec.dtype)
    shape = (len(examples[0].get(name, _ABSENT).values),) if spec.shape is None else spec.shape
    columns = [_values(name, index, wanted, shape, example) for index, example in enumerate(examples)]
    if -1 in shape:
        shape = _filled_shape(shape, max(len(values) for values in columns))
    check_repeated(prod(shape) * len(columns), f"values of feature {name}")
    filler = b"" if wanted == "bytes" else 0
    size = prod(shape)
    flat = [value for values in columns for value in (*values, *[filler] * (size - len(values)))]
    if spec.dtype.name == "bool":
        flat = [bool(value) for value in flat]
    # Packing cuts integers to the width of the input, as the model's own cast would.
    return Tensor(spec.dtype, (len(examples), *shape), pack_values(flat, spec.dtype))


def _values(
    name: str, index: int, wanted: FeatureKind, shape: tuple[int, ...], example: Example
) -> Sequence[int | float | bytes]:
    feature = example.get(name, _ABSENT)
    if not feature.kind:
        if -1 in shape:
            return ()
        raise invalid(
            f"Name: <unknown>, Feature: {name} (data type: {_KIND_WORD[wanted]}) "
            "is required but could not be found."
        )
    where = f"Name: <unknown>, Key: {name}, Index: {index}.  "
    if feature.kind != wanted:
        raise invalid(
            f"{where}Data types don't match. Data type: {_KIND_WORD[feature.kind]} "
            f"but expected type: {_KIND_WORD[wanted]}"
        )
    if not _fits(len(feature.values), shape):
        raise invalid(
            f"{where}Number of {wanted} values != expected.  "
            f"Values size: {len(feature.values)} but output shape: {shape_text(shape)}"
        )
    return feature.values


def _fits(count: int, shape: tuple[int, ...]) -> bool:
    if -1 not in shape:
        return count == prod(shape)
    unit = prod(size for size in shape if size >= 0)
    return count == 0 if unit == 0 else count % unit == 0


def _filled_shape(shape: tuple[int, ...], longest: int) -> tuple[int, ...]:
    unit = prod(size for size in shape if size >= 0)
    first = shape.index(-1)
    length = longest // unit if unit else 0
    return tuple(
        length if axis == first else max(size, 1 if size < 0 else size) for axis, size in enumerate(shape)
    )


def _feature_kind(dtype: DType) -> FeatureKind:
    if dtype.name == "bytes":
        return "bytes"
    if dtype.name in ("float32", "float64"):
        return "float"
    if dtype.name == "bool" or dtype.name.startswith(("int", "uint")):
        return "int64"
    raise invalid(f"Conversion of a feature to type: {TF_WORD[dtype.code]}")


def _row_spec(spec: TensorSpec, batching: bool) -> TensorSpec:
    if batching or not spec.shape:
        return spec
    return TensorSpec(spec.name, spec.dtype, spec.shape[1:])


Buffer = bytes | bytearray | memoryview
CLASSES, SCORES, OUTPUTS = "classes", "scores", "outputs"


@dataclass(frozen=True, slots=True)
class ResultPlan:
    """The outputs to ask a model for, by alias -> its own name, and the labels of the config."""

    outputs: dict[str, str]
    labels: tuple[str, ...] = ()


VERBS = {"classify": "classification", "regress": "regression"}


def plan_results(verb: str, signature: Signature, *, batching: bool, by_method: bool) -> ResultPlan:
    """Return the plan of `verb` for a signature; `by_method`: only of that method. Raises ServeError."""
    if by_method and signature.method != verb:
        prefix = "tensorflow/serving/"
        raise invalid(
            f"Expected {VERBS[verb]} signature method_name to be {prefix}{verb}. "
            f"Was: {prefix}{signature.method}"
        )
    return (plan_classify if verb == "classify" else plan_regress)(signature, batching=batching)


def plan_classify(signature: Signature, *, batching: bool) -> ResultPlan:
    """The outputs a classification is made of. Raises ServeError when the signature is no classifier."""
    _check_one_input(signature)
    found = len(signature.outputs)
    if found not in (1, 2):
        raise invalid(f"Expected one or two output Tensors, found {found}")
    _check_input_name(signature, "classification", batching)
    wanted = {alias: name for alias, name in signature.output_names.items() if alias in (CLASSES, SCORES)}
    if not wanted:
        raise invalid(
            f'Expected classification signature outputs to contain at least one of "{CLASSES}" or '
            f'"{SCORES}". Signature was: {signature_text(signature, batching=batching)}'
        )
    _check_dtype(signature)
    return ResultPlan(wanted, signature.class_labels)


def plan_regress(signature: Signature, *, batching: bool) -> ResultPlan:
    """The output a regression is made of. Raises ServeError when the signature is no regressor."""
    _check_one_input(signature)
    if len(signature.outputs) != 1:
        raise invalid("Expected one output Tensor.")
    _check_input_name(signature, "regression", batching)
    if OUTPUTS not in signature.outputs:
        text = signature_text(signature, batching=batching)
        raise invalid(f"No regression outputs found in SignatureDef: {text}")
    _check_dtype(signature)
    return ResultPlan({OUTPUTS: signature.output_names[OUTPUTS]})


def classify_results(
    plan: ResultPlan, outputs: Mapping[str, Tensor], examples: int
) -> tuple[int, Buffer | None, Buffer | None]:
    """How many classes each example has, their labels and their scores; None where there are none.

    `outputs` by the model's names, each (examples, classes). Raises ServeError."""
    given = {alias: outputs[name] for alias, name in plan.outputs.items()}
    classes, scores = given.get(CLASSES), given.get(SCORES)
    if classes is not None:
        _check_classes_or_scores(CLASSES, classes, "bytes", examples)
    if scores is not None:
        _check_classes_or_scores(SCORES, scores, "float32", examples)
    if classes is not None and scores is not None and classes.shape[1] != scores.shape[1]:
        raise invalid(
            "Tensors class and score should match in dim_size(1). "
            f"Got {classes.shape[1]} vs. {scores.shape[1]}"
        )
    if classes is not None:
        return classes.shape[1], classes.data, None if scores is None else scores.data
    assert scores is not None  # one of them is wanted
    count, labels = scores.shape[1], None
    if plan.labels and len(plan.labels) == count:  # of the config
        labels = pack_strings([label.encode() for label in plan.labels]) * examples
    return count, labels, scores.data


def regress_results(plan: ResultPlan, outputs: Mapping[str, Tensor], examples: int) -> Buffer:
    """The value of each example. The output is (examples,) or (examples, 1). Raises ServeError."""
    values = outputs[plan.outputs[OUTPUTS]]
    if len(values.shape) != 1 and not (len(values.shape) == 2 and values.shape[1] == 1):
        raise invalid(
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] "
            f"but got {shape_text(values.shape)}"
        )
    if values.shape[0] != examples:
        raise invalid(f"Input batch size did not match output batch size: {examples} vs. {values.shape[0]}")
    if values.dtype.name != "float32":
        raise invalid(f"Expected output Tensor of DT_FLOAT.  Got: {TF_NAME[values.dtype.code]}")
    return values.data


def _check_one_input(signature: Signature) -> None:
    if len(signature.inputs) != 1 and not signature.features:
        raise invalid("Expected one input Tensor.")


def _check_input_name(signature: Signature, noun: str, batching: bool) -> None:
    # A signature with features stands for TensorFlow's graph of parse_example behind one `inputs`.
    if SERIALIZED not in signature.inputs and not signature.features:
        text = signature_text(signature, batching=batching)
        raise invalid(f"No {noun} inputs found in SignatureDef: {text}")


def _check_dtype(signature: Signature) -> None:
    if not signature.features and not takes_serialized(signature):
        word = TF_WORD[signature.inputs[SERIALIZED].dtype.code]
        raise invalid(f"Expects arg[0] to be {word} but string is provided")


def _check_classes_or_scores(alias: str, tensor: Tensor, dtype: str, examples: int) -> None:
    if len(tensor.shape) != 2:
        raise invalid(f"Expected Tensor shape: [batch_size num_classes] but got {shape_text(tensor.shape)}")
    if tensor.dtype.name != dtype:
        wanted, got = TF_NAME[DTYPES[dtype].code], TF_NAME[tensor.dtype.code]
        raise invalid(f"Expected {alias} Tensor of {wanted}. Got: {got}")
    if tensor.shape[0] != examples:
        raise invalid(f"Expected {alias} output batch size of {examples}. Got: {tensor.shape[0]}")


EXAMPLES_BYTES = 4 << 20
"""Largest body: 40 bytes of objects for one of text, at worst."""

WORK = 16
"""Times a body read into memory: what a byte of examples takes."""


class ExamplesEndpoint:
    """The endpoint of one target with one of the verbs."""

    __slots__ = ("_service", "_target")

    def __init__(self, service: TFServingService, target: Target) -> None:
        self._service, self._target = service, target

    def __call__(self, call: Call) -> Coroutine[Any, Any, None]:
        return answer_slowly(call, ExamplesRequest(self._service, self._target, call))


class ExamplesRequest(RestRequest):
    """One call of either verb."""

    async def read(self) -> InferRequest:
        service = self.service
        body = await service.body(self.call)
        if len(body) > EXAMPLES_BYTES:
            text = f"Request body of {len(body)} bytes is over the limit of {EXAMPLES_BYTES} for examples"
            raise invalid(text)
        work = len(body) * WORK
        examples = await service.offload(work, read_examples, body)
        version = self.version = find_version(service.catalog, self.target)
        signature = find_signature(version, examples.signature_name)
        self._plan = plan_results(
            self.target.verb,
            signature,
            batching=version.batching,
            by_method=service.options.check_methods,
        )
        self._count = len(examples.examples)
        inputs = await service.offload(work, feed, examples, signature, batching=version.batching)
        return InferRequest(inputs, tuple(self._plan.outputs.values()), deadline_ns=self.deadline_ns)

    async def write(self, response: InferResponse) -> None:
        keys = self.service.options.result_keys
        self.body = write_results(self.target.verb, self._plan, response.outputs, self._count, keys)


def write_results(
    verb: str, plan: ResultPlan, outputs: Mapping[str, Tensor], examples: int, keys: tuple[str, ...]
) -> bytes:
    """The body of a reply; `keys` are what the results are called. Raises ServeError."""
    try:
        if verb == "classify":
            return write_classifications(examples, *classify_results(plan, outputs, examples), keys)
        return write_regressions(regress_results(plan, outputs, examples), keys)
    except WriterFault as fault:
        if fault.code is not WriterCode.NO_RESULTS:
            raise writer_error(fault) from None
        noun = "ClassificationResults" if verb == "classify" else "RegressionResults"
        raise invalid(f"Cannot convert empty {noun} to JSON") from None
