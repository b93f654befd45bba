"""The program file of a PyTorch model, and the mapping of the config's tensors to arguments of its `forward`.

    model.pt2    a program of torch.export, which tells its tensors
    model.pt     a TorchScript program
    model.py     a class that is an nn.Module, or whose load() returns one

A pickle (torch.save of a module or of weights) is never opened: it may run any code, and holds no forward.

The mapping is that of Triton's pytorch backend (triton-inference-server/pytorch_backend, libtorch.cc):

    forward(self, batch: Dict[str, Tensor])     every input is an entry, by its name
    input names are forward's argument names    each goes where its name is
    NAME__0, NAME__1, ...                       each goes to the position its name ends with
    any other names                             in the order they are declared

Outputs: entries of a dict by name; else positions as their names end; else the order they are declared.
"""

from __future__ import annotations

import inspect
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastserve.backends.batch_io import output_fault
from fastserve.backends.frameworks.python import describe_model, import_class
from fastserve.backends.frameworks.torch_tensors import Tensors, dtype_name
from fastserve.backends.model_errors import clean
from fastserve.errors import ConfigError, Kind, ServeError
from fastserve.settings.model_options import TorchOptions
from fastserve.tensor import DTYPES, TensorSpec

_INDEXED = re.compile(r".*?__(\d+)")


@dataclass(frozen=True, slots=True)
class ForwardParameters:
    """The parameters of a model's `forward`.

    `names` are in order; those of `required` have no default, those of `keywords` are keyword-only. `open`:
    it has *args or **kwargs.
    """

    names: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    keywords: frozenset[str] = field(default_factory=frozenset)
    takes_dict: bool = False
    open: bool = False


def read_signature(forward: Any) -> ForwardParameters:
    """Read the parameters of a Python function."""
    names, required, keywords, several = [], set(), set(), False
    for name, one in inspect.signature(forward).parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            several = True
            continue
        names.append(name)
        if one.default is one.empty:
            required.add(name)
        if one.kind is one.KEYWORD_ONLY:
            keywords.add(name)
    sole = list(inspect.signature(forward).parameters.values())[:1]
    takes_dict = len(names) == 1 and not several and _is_dict(sole[0].annotation)
    return ForwardParameters(tuple(names), frozenset(required), frozenset(keywords), takes_dict, several)


def _is_dict(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return bool(re.match(r"(typing\.)?(dict|Dict|Mapping)\b", text))


def read_schema(schema: Any) -> ForwardParameters:
    """Read the parameters of a TorchScript method, whose first argument is the module."""
    arguments = schema.arguments[1:]
    return ForwardParameters(
        tuple(one.name for one in arguments),
        frozenset(one.name for one in arguments if not one.has_default_value()),
        takes_dict=len(arguments) == 1 and str(arguments[0].type).startswith("Dict"),
    )


class InputPlan:
    """Maps tensors by name to the arguments of a model; made once."""

    def __init__(self, names: Sequence[str], forward: ForwardParameters) -> None:
        """Plan the mapping. Raises ConfigError when inputs and arguments do not fit."""
        self._dict = forward.takes_dict
        self._order: list[str] = []
        self._named: dict[str, str] = {}
        if not self._dict:
            places = _places(list(names), forward)
            self._order = [name for name, place in places if isinstance(place, int)]
            self._named = {place: name for name, place in places if isinstance(place, str)}

    def call(self, model: Any, tensors: Tensors) -> Any:
        """Call the model and return what `forward` returns."""
        if self._dict:
            return model(dict(tensors))
        named = {argument: tensors[name] for argument, name in self._named.items() if name in tensors}
        return model(*[tensors[name] for name in self._order], **named)


def _places(names: list[str], forward: ForwardParameters) -> list[tuple[str, int | str]]:
    """Return each input with its position, in that order, or with the name of its argument."""
    if all(name in forward.names for name in names):
        missing = forward.required.difference(names)
        if missing:
            raise ConfigError(f"forward needs arguments that are not declared as inputs: {_listed(missing)}")
        return _by_argument(names, forward)
    indexes = indexed_positions(names)
    places = list(range(len(names))) if indexes is None else indexes
    if sorted(places) != list(range(len(names))):
        raise ConfigError(
            f"inputs {_listed(names)}: the positions they end with must be 0 to {len(names) - 1}"
        )
    by_position = sorted(zip(places, names, strict=True))
    room = [name for name in forward.names if name not in forward.keywords]
    fewest = len(forward.required - forward.keywords)
    if not forward.open and not fewest <= len(names) <= len(room):
        wanted = f"{fewest} to {len(room)}" if fewest < len(room) else str(fewest)
        text = f"{len(names)} inputs are declared ({_listed(names)})"
        raise ConfigError(f"{text}, forward takes {wanted}: {_listed(forward.names) or 'nothing'}")
    return [(name, place) for place, name in by_position]


def _by_argument(names: list[str], forward: ForwardParameters) -> list[tuple[str, int | str]]:
    """Return positions as long as none is left out, then keywords."""
    found: list[tuple[str, int | str]] = []
    gap = False
    for place, argument in enumerate(forward.names):
        gap = gap or argument in forward.keywords or argument not in names
        if argument in names:
            found.append((argument, argument if gap else place))
    return found


def indexed_positions(names: Sequence[str]) -> list[int] | None:
    """Return the positions that all names end with (NAME__0); None when one name has none."""
    found = [_INDEXED.fullmatch(name) for name in names]
    return [int(one[1]) for one in found if one] if names and all(found) else None


class OutputPlan:
    """Maps what a model returned to the declared names; made once."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._positions = indexed_positions(names)

    def read(self, result: Any) -> dict[str, Any]:
        """Return the outputs by name. Raises ServeError INTERNAL naming what is missing."""
        if isinstance(result, Mapping):
            return self._of_mapping(result)
        values = list(result) if isinstance(result, list | tuple) and not _strings(result) else [result]
        if self._positions is None and len(values) != len(self._names):
            told = f"{len(self._names)} are declared ({_listed(self._names)})"
            raise output_fault(f"the model returned {len(values)} outputs, {told}")
        found = {}
        for place, name in enumerate(self._names):
            at = place if self._positions is None else self._positions[place]
            if at >= len(values):
                raise output_fault(f"the model returned {len(values)} outputs, there is none for {name!r}")
            found[name] = values[at]
        return found

    def _of_mapping(self, result: Mapping[Any, Any]) -> dict[str, Any]:
        missing = [name for name in self._names if name not in result]
        if missing and self._positions is not None and max(self._positions) < len(result):
            values = list(result.values())
            return {name: values[at] for name, at in zip(self._names, self._positions, strict=True)}
        if missing:
            raise output_fault(
                f"the model returned no output {missing[0]!r}, but {_listed(map(str, result))}"
            )
        return {name: result[name] for name in self._names}


def _strings(result: Any) -> bool:
    return bool(result) and isinstance(result, list) and all(isinstance(item, str) for item in result)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names) if isinstance(names, set | frozenset) else names)


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
class OpenedProgram:
    """A model in memory. `inputs` and `outputs` are whole shapes, where the file declares them."""

    model: Any
    forward: ForwardParameters
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)
    kind: str = "module"


def find_file(version_dir: Path, options: TorchOptions, said: str) -> Path:
    """Return the model's file; `said` is the name in a config.pbtxt. Raises ConfigError."""
    named = options.file or said or ("model.py" if options.weights else "")
    files = (named,) if named else FILES
    found = next((version_dir / name for name in files if (version_dir / name).is_file()), None)
    if found is None:
        raise ConfigError(f"the version's folder has no file {' or '.join(files)}")
    return found


def open_model(
    path: Path, device: Any, options: TorchOptions, config: Mapping[str, Any], instance: int
) -> OpenedProgram:
    """Return the model on its device, ready to run. Raises ConfigError for a file that is no program, and
    ServeError for what opening it raises."""
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
    """Return "script" or "export", by what the archive holds. Raises ConfigError for every other file, with
    what to do."""
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


def _open_script(path: Path, device: Any) -> OpenedProgram:
    import torch

    model = torch.jit.load(str(path), map_location=device).eval()
    return OpenedProgram(model, read_schema(model.forward.schema), kind="script")


def _open_export(path: Path, device: Any) -> OpenedProgram:
    import torch

    program = torch.export.load(str(path))
    inputs, outputs = _program_tensors(program)
    if str(device) != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    return OpenedProgram(program.module(), _forward_of(program), inputs, outputs, kind="export")


def _forward_of(program: Any) -> ForwardParameters:
    """Read the parameters of an exported program. Nested arguments are not served, but for one dict of
    tensors."""
    args, kwargs = _children(program.call_spec.in_spec)
    positional, named = _children(args), list(kwargs.context or ())
    if len(positional) == 1 and not named and positional[0].type is dict:
        return ForwardParameters(tuple(positional[0].context), takes_dict=True)
    names = list(program.graph_signature.user_inputs)
    if len(names) != len(positional) + len(named) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "the program takes tensors inside of lists or dicts; export it with one for each input"
        )
    given = (*names[: len(positional)], *named)
    return ForwardParameters(given, frozenset(given), frozenset(named))


def _children(spec: Any) -> list[Any]:
    found = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    return list(found)


def _program_tensors(program: Any) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return names, dtypes and whole shapes of the program's inputs and outputs."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    forward = _forward_of(program)
    inputs = [
        _tensor_spec(name, values.get(node))
        for name, node in zip(forward.names, signature.user_inputs, strict=True)
    ]
    results = [values.get(str(node)) for node in signature.user_outputs]
    names = _result_names(program.call_spec.out_spec, len(results))
    outputs = [_tensor_spec(name, value) for name, value in zip(names, results, strict=True)]
    return [one for one in inputs if one], [one for one in outputs if one]


def _result_names(spec: Any, count: int) -> list[str]:
    if spec.type is dict and len(spec.context) == count:
        return [str(name) for name in spec.context]
    return [f"OUTPUT__{number}" for number in range(count)]


def _tensor_spec(name: str, value: Any) -> TensorSpec | None:
    """Return the spec of a tensor, None for a constant or an int."""
    dtype = DTYPES.get(dtype_name(getattr(value, "dtype", "")))
    if dtype is None:
        return None
    return TensorSpec(name, dtype, tuple(size if isinstance(size, int) else -1 for size in value.shape))


def _open_class(
    path: Path, device: Any, options: TorchOptions, config: Mapping[str, Any], instance: int
) -> OpenedProgram:
    import torch

    wanted = str(config.get("class") or "Model")
    factory = import_class(path.parent, wanted, path.name)
    made = _construct(factory, describe_model(config, path.parent, instance))
    if not isinstance(made, torch.nn.Module):
        made = made.load() if callable(getattr(made, "load", None)) else made
    if not isinstance(made, torch.nn.Module):
        text = f"class {wanted!r} must be an nn.Module, or its load() return one, not {type(made).__name__}"
        raise ConfigError(text)
    if options.weights:
        _load_weights(made, path.parent, options.weights)
    return OpenedProgram(made.to(device).eval(), read_signature(made.forward))


def _construct(factory: Any, config: Mapping[str, Any]) -> Any:
    """Construct the class, with the model's config where its constructor takes one argument."""
    try:
        takes_one = bool(read_signature(factory).names)
    except ValueError:
        takes_one = False
    return factory(config) if takes_one else factory()


def _load_weights(module: Any, folder: Path, name: str) -> None:
    """Load weights into the module. Only tensors are read: nothing in the file is run. Raises ConfigError."""
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
