"""Classify and regress over REST, and what a model's outputs must be for them (spec 3.4, 3.5).

    plan_results                            what to ask a signature's model for, or why it cannot be
    classify_results   regress_results      labels, scores and values of its answer, or what is wrong
    ExamplesEndpoint                        POST ...:classify and ...:regress

Examples are read the general way, an object per value, so these bodies have a bound of their own, and from
64 KiB on are read in a thread.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastserve._ext.json_writer import WriterCode, WriterFault, write_classifications, write_regressions
from fastserve.codec.byte_formats import pack_strings
from fastserve.dialects.tfserving.errors import TF_NAME, TF_WORD, shape_text, writer_error
from fastserve.dialects.tfserving.examples import SERIALIZED, feed, read_examples, takes_serialized
from fastserve.dialects.tfserving.metadata import signature_text
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import RestRequest, TFServingService, find_signature, find_version
from fastserve.errors import invalid
from fastserve.net.request import Call
from fastserve.repository.model_config import Signature
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.slow_path import answer_slowly
from fastserve.tensor import DTYPES, Tensor

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
