"""Signatures: the named ways into a model, resolved against the tensors the model really has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec

from fastserve.errors import ConfigError
from fastserve.repository.model_config import DTypeName, ModelConfig, SignatureConfig, TensorConfig
from fastserve.settings import convert
from fastserve.settings.fields import fault_text
from fastserve.tensor import TensorSpec

DEFAULT_SIGNATURE = "serving_default"
Method = Literal["predict", "classify", "regress"]


@dataclass(frozen=True, slots=True)
class Signature:
    """A named entry point of a version.

    `inputs` and `outputs` map the client's names to the model's specs (shape without batch axis when the
    model batches; `spec.name` is the model's own name); `input_names` and `output_names` map the client's
    names to the model's. `features` maps a feature of an example to a client's input name (classify and
    regress). `class_labels` names the classes when the model does not.
    """

    name: str
    method: Method
    inputs: dict[str, TensorSpec]
    input_names: dict[str, str]
    outputs: dict[str, TensorSpec]
    output_names: dict[str, str]
    features: dict[str, str] = field(default_factory=dict)
    class_labels: tuple[str, ...] = ()


def build_signatures(
    config: ModelConfig, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> dict[str, Signature]:
    """Return every signature of a model with these tensors. Raises ConfigError when one names a missing
    tensor."""
    configs = dict(config.signatures)
    configs.setdefault(DEFAULT_SIGNATURE, SignatureConfig())
    return {name: _build(name, written, config, inputs, outputs) for name, written in configs.items()}


def with_signatures(
    config: ModelConfig,
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
    told: Mapping[str, Mapping[str, Any]],
) -> ModelConfig:
    """Return the config with the signatures of the loaded model added; those of model.yaml take precedence.

    Where there is no default among several, the default takes nothing: it exists and answers no request.
    Raises ConfigError.
    """
    own = {name: convert(each, SignatureConfig, f"signatures.{name}") for name, each in told.items()}
    first = next(iter(own.values()))
    spare = first if len(own) == 1 else SignatureConfig(inputs={}, outputs={})
    signatures = {DEFAULT_SIGNATURE: spare, **own, **config.signatures}
    some = [name for name in inputs if any(name not in (each.inputs or {}).values() for each in own.values())]
    options = msgspec.structs.replace(config.options, optional_inputs=some, signature_inputs=some)
    return msgspec.structs.replace(
        config,
        inputs=_written(inputs),
        outputs=_written(outputs),
        signatures=signatures,
        options=options,
    )


def _written(specs: Mapping[str, TensorSpec]) -> dict[str, TensorConfig]:
    return {
        name: TensorConfig(
            cast("DTypeName", spec.dtype.name), None if spec.shape is None else list(spec.shape)
        )
        for name, spec in specs.items()
    }


def _build(
    name: str,
    written: SignatureConfig,
    config: ModelConfig,
    inputs: Mapping[str, TensorSpec],
    outputs: Mapping[str, TensorSpec],
) -> Signature:
    input_names = _names(written.inputs, inputs, f"signatures.{name}.inputs")
    output_names = _names(written.outputs, outputs, f"signatures.{name}.outputs")
    return Signature(
        name=name,
        method=written.method,
        inputs={alias: inputs[target] for alias, target in input_names.items()},
        input_names=input_names,
        outputs={alias: outputs[target] for alias, target in output_names.items()},
        output_names=output_names,
        features=_features(written, input_names, name),
        class_labels=config.class_texts if written.method == "classify" else (),
    )


def _names(written: dict[str, str] | None, known: Mapping[str, TensorSpec], where: str) -> dict[str, str]:
    names = {name: name for name in known} if written is None else dict(written)
    for alias, target in names.items():
        if target not in known:
            raise ConfigError(fault_text(f"{where}.{alias}", target, " or ".join(known)))
    return names


def _features(written: SignatureConfig, input_names: dict[str, str], name: str) -> dict[str, str]:
    if written.method == "predict":
        return {}
    features = {alias: alias for alias in input_names} if written.features is None else dict(written.features)
    for feature, alias in features.items():
        if alias not in input_names:
            raise ConfigError(
                fault_text(f"signatures.{name}.features.{feature}", alias, " or ".join(input_names))
            )
    return features
