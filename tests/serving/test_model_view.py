"""A model as clients see it: the config's order and axes, what may be left out, one view per version."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.triton_config.reading import make_triton_config, to_model_config
from fastserve.repository.version import Version, VersionState
from fastserve.serving.model_view import ModelViews, TensorView, find_version
from fastserve.tensor import DTYPES, MOST_AXES, TensorSpec

FP32 = DTYPES["float32"]
X = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}


def make_version(config: ModelConfig, catalog: Catalog) -> Version:
    version = Version("m", 1, Path(), config)
    catalog.put(version)
    catalog.move(version, VersionState.LOADING)
    return version


def of_triton(catalog: Catalog, **fields: object) -> Version:
    config = make_triton_config({"backend": "python", **fields}, "m")
    return make_version(to_model_config(config), catalog)


def test_a_triton_config() -> None:
    """Its order goes before the model's, and so do its axes; the model's other tensors follow."""
    catalog = Catalog()
    version = of_triton(
        catalog,
        max_batch_size=4,
        input=[{**X, "name": "b", "optional": True}, {**X, "name": "a"}],
        output=[{**X, "name": "y"}],
        model_transaction_policy={"decoupled": True},
    )
    found = {name: TensorSpec(name, FP32, (-1,)) for name in "abc"}
    version.describe(found, {"y": TensorSpec("y", FP32, (4,))})
    view = ModelViews(catalog).of(version)
    assert [(one.name, one.dims, one.optional) for one in view.inputs.values()] == [
        ("b", (4,), True),
        ("a", (4,), False),
        ("c", (-1,), False),
    ]
    assert (view.required, view.row_limit, view.max_batch_size) == (("a", "c"), 4, 4)
    assert (view.decoupled, view.ensemble, view.batching) == (True, False, True)
    assert view.full_dims(view.outputs["y"]) == (-1, 4)


def test_a_native_config() -> None:
    """The model's word counts, and large requests are split."""
    catalog = Catalog()
    version = make_version(ModelConfig(backend="onnx"), catalog)
    version.describe({"x": TensorSpec("x", FP32, None)}, {"y": TensorSpec("y", FP32, (2,))})
    view = ModelViews(catalog).of(version)
    assert view.row_limit == 0
    assert view.full_dims(view.inputs["x"]) == (-1, -1)
    assert view.client_shape("unknown", (3, 1)) == (3, 1)


def test_a_tensor_without_axes() -> None:
    """No config can say so: clients see one axis of one element."""
    scalar = TensorView("x", FP32, (1,), ())
    assert scalar.to_model((5, 1), batching=True) == (5,)
    assert scalar.to_client((5,), batching=True) == (5, 1)
    assert scalar.to_model((1,), batching=False) == ()


@pytest.mark.parametrize(
    ("have", "want", "shape", "expected"),
    [
        ((-1, 6), (-1, 3, 2), (2, 9, 6), (2, 9, 3, 2)),
        ((4,), (-1,), (2, 4), (2, 4)),  # narrower than the model's: the same axes
        ((4,), (2, 2), (2, 4, 1), (2, 4, 1)),  # not of this form: whoever checks says so
        ((4,), None, (2, 4), (2, 4)),
    ],
)
def test_shapes_of_the_model(
    have: tuple[int, ...], want: tuple[int, ...] | None, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert TensorView("x", FP32, have, want).to_model(shape, batching=True) == expected


def test_what_fits() -> None:
    assert TensorView("x", FP32, (-1, 3), None).fits((0, 3))
    assert not TensorView("x", FP32, (-1, 3), None).fits((-1, 3))
    assert not TensorView("x", FP32, (-1, 3), None).fits((3,))
    assert TensorView("x", FP32, None, None).fits((1,) * MOST_AXES)
    assert not TensorView("x", FP32, None, None).fits((1,) * (MOST_AXES + 1))


def test_one_view_for_all_that_goes_with_its_version() -> None:
    catalog = Catalog()
    version = of_triton(catalog, input=[X], output=[X])
    catalog.move(version, VersionState.AVAILABLE)
    view = ModelViews(catalog).of(version)
    assert ModelViews(catalog).of(version) is view
    catalog.move(version, VersionState.UNLOADING)
    assert ModelViews(catalog).of(version) is view  # requests that run may still ask
    catalog.move(version, VersionState.END)
    assert ModelViews(catalog).of(version) is not view


def test_versions_that_are_not_there() -> None:
    catalog = Catalog()
    version = of_triton(catalog, input=[X], output=[X])
    for name, number, why in (
        ("who", None, "is not found"),
        ("m", None, "has no available versions"),
        ("m", 1, "version 1 is not at ready state"),
        ("m", 2, "version 2 is not found"),
    ):
        with pytest.raises(ServeError) as caught:
            find_version(catalog, name, number)
        assert caught.value.kind is (Kind.UNAVAILABLE if "ready" in why else Kind.NOT_FOUND)
        assert caught.value.message == f"Request for unknown model: '{name}' {why}"
    catalog.move(version, VersionState.AVAILABLE)
    assert find_version(catalog, "m", None) is find_version(catalog, "m", 1) is version
