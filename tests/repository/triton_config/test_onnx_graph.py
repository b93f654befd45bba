"""The reader of ONNX files against the onnx library, and against files cut short or spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.repository.triton_config.completion import read_onnx_graph
from tests.effort import examples

onnx = pytest.importorskip("onnx")

Axes = list[str | int] | None


def write_model(
    path: Path, inputs: dict[str, tuple[int, Axes]], outputs: dict[str, tuple[int, Axes]]
) -> None:
    """A model whose nodes make no sense: only its tensors are read."""
    make = onnx.helper.make_tensor_value_info
    weights = onnx.helper.make_tensor("w", 1, [2], [1.0, 2.0])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [next(iter(inputs), "x")], [next(iter(outputs), "y")])],
        "g",
        [make(name, kind, axes) for name, (kind, axes) in inputs.items()] + [make("w", 1, [2])],
        [make(name, kind, axes) for name, (kind, axes) in outputs.items()],
        [weights],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())


AXES = st.none() | st.lists(st.sampled_from(["N", 1, 7, 2**40]), max_size=4)
TENSORS = st.dictionaries(
    st.text(st.characters(categories=["L"]), min_size=1, max_size=5).filter(lambda name: name != "w"),
    st.tuples(st.sampled_from([1, 2, 6, 7, 8, 9, 10, 11, 16]), AXES),
    max_size=3,
)


@examples(60)
@given(inputs=TENSORS, outputs=TENSORS)
def test_tensors_as_the_library_wrote_them(
    tmp_path_factory: pytest.TempPathFactory,
    inputs: dict[str, tuple[int, Axes]],
    outputs: dict[str, tuple[int, Axes]],
) -> None:
    path = tmp_path_factory.mktemp("m") / "model.onnx"
    write_model(path, inputs, outputs)
    graph = read_onnx_graph(path)
    assert graph is not None
    for written, read in ((inputs, graph.inputs), (outputs, graph.outputs)):
        assert list(written) == list(read)
        for name, (kind, axes) in written.items():
            shape = None if axes is None else tuple(n if isinstance(n, int) else -1 for n in axes)
            assert read[name].shape == shape
            library = onnx.helper.tensor_dtype_to_np_dtype(kind).name
            ours = {"bytes": library if library in ("object", "str") else "object"}
            assert ours.get(read[name].dtype.name, read[name].dtype.name) == library


@examples(100)
@given(data=st.data())
def test_spoilt_files_are_no_models(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("m") / "model.onnx"
    write_model(path, {"x": (1, ["N", 4])}, {"y": (8, None)})
    whole = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=3)):
        whole[at] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    read_onnx_graph(path)  # whatever it finds: it ends, and raises nothing


def test_batched_is_a_symbolic_first_axis_everywhere(tmp_path: Path) -> None:
    for axes, batched in ((["N", 4], True), ([1, 4], False), ([], False), (None, False)):
        write_model(tmp_path / "m", {"x": (1, ["N"])}, {"y": (1, axes)})  # type: ignore[dict-item]
        graph = read_onnx_graph(tmp_path / "m")
        assert graph is not None
        assert graph.batched is batched
        assert graph.without_batch().inputs["x"].shape == ()
