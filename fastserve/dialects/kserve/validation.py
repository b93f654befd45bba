"""Checks of a request against its model, with Triton's texts and in Triton's order (spec 3.3).

Triton keeps inputs in a hash table that lists the latest first. That order shows in its texts and decides
which of several errors is reported, so it is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fastserve._ext.flatten import walk_bytes
from fastserve.dialects.kserve.request import InferBody, InputPart, id_prefix
from fastserve.errors import Kind, ModelError, invalid
from fastserve.request import InferRequest
from fastserve.serving.client_memory import Regions, check_total
from fastserve.serving.model_view import ModelView, TensorView
from fastserve.serving.prepared import Memory
from fastserve.tensor import DTYPE_BY_KSERVE, KSERVE_NAME, Tensor, count_items, fits_shape, kserve_name

_LENGTH_BYTES = 4
_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim in your "
    "input dims config, try setting max_batch_size to zero. See the model configuration docs for more info "
    "on max_batch_size."
)


def make_request(view: ModelView, body: InferBody, regions: Regions) -> InferRequest:
    """Return the engine's request of a body that fits the model. Raises ServeError.

    Client memory is read after every check that needs none of it.
    """
    parameters = body.parameters
    wanted = check_outputs(view, [part.name for part in body.outputs])
    return InferRequest(
        check_inputs(view, body.inputs, body.request_id, regions),
        wanted,
        request_id=body.request_id,
        priority=parameters.priority,
        parameters=parameters.own,
        sequence_id=parameters.sequence_id,
        sequence_start=parameters.sequence_start,
        sequence_end=parameters.sequence_end,
        timeout_us=parameters.timeout_us,
    )


def check_outputs(view: ModelView, names: Sequence[str]) -> tuple[str, ...]:
    """Return the outputs to ask for, in the model's order; empty for all. Raises ServeError."""
    for name in sorted(names):  # Triton keeps them in a sorted set
        if name not in view.outputs:
            raise invalid(f"unexpected inference output '{name}' for model '{view.model}'")
    wanted = set(names)
    return () if len(wanted) == len(view.outputs) else tuple(n for n in view.outputs if n in wanted)


def check_inputs(
    view: ModelView, parts: Sequence[InputPart], request_id: str, regions: Regions
) -> dict[str, Tensor]:
    """Return the tensors for the engine, in the model's own shapes. Raises ServeError."""
    prefix = id_prefix(request_id)
    latest_first = parts[::-1]
    _check_count(view, latest_first, prefix)
    for part in latest_first:
        if part.name not in view.inputs:
            raise invalid(f"unexpected inference input '{part.name}' for model '{view.model}'")
    if view.max_batch_size:
        _check_batch(view, latest_first, prefix)
    for part in latest_first:
        _check_part(view, view.inputs[part.name], part, prefix, regions)
    _check_required(view, parts, prefix)
    check_total(view.version, (part.range for part in parts if part.range is not None))
    sent = {part.name: part for part in parts}
    return {
        name: Tensor(
            side.dtype,
            side.to_model(sent[name].shape, batching=view.batching),
            _read_part(view, sent[name], prefix, regions),
        )
        for name, side in view.inputs.items()
        if name in sent
    }


def _read_part(view: ModelView, part: InputPart, prefix: str, regions: Regions) -> Memory:
    """Return the bytes of a checked input, none yet for one on a device. Raises ServeError."""
    if part.range is None or part.lent is not None:
        return part.data
    data = regions.read(part.range)
    if not DTYPE_BY_KSERVE[part.datatype].item_bytes:  # its client may have written them meanwhile
        check_strings(data, _count_strings(view, part), part.name, view.model, prefix)
    return data


def _check_count(view: ModelView, parts: Sequence[InputPart], prefix: str) -> None:
    required, most, count = len(view.required), len(view.inputs), len(parts)
    if required <= count <= most:
        return
    wanted = f"{most} inputs" if required == most else f"number of inputs between {required} and {most}"
    given = {part.name for part in parts}
    missing = ",".join(f"'{name}'" for name in view.required if name not in given)
    names = ",".join(f"'{part.name}'" for part in parts)
    raise invalid(
        f"{prefix}expected {wanted} but got {count} inputs for model '{view.model}'. Got input(s) [{names}], "
        # With none missing Triton drops the bracket it just opened.
        f"but missing required input(s) {'[' + missing if missing else ''}]. "
        "Please provide all required input(s)."
    )


def _check_required(view: ModelView, parts: Sequence[InputPart], prefix: str) -> None:
    """Raise ModelError for a missing input: Triton counts inputs only, and the model fails."""
    given = {part.name for part in parts}
    for name in view.required:
        if name not in given:
            text = f"{prefix}input '{name}' is missing for model '{view.model}'"
            raise ModelError(Kind.INTERNAL, text)


def _check_batch(view: ModelView, parts: Sequence[InputPart], prefix: str) -> None:
    rows = -1
    for part in parts:
        if not part.shape:
            raise invalid(
                f"{prefix}input '{part.name}' has no shape but model requires batch dimension "
                f"for '{view.model}'"
            )
        if rows not in (-1, part.shape[0]):
            raise invalid(
                f"{prefix}input '{part.name}' batch size does not match other inputs for '{view.model}'"
            )
        rows = part.shape[0]
    if view.row_limit and rows > view.row_limit:
        raise invalid(f"{prefix}inference request batch-size must be <= {view.row_limit} for '{view.model}'")


def _check_part(view: ModelView, side: TensorView, part: InputPart, prefix: str, regions: Regions) -> None:
    dtype = DTYPE_BY_KSERVE.get(part.datatype)
    if dtype is not side.dtype:
        given = KSERVE_NAME[dtype.name] if dtype is not None else "<invalid>"
        raise invalid(
            f"{prefix}inference input '{part.name}' data-type is '{given}', "
            f"but model '{view.model}' expects '{kserve_name(side.dtype)}'"
        )
    _check_shape(view, side, part, prefix)
    if side.dtype.item_bytes:
        _check_size(view, side, part, prefix)
    elif part.range is None:
        check_strings(part.data, _count_strings(view, part), part.name, view.model, prefix)
    elif part.lent is None:
        check_total(view.version, [part.range])
        count = _count_strings(view, part)
        walked = regions.walk(part.range, count + 1)
        check_walk(walked, part.nbytes, count, part.name, view.model, prefix)


def _count_strings(view: ModelView, part: InputPart) -> int:
    """Return how many strings an input has to bring; for zero rows those of one row, as in Triton."""
    return count_items(
        part.shape if part.shape[:1] != (0,) or not view.max_batch_size else (1, *part.shape[1:])
    )


def _check_shape(view: ModelView, side: TensorView, part: InputPart, prefix: str) -> None:
    dims = view.full_dims(side)
    if side.dims is None or fits_shape(part.shape, dims):
        return
    wanted, given = ",".join(map(str, dims)), ",".join(map(str, part.shape))
    raise invalid(
        f"{prefix}unexpected shape for input '{part.name}' for model '{view.model}'. "
        f"Expected [{wanted}], got [{given}]. {_NOTE if view.max_batch_size else ''}"
    )


def _check_size(view: ModelView, side: TensorView, part: InputPart, prefix: str, name: str = "") -> None:
    """Raise ServeError for a wrong size in bytes; `name` replaces the input's own in the text."""
    shape = part.shape
    if view.max_batch_size and shape[0] == 0:
        shape = (1, *shape[1:])  # Triton wants one row for none
    wanted, given = count_items(shape) * side.dtype.item_bytes, part.nbytes
    if wanted != given:
        raise invalid(
            f"{prefix}input byte size mismatch for input '{name or part.name}' for model '{view.model}'. "
            f"Expected {wanted}, got {given}"
        )


def check_strings(data: Memory, count: int, name: str, model: str, prefix: str) -> None:
    """Raise ServeError unless `data` is `count` elements in BYTES packing."""
    check_walk(walk_bytes(data, count + 1), memoryview(data).nbytes, count, name, model, prefix)


def check_walk(
    walked: tuple[int, int, int], nbytes: int, count: int, name: str, model: str, prefix: str
) -> None:
    """Raise ServeError unless a walk by `walk_bytes` over `nbytes` found `count` elements."""
    found, last, end = walked
    if found > count:
        raise invalid(
            f"{prefix}unexpected number of string elements {found} for inference input '{name}' "
            f"for model '{model}', expecting {count}"
        )
    missing = end - nbytes
    if missing > 0:
        size = end - last - _LENGTH_BYTES
        raise invalid(
            f"incomplete string data for inference input '{name}', expecting string of length {size} "
            f"but only {size - missing} bytes available"
        )
    if missing < 0:
        raise invalid(
            f"{prefix}incomplete string length indicator for inference input '{name}' for model '{model}', "
            f"expecting 4 bytes but only {-missing} bytes available. Please make sure the string length "
            "indicator is in one buffer."
        )
    if found != count:
        raise invalid(
            f"{prefix}expected {count} string elements for inference input '{name}' for model '{model}', "
            f"got {found}"
        )


def deduce_raw(view: ModelView, body: Memory) -> InputPart:
    """Return the one input of a raw binary request (spec 3.1): batch 1, one free axis deduced.

    Raises ServeError.
    """
    prefix = id_prefix("")
    if len(view.inputs) != 1:
        raise invalid(
            f"{prefix}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(view.inputs)} inputs in '{view.model}' model configuration"
        )
    side = next(iter(view.inputs.values()))
    dims = (1, *(side.dims or (-1,))) if view.max_batch_size else (side.dims or (-1,))
    if not side.dtype.item_bytes:
        if prod(dims) != 1:
            raise invalid(
                f"{prefix}For BYTE datatype raw input '{side.name}', the model must have input shape [1]"
            )
        packed = len(body).to_bytes(_LENGTH_BYTES, "little") + bytes(body)
        return InputPart(side.name, kserve_name(side.dtype), tuple(1 for _ in dims), packed)
    free = dims.count(-1)
    if free > 1:
        raise invalid(
            f"{prefix}The shape of the raw input '{side.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    unit = side.dtype.item_bytes * prod(size for size in dims if size != -1)
    deduced = len(body) // unit if free and unit else 0
    part = InputPart(side.name, kserve_name(side.dtype), tuple(deduced if n == -1 else n for n in dims), body)
    _check_size(view, side, part, prefix, "raw_input")
    return part
