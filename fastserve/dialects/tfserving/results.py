"""A model's outputs -> classifications and regressions, checked as the original does (spec 3.5).

    plan_results                            what to ask a signature's model for, or why it cannot be
    classify_results   regress_results      labels, scores and values of its answer, or what is wrong

Nothing here knows whether the answer will be JSON or a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastserve.codec.packing import pack_strings
from fastserve.dialects.tfserving.describe import signature_text
from fastserve.dialects.tfserving.features import SERIALIZED, takes_serialized
from fastserve.dialects.tfserving.names import TF_NAME, TF_WORD, shape_text
from fastserve.errors import invalid
from fastserve.repository.signature import Signature
from fastserve.tensor import DTYPES, Tensor

Buffer = bytes | bytearray | memoryview
CLASSES, SCORES, OUTPUTS = "classes", "scores", "outputs"


@dataclass(frozen=True, slots=True)
class ResultPlan:
    """What to ask a model for: alias -> the model's own output name, and the labels it leaves to us."""

    outputs: dict[str, str]
    labels: tuple[str, ...] = ()


VERBS = {"classify": "classification", "regress": "regression"}


def plan_results(verb: str, signature: Signature, *, batching: bool, by_method: bool) -> ResultPlan:
    """What `verb` asks of a signature; `by_method`, only of one with that method. Raises ServeError."""
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
