"""The file of a PyTorch model: what kind it is, told before it is opened, and the model it holds.

    model.pt2    a program of torch.export, which tells its tensors
    model.pt     a TorchScript program
    model.py     a class that is an nn.Module, or whose load() returns one

Never opened: a pickle (torch.save of a module or of weights). It may run any code, and holds no forward.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastserve.backends.base import clean
from fastserve.backends.python import describe_model, import_class
from fastserve.backends.torch_names import Forward, read_schema, read_signature
from fastserve.backends.torch_tensors import dtype_name
from fastserve.config.torch_options import TorchOptions
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.tensor import DTYPES, TensorSpec

FILES = ("model.pt2", "model.pt", "model.py")
_CONVERT = (
    "save the program where its code is: torch.export.save(torch.export.export(model.eval(), (x,), "
    "dynamic_shapes=({{0: torch.export.Dim('rows')}},)), 'model.pt2'), or "
    "torch.jit.script(model).save('model.pt')"
)
_PICKLE = (
    "{file} is a pickle, weights or a module without its forward, and is not opened, since a pickle may run "
    "any code: "
    + _CONVERT
    + "; or put the class into model.py and name the weights: torch: {{file: model.py, weights: {file}}}"
)
_OTHER = "{file} is no PyTorch program: " + _CONVERT
_PACKAGED = (
    "{file} is compiled by AOTInductor for one machine, which is not served: keep the torch.export program "
    "it was made of, as model.pt2"
)
_HEAD = 64  # bytes looked at of what is no zip archive


@dataclass(slots=True)
class Opened:
    """A model in memory. `inputs` and `outputs` are whole shapes, where the file tells them."""

    model: Any
    forward: Forward
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)
    kind: str = "module"


def find_file(version_dir: Path, options: TorchOptions, said: str) -> Path:
    """The model's file; `said` is what a config.pbtxt calls it. Raises ConfigError."""
    named = options.file or said or ("model.py" if options.weights else "")
    files = (named,) if named else FILES
    found = next((version_dir / name for name in files if (version_dir / name).is_file()), None)
    if found is None:
        raise ConfigError(f"the version's folder has no file {' or '.join(files)}")
    return found


def open_model(
    path: Path, device: Any, options: TorchOptions, config: Mapping[str, Any], instance: int
) -> Opened:
    """The model on its device, ready to run. Raises ConfigError for what is no program, and what opening it
    raises as ServeError."""
    kind = "module" if path.suffix == ".py" else kind_of_file(path)
    try:
        with warnings.catch_warnings():  # torch.jit is served for as long as it opens
            warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)
            warnings.filterwarnings("ignore", ".*torch.jit.*", FutureWarning)
            if kind == "module":
                return _open_class(path, device, options, config, instance)
            return _open_script(path, device) if kind == "script" else _open_export(path, device)
    except (ConfigError, ServeError):
        raise
    except Exception as error:
        if kind == "module":
            raise  # the user's own code: its traceback says more
        words = clean(f"{path.name} cannot be opened: {error}", str(path.parent))
        raise ServeError(Kind.FAILED_PRECONDITION, words) from error


def kind_of_file(path: Path) -> str:
    """ "script" or "export", by what the archive holds. Raises ConfigError for everything else, in words that
    say what to do."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as stream:
            pickled = stream.read(_HEAD)[:1] == b"\x80"
        text = _PICKLE if pickled else _OTHER
        raise ConfigError(text.format(file=path.name))
    with zipfile.ZipFile(path) as archive:
        inner = {name.partition("/")[2] for name in archive.namelist()}
    if any(name.startswith("data/aotinductor/") for name in inner):
        raise ConfigError(_PACKAGED.format(file=path.name))
    if "archive_format" in inner or any(name.startswith("models/") for name in inner):
        return "export"
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return "script"
    if "data.pkl" in inner:
        raise ConfigError(_PICKLE.format(file=path.name))
    raise ConfigError(_OTHER.format(file=path.name))


def _open_script(path: Path, device: Any) -> Opened:
    import torch

    model = torch.jit.load(str(path), map_location=device).eval()
    return Opened(model, read_schema(model.forward.schema), kind="script")


def _open_export(path: Path, device: Any) -> Opened:
    import torch

    program = torch.export.load(str(path))
    inputs, outputs = _told_tensors(program)
    if str(device) != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    return Opened(program.module(), _forward_of(program), inputs, outputs, kind="export")


def _forward_of(program: Any) -> Forward:
    """Nested arguments are not served, but for one dict of tensors."""
    args, kwargs = _children(program.call_spec.in_spec)
    positional, named = _children(args), list(kwargs.context or ())
    if len(positional) == 1 and not named and positional[0].type is dict:
        return Forward(tuple(positional[0].context), takes_dict=True)
    names = list(program.graph_signature.user_inputs)
    if len(names) != len(positional) + len(named) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "the program takes tensors inside of lists or dicts; export it with one for each input"
        )
    given = (*names[: len(positional)], *named)
    return Forward(given, frozenset(given), frozenset(named))


def _children(spec: Any) -> list[Any]:
    found = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    return list(found)


def _told_tensors(program: Any) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Names, dtypes and whole shapes of what the program takes and gives."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    forward = _forward_of(program)
    inputs = [
        _told(name, values.get(node)) for name, node in zip(forward.names, signature.user_inputs, strict=True)
    ]
    results = [values.get(str(node)) for node in signature.user_outputs]
    names = _result_names(program.call_spec.out_spec, len(results))
    outputs = [_told(name, value) for name, value in zip(names, results, strict=True)]
    return [one for one in inputs if one], [one for one in outputs if one]


def _result_names(spec: Any, count: int) -> list[str]:
    if spec.type is dict and len(spec.context) == count:
        return [str(name) for name in spec.context]
    return [f"OUTPUT__{number}" for number in range(count)]


def _told(name: str, value: Any) -> TensorSpec | None:
    """None for what is no tensor: a constant, an int."""
    dtype = DTYPES.get(dtype_name(getattr(value, "dtype", "")))
    if dtype is None:
        return None
    return TensorSpec(name, dtype, tuple(size if isinstance(size, int) else -1 for size in value.shape))


def _open_class(
    path: Path, device: Any, options: TorchOptions, config: Mapping[str, Any], instance: int
) -> Opened:
    import torch

    wanted = str(config.get("class") or "Model")
    factory = import_class(path.parent, wanted, path.name)
    made = _make(factory, describe_model(config, path.parent, instance))
    if not isinstance(made, torch.nn.Module):
        made = made.load() if callable(getattr(made, "load", None)) else made
    if not isinstance(made, torch.nn.Module):
        text = f"class {wanted!r} must be an nn.Module, or its load() return one, not {type(made).__name__}"
        raise ConfigError(text)
    if options.weights:
        _load_weights(made, path.parent, options.weights)
    return Opened(made.to(device).eval(), read_signature(made.forward))


def _make(factory: Any, config: Mapping[str, Any]) -> Any:
    """With the model's config, where its constructor takes one argument."""
    try:
        takes_one = bool(read_signature(factory).names)
    except ValueError:
        takes_one = False
    return factory(config) if takes_one else factory()


def _load_weights(module: Any, folder: Path, name: str) -> None:
    """Tensors only: nothing in the file is run. Raises ConfigError."""
    import torch

    path = folder / name
    if not path.is_file() or path.resolve().parent != folder.resolve():
        raise ConfigError(f"torch.weights: the version's folder has no file {name}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(str(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(state)
    except Exception as error:
        words = clean(f"torch.weights: {name} does not fit the model of model.py: {error}", str(folder))
        raise ConfigError(words) from error
