"""The torch backend in this process: every form of file, what is refused in which words, types and names."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastserve.backends import create
from fastserve.backends.frameworks.torch import own_outputs
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.repository.model_config import config_json, parse_model_config
from fastserve.repository.triton_config.reading import parse_triton_text, to_model_config
from tests.backends.frameworks.torch_models import CONFIG, Y, net, save_class, save_program, save_script

ROWS = np.random.default_rng(3).standard_normal((5, 4)).astype(np.float32)
FLOAT = {"dtype": "float32", "shape": [4]}


def load(folder: Path, **changes: Any) -> Any:
    config = config_json(parse_model_config({**CONFIG, **changes}))
    backend = create(config, folder, 0)
    try:
        backend.load()
    except BaseException:
        backend.close()
        raise
    return backend


def load_triton(folder: Path, text: str) -> Any:
    config = to_model_config(parse_triton_text(text, "net"))
    assert config.fault == ""
    backend = create(config_json(config), folder, 0)
    backend.load()
    return backend


def expected(module: nn.Module, *inputs: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return module(*[torch.from_numpy(x) for x in inputs]).numpy()


SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        assert config["device"] == "cpu" and config["version"] == 1

    def forward(self, x):
        return self.layers(x)
"""
RETURNED = """
import torch
from torch import nn

class Model:
    def load(self):
        torch.manual_seed(7)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
            def forward(self, x):
                return {"y": self.layers(x), "more": x}
        return Net()
"""
FORMS = {
    "script": lambda root: save_script(root, net()),
    "program": lambda root: save_program(root, net(), torch.zeros(2, 4)),
    "class": lambda root: save_class(root, SOURCE),
    "returned": lambda root: save_class(root, RETURNED),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_form_answers_as_torch_does(tmp_path: Path, form: str, rows: int) -> None:
    outputs = {"OUTPUT__0": Y["y"]} if form == "program" else Y
    backend = load(FORMS[form](tmp_path), outputs=outputs)
    (got,) = backend.run({"x": ROWS[:rows]}).values()
    np.testing.assert_allclose(got, expected(net(), ROWS[:rows]), rtol=1e-5, atol=1e-6)
    backend.close()


def test_a_program_tells_its_tensors(tmp_path: Path) -> None:
    backend = load(save_program(tmp_path, net(), torch.zeros(2, 4)), inputs={}, outputs={})
    assert {n: (s.dtype.name, s.shape) for n, s in backend.inputs.items()} == {"x": ("float32", (4,))}
    assert {n: (s.dtype.name, s.shape) for n, s in backend.outputs.items()} == {
        "OUTPUT__0": ("float32", (3,))
    }


def test_a_program_whose_rows_are_fixed_needs_max_batch_size_0(tmp_path: Path) -> None:
    folder = save_program(tmp_path, net(), torch.zeros(2, 4), rows=False)
    with pytest.raises(
        ConfigError, match=r"'x' has no free first axis: its shape is \[2, 4\]; export it with"
    ):
        load(folder, inputs={}, outputs={})
    backend = load(folder, inputs={}, outputs={}, max_batch_size=0)
    assert backend.inputs["x"].shape == (2, 4)
    assert backend.run({"x": ROWS[:2]})["OUTPUT__0"].shape == (2, 3)


def test_what_does_not_tell_its_tensors_has_to_be_declared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not tell its inputs: declare them in model\.yaml"):
        load(save_script(tmp_path, net()), inputs={})


# --- files that are refused --------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle ran')",)


def test_pickles_are_refused_and_not_opened(tmp_path: Path) -> None:
    folder = save_script(tmp_path, net())
    told = (
        r"model\.pt is a pickle, .* not opened, .*torch\.export\.save\(.*torch: \{file: model\.py, weights: "
    )
    torch.save(net().state_dict(), folder / "model.pt")
    with pytest.raises(ConfigError, match=told):
        load(folder)
    torch.save(net(), folder / "model.pt")
    with pytest.raises(ConfigError, match=told):
        load(folder)
    for protocol in (2, 4):
        (folder / "model.pt").write_bytes(pickle.dumps(Evil(), protocol))
        with pytest.raises(ConfigError, match=told):
            load(folder)
    torch.save(Evil(), folder / "model.pt")
    with pytest.raises(ConfigError, match=told):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 100, b"PK\x05\x06" + b"\0" * 18])
def test_files_that_are_nothing(tmp_path: Path, content: bytes) -> None:
    folder = save_script(tmp_path, net())
    (folder / "model.pt").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"model\.pt is no PyTorch program: save the program where its code"
    ):
        load(folder)


def test_a_damaged_program_says_so_without_folders(tmp_path: Path) -> None:
    folder = save_script(tmp_path, net())
    with zipfile.ZipFile(folder / "model.pt") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data.replace(b"def forward", b"~~~"))
    with pytest.raises(ServeError, match=r"model\.pt cannot be opened") as told:
        load(folder)
    assert str(tmp_path) not in told.value.message


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = save_class(tmp_path, SOURCE)
    with pytest.raises(ConfigError, match=r"no file net\.pt"):
        load(folder, torch={"file": "net.pt"})
    with pytest.raises(ConfigError, match=r"torch\.weights: the version's folder has no file w\.pt"):
        load(folder, torch={"weights": "w.pt"})
    (folder / "model.py").unlink()
    with pytest.raises(ConfigError, match=r"no file model\.pt2 or model\.pt or model\.py"):
        load(folder)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class Other: pass", "model.py has no class 'Model'"),
        ("class Model: pass", "class 'Model' must be an nn.Module, or its load() return one, not Model"),
        ("class Model:\n    def load(self): return 3", "or its load() return one, not int"),
    ],
)
def test_classes_that_are_no_module(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(save_class(tmp_path, source))


def test_weights_beside_the_class(tmp_path: Path) -> None:
    folder = save_class(tmp_path, SOURCE)
    torch.save(net(seed=9).state_dict(), folder / "model.pt")
    backend = load(folder, torch={"weights": "model.pt"})
    np.testing.assert_allclose(backend.run({"x": ROWS})["y"], expected(net(9), ROWS), rtol=1e-5, atol=1e-6)
    torch.save({"layers.0.weight": torch.zeros(2)}, folder / "model.pt")
    with pytest.raises(
        ConfigError, match=r"torch\.weights: model\.pt does not fit the model of model\.py: .*Missing"
    ):
        load(folder, torch={"weights": "model.pt"})
    torch.save(Evil(), folder / "model.pt")
    with pytest.raises(ConfigError, match="does not fit"):
        load(folder, torch={"weights": "model.pt"})


# --- what a model may return -------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x):
        return {
            "float64": lambda: x[:, :3].double(),
            "int": lambda: x[:, :3].int(),
            "rows": lambda: x[:2, :3],
            "row shape": lambda: x[:, :2],
            "several": lambda: (x[:, :3], x),
            "other": lambda: {"z": x},
            "number": lambda: 3,
            "sparse": lambda: x[:, :3].to_sparse(),
            "strided": lambda: x.t()[:3].t(),
        }[self.what]()


def returning(tmp_path: Path, what: str, **changes: Any) -> Any:
    source = """
        from tests.backends.frameworks.test_torch import Returns
        class Model(Returns):
            def __init__(self):
                super().__init__(%r)
    """
    return load(save_class(tmp_path, source % what), **changes)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("int", "output 'y' is int32, declared is float32"),
        ("rows", "output 'y' has shape [2, 3], but the batch has 5 rows"),
        ("row shape", "output 'y' has rows of shape [2], declared is [3]"),
        ("several", "the model returned 2 outputs, 1 are declared (y)"),
        ("other", "the model returned no output 'y', but z"),
        ("number", "output 'y' must be a tensor, not int"),
        ("sparse", "output 'y' is sparse or quantized"),
    ],
)
def test_wrong_outputs_are_named(tmp_path: Path, what: str, words: str) -> None:
    with pytest.raises(ServeError, match=re.escape(words)) as told:
        returning(tmp_path, what).run({"x": ROWS})
    assert told.value.kind is Kind.INTERNAL


@pytest.mark.parametrize("what", ["float64", "strided"])
def test_what_is_turned_into_what_was_declared(tmp_path: Path, what: str) -> None:
    y = returning(tmp_path, what).run({"x": ROWS})["y"]
    assert (y.dtype, y.flags.c_contiguous) == (np.float32, True)
    np.testing.assert_array_equal(y, ROWS[:, :3])


def test_a_model_that_writes_into_its_inputs_gets_copies(tmp_path: Path) -> None:
    source = """
        from torch import nn
        class Model(nn.Module):
            def forward(self, x):
                return x.mul_(2)[:, :3]
    """
    backend = load(save_class(tmp_path, source))
    backend.run({"x": ROWS.copy()})  # the warm-up, say
    sent = ROWS.copy()
    sent.flags.writeable = False
    np.testing.assert_array_equal(backend.run({"x": sent})["y"], 2 * ROWS[:, :3])
    np.testing.assert_array_equal(sent, ROWS)


# --- types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{o: t} for o in ("dtype", "autocast") for t in ("bfloat16", "float16")])
@pytest.mark.parametrize("form", ["script", "class"])
def test_lower_precision_is_turned_back(tmp_path: Path, form: str, options: dict[str, str]) -> None:
    backend = load(FORMS[form](tmp_path), torch=options)
    y = backend.run({"x": ROWS})["y"]
    assert y.dtype == np.float32
    exact = expected(net(), ROWS)
    assert not np.array_equal(y, exact)
    np.testing.assert_allclose(y, exact, atol=0.03)


def test_bfloat16_and_small_types_travel(tmp_path: Path) -> None:
    source = """
        from torch import nn
        class Model(nn.Module):
            def forward(self, a, b, c):
                return a * 2, ~b, c + 1
    """
    tensors = {"a": "bfloat16", "b": "bool", "c": "int8"}
    sides = {name: {"dtype": dtype, "shape": [2]} for name, dtype in tensors.items()}
    backend = load(
        save_class(tmp_path, source),
        inputs=sides,
        outputs={f"OUT__{i}": t for i, t in enumerate(sides.values())},
    )
    bits = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16).view(torch.uint16).numpy()
    got = backend.run({"a": bits, "b": np.array([[True, False]]), "c": np.array([[5, -6]], np.int8)})
    back = torch.from_numpy(got["OUT__0"]).view(torch.bfloat16)
    assert back.tolist() == [[3.0, -4.0]]
    assert got["OUT__1"].tolist() == [[False, True]]
    assert got["OUT__2"].tolist() == [[6, -5]]


def test_strings_are_lists(tmp_path: Path) -> None:
    class Texts(nn.Module):
        def forward(self, s: list[str]) -> list[str]:
            return [one + "!" for one in s]

    text = {"dtype": "bytes", "shape": []}
    backend = load(save_script(tmp_path, Texts()), inputs={"s": text}, outputs={"t": text})
    assert backend.run({"s": np.array([b"a", "é".encode()], object)})["t"].tolist() == ["a!", "é!"]
    with pytest.raises(ServeError, match="input 's' holds a string that is not UTF-8"):
        backend.run({"s": np.array([b"\xff"], object)})


def test_outputs_that_the_next_run_would_overwrite_are_copied() -> None:
    static = torch.zeros(2)

    def call(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": static.copy_(tensors["x"])}

    first, second = (own_outputs(call)({"x": torch.full((2,), value)})["y"] for value in (1.0, 2.0))
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


# --- compiled ------------------------------------------------------------------------------------------

SIZES = """
from torch import nn
class Model(nn.Module):
    seen = []
    def forward(self, x):
        return x[:, :3] + 1
"""


def test_every_size_is_compiled_before_the_first_request(tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = {"compile": "default", "compile_backend": "eager"}
    backend = load(save_class(tmp_path, SIZES), allowed_batch_sizes=[2, 4, 8], torch=options)
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in (2, 4, 8):
            rows = np.ones((size, 4), np.float32)
            np.testing.assert_array_equal(backend.run({"x": rows})["y"], rows[:, :3] + 1)


@pytest.mark.torture  # 14 s of a core: inductor's imports, and g++ over its headers
@pytest.mark.skipif(
    not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")),
    reason="no C++ compiler for inductor",
)
def test_inductor_compiles_before_the_first_request(tmp_path: Path) -> None:
    """torch.compile as users have it: C++ that is compiled when the version is loaded, and not again. In a
    process of its own, as a worker is: inductor leaves files, threads and hooks in one."""
    code = f"""
import sys, numpy as np, torch
from pathlib import Path
from tests.backends.frameworks.test_torch import SIZES, load
from tests.backends.frameworks.torch_models import save_class
folder = save_class(Path({str(tmp_path)!r}), SIZES)
backend = load(folder, allowed_batch_sizes=[8], torch={{"compile": "default"}})
with torch.compiler.set_stance("fail_on_recompile"):
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_array_equal(backend.run({{"x": rows}})["y"], rows[:, :3] + 1)
"""
    cache = tmp_path / "cache"
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=own, timeout=300)
    assert list(cache.rglob("*.so")), "nothing was compiled"


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        (
            "script",
            {"torch": {"compile": "default"}},
            "torch.compile: a TorchScript program is compiled already",
        ),
        ("class", {"torch": {"compile": "default"}}, "torch.compile: allowed_batch_sizes must say the sizes"),
        ("program", {"torch": {"dtype": "bfloat16"}}, "torch.dtype: a torch.export program has its types"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, form: str, changes: Any, words: str) -> None:
    outputs = {"OUTPUT__0": Y["y"]} if form == "program" else Y
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(FORMS[form](tmp_path), outputs=outputs, **changes)


def test_cuda_graphs_are_nothing_on_a_cpu(tmp_path: Path) -> None:
    backend = load(FORMS["class"](tmp_path), torch={"cuda_graphs": True})
    assert backend.run({"x": ROWS})["y"].shape == (5, 3)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_says_why(tmp_path: Path, device: str) -> None:
    config = {**config_json(parse_model_config(CONFIG)), "device": device}
    with pytest.raises(
        ConfigError, match=r"device 'cuda:0': this PyTorch .* (was built without CUDA|sees no GPU)"
    ):
        create(config, FORMS["script"](tmp_path), 0).load()


def test_fields_of_another_backend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch: given .*, allowed: nothing with backend onnx"):
        parse_model_config({"backend": "onnx", "torch": {}})
    with pytest.raises(ConfigError, match=r"torch\.compile"):
        parse_model_config({**CONFIG, "torch": {"compile": "fast"}})


def test_dict_inputs_of_scripts_and_programs(tmp_path: Path) -> None:
    class Joined(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]):
            return {"sum": batch["a"] + batch["b"]}

    sides = {"a": FLOAT, "b": FLOAT}
    example = {"a": torch.zeros(2, 4), "b": torch.zeros(2, 4)}
    for folder in (save_script(tmp_path / "s", Joined()), save_program(tmp_path / "p", Joined(), example)):
        backend = load(folder, inputs=sides, outputs={"sum": FLOAT})
        np.testing.assert_array_equal(backend.run({"a": ROWS, "b": ROWS})["sum"], ROWS + ROWS)


# --- Triton's configs ------------------------------------------------------------------------------------

TRITON = """
platform: "pytorch_libtorch" max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
"""


def test_a_triton_config(tmp_path: Path) -> None:
    backend = load_triton(save_script(tmp_path, net()), TRITON)
    got = backend.run({"INPUT__0": ROWS})["OUTPUT__0"]
    np.testing.assert_allclose(got, expected(net(), ROWS), rtol=1e-5, atol=1e-6)


def test_a_triton_config_with_reshape_threads_and_another_file(tmp_path: Path) -> None:
    text = """
        backend: "pytorch" max_batch_size: 8 default_model_filename: "net.pt"
        input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3, 1 ] reshape { shape: [ 3 ] } }
        parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "2" } }
        parameters { key: "INFERENCE_MODE" value { string_value: "false" } }
    """
    before = torch.get_num_threads()
    try:
        backend = load_triton(save_script(tmp_path, net(), file="net.pt"), text)
        got = backend.run({"INPUT__0": ROWS.reshape(5, 2, 2)})["OUTPUT__0"]
        np.testing.assert_allclose(got[..., 0], expected(net(), ROWS), rtol=1e-5, atol=1e-6)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_ragged_requests_are_joined(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            total = torch.cumsum(x, 0)[ends.long() - 1]
            return torch.diff(total, prepend=torch.zeros(1)).unsqueeze(1)

    text = """
        backend: "pytorch" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends"
            data_type: TYPE_INT32 source_input: "x" }
    """
    backend = load_triton(save_script(tmp_path, Sums()), text)
    parts = backend.run_requests([{"x": np.ones((1, 2), np.float32)}, {"x": np.full((1, 3), 2, np.float32)}])
    assert [part["y"].tolist() for part in parts] == [[[2.0]], [[6.0]]]


def test_torch_is_imported_by_load_alone() -> None:
    code = (
        "import sys, fastserve.server; from fastserve.backends.frameworks import torch, torch_program; "
        "from fastserve.backends import create; from pathlib import Path; "
        "create({'backend': 'torch'}, Path('.'), 0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
