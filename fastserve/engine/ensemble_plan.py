"""What an ensemble's config asks for, checked: its steps, the tensors between them, the models they name.

    config:  input X -> step(simple: INPUT0 = X, INPUT1 = X; OUTPUT0 = Y) -> output Y
    plan:    steps in the order written, each ready once the tensors it reads are there

Two looks: `make_plan` needs the config only; `check_models` needs the models loaded. Running is
`ensemble`. The texts are Triton's (core: ensemble config checks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fastserve.config.options import EnsembleOptions, EnsembleStep
from fastserve.errors import invalid
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.tensor import DType, TensorSpec

Lookup = Callable[[str, "int | None"], "Version | None"]
ANY_LENGTH = -1
_TYPE_NAMES = {"bytes": "STRING", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


@dataclass(frozen=True, slots=True)
class Plan:
    """An ensemble's steps. `required` inputs must be in a request, `optional` ones may be."""

    name: str
    steps: tuple[EnsembleStep, ...]
    required: tuple[str, ...]
    optional: frozenset[str]
    outputs: tuple[str, ...]
    max_inflight: int  # requests at a time in each step, 0 for any number

    @property
    def models(self) -> frozenset[str]:
        """Names of the models it needs."""
        return frozenset(step.model for step in self.steps)


def make_plan(name: str, options: EnsembleOptions) -> Plan:
    """The plan of an ensemble. Raises ServeError INVALID_ARGUMENT for one whose tensors do not flow."""
    steps, inputs, outputs = tuple(options.steps), options.inputs, tuple(options.outputs)
    if not steps:
        raise invalid(f"must specify 'step' for ensemble '{name}'")
    for index, step in enumerate(steps):
        _check_step(name, index, step)
    _check_writers(name, steps, inputs)
    _check_flow(name, steps, inputs, outputs)
    return Plan(
        name,
        steps,
        tuple(i for i, optional in inputs.items() if not optional),
        frozenset(i for i, optional in inputs.items() if optional),
        outputs,
        options.max_inflight,
    )


def _check_step(name: str, index: int, step: EnsembleStep) -> None:
    for field, given in (
        ("model_name", step.model),
        ("input_map", step.inputs),
        ("output_map", step.outputs),
    ):
        if not given:
            raise invalid(f"must specify '{field}' in step {index} of ensemble '{name}'")


def _check_writers(name: str, steps: tuple[EnsembleStep, ...], inputs: Mapping[str, bool]) -> None:
    written = set(inputs)
    for index, step in enumerate(steps):
        for tensor in step.outputs.values():
            if tensor in written:
                raise invalid(
                    f"ensemble tensor '{tensor}' can appear in an output map only once "
                    f"for ensemble '{name}' step {index}"
                )
            written.add(tensor)


def _check_flow(
    name: str, steps: tuple[EnsembleStep, ...], inputs: Mapping[str, bool], outputs: tuple[str, ...]
) -> None:
    """Every tensor is written by something that can run, and used by something. A circle never runs."""
    read = {tensor for step in steps for tensor in step.inputs.values()}
    known = read | {tensor for step in steps for tensor in step.outputs.values()}
    for tensor in inputs:
        if tensor not in read:
            raise invalid(f"ensemble input '{tensor}' for ensemble {name}' is not used")
    ready = _reachable(steps, inputs)
    for tensor in outputs:
        if tensor not in known:
            raise invalid(f"ensemble output '{tensor}' for ensemble {name}' is not used")
        if tensor not in ready:
            raise invalid(f"output '{tensor}' for ensemble '{name}' is not written")
    for tensor in sorted(known - set(outputs)):
        if tensor not in ready or tensor not in read:
            raise invalid(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _reachable(steps: tuple[EnsembleStep, ...], inputs: Iterable[str]) -> set[str]:
    ready, left = set(inputs), list(steps)
    while True:
        able = [step for step in left if ready.issuperset(step.inputs.values())]
        if not able:
            return ready
        left = [step for step in left if step not in able]
        ready.update(tensor for step in able for tensor in step.outputs.values())


# --- the models behind it ------------------------------------------------------------------------------


def check_models(version: Version, plan: Plan, catalog: Catalog) -> None:
    """Raises ServeError INVALID_ARGUMENT when a model is missing or its tensors do not fit."""
    seen: dict[str, _Seen] = {}
    batching = version.batching
    for side in (version.inputs, version.outputs):
        for name, spec in side.items():
            seen[name] = _Seen(plan.name, spec, batching)
    for step in plan.steps:
        if step.model == plan.name:
            raise invalid(f"circular dependency between ensembles: {plan.name} -> {plan.name}")
        _check_circle(plan.name, step.model, catalog)
        model = find_model(plan.name, step, catalog.available)
        _check_size(version, model)
        options = model.config.options
        if options.decoupled and not options.parts_if_asked:
            raise invalid(f"in ensemble {plan.name}, model {step.model} is decoupled: no step may be")
        _check_inputs(plan.name, step, model, seen)
        _check_outputs(plan.name, step, model, seen)


def find_model(ensemble: str, step: EnsembleStep, lookup: Lookup) -> Version:
    """The version a step runs on. Raises ServeError INVALID_ARGUMENT when it is not loaded."""
    found = lookup(step.model, step.version)
    if found is not None:
        return found
    if step.version is not None and lookup(step.model, None) is not None:
        raise invalid(
            f"ensemble '{ensemble}' depends on '{step.model}' whose required version {step.version} "
            "is not loaded"
        )
    raise invalid(f"ensemble '{ensemble}' depends on '{step.model}' which has no loaded version")


def _check_circle(ensemble: str, model: str, catalog: Catalog, path: tuple[str, ...] = ()) -> None:
    """Looks at configs, loaded or not: what goes round in a circle can never be loaded."""
    for inner in _models_of(catalog, model):
        if inner == ensemble:
            raise invalid(
                f"circular dependency between ensembles: {ensemble} -> ... -> {model} -> {ensemble}"
            )
        if inner not in path:
            _check_circle(ensemble, inner, catalog, (*path, model))


def _models_of(catalog: Catalog, name: str) -> set[str]:
    known = catalog.models.get(name)
    versions = known.versions.values() if known is not None else ()
    ensembles = [version.config.options.ensemble for version in versions]
    return {step.model for one in ensembles if one is not None for step in one.steps}


def _check_size(version: Version, model: Version) -> None:
    most, least = version.config.max_batch_size, model.config.max_batch_size
    if model.batching and least < most:
        raise invalid(
            f"ensemble {version.model} allows maximum batch size {most}, but it contains model {model.model} "
            f"which only allows maximum batch size to be {least}"
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where a tensor's type and shape were learnt first."""

    model: str
    spec: TensorSpec
    batching: bool

    @property
    def full(self) -> tuple[int, ...]:
        lead = (ANY_LENGTH,) if self.batching else ()
        return (*lead, *(self.spec.shape or ()))


def _check_inputs(ensemble: str, step: EnsembleStep, model: Version, seen: dict[str, _Seen]) -> None:
    for name, tensor in step.inputs.items():
        if name not in model.inputs:
            raise invalid(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} "
                f"in model {step.model}"
            )
        _check_same(ensemble, tensor, _Seen(step.model, model.inputs[name], model.batching), seen)
    optional = model.config.options.optional_inputs
    for name in model.inputs:
        if name not in step.inputs and name not in optional:
            raise invalid(
                f"in ensemble {ensemble}, input {name} in model {step.model} is not mapped "
                "to any ensemble tensors"
            )


def _check_outputs(ensemble: str, step: EnsembleStep, model: Version, seen: dict[str, _Seen]) -> None:
    for name, tensor in step.outputs.items():
        if name not in model.outputs:
            raise invalid(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} "
                f"in model {step.model}"
            )
        _check_same(ensemble, tensor, _Seen(step.model, model.outputs[name], model.batching), seen)


def _check_same(ensemble: str, tensor: str, found: _Seen, seen: dict[str, _Seen]) -> None:
    known = seen.setdefault(tensor, found)
    head = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if known.spec.dtype is not found.spec.dtype:
        raise invalid(
            f"{head}inconsistent data type: {_type_name(known.spec.dtype)} is inferred from model "
            f"{known.model} while {_type_name(found.spec.dtype)} is inferred from model {found.model}"
        )
    if None in (known.spec.shape, found.spec.shape):
        return
    if not _alike(known.spec.shape or (), found.spec.shape or ()) and not _alike(known.full, found.full):
        raise invalid(
            f"{head}inconsistent shape: {_listed(known.full)} is inferred from model {known.model} "
            f"while {_listed(found.full)} is inferred from model {found.model}"
        )


def _alike(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(
        ANY_LENGTH in pair or pair[0] == pair[1] for pair in zip(a, b, strict=True)
    )


def _listed(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _type_name(dtype: DType) -> str:
    return "TYPE_" + _TYPE_NAMES.get(dtype.name, dtype.name.upper())
