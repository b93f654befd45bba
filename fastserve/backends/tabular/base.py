"""The common part of the backends for models of rows, whose files tell their tensors.

    one matrix        input [rows, columns]        for columns of numbers: the default
    by column         age [rows], city [rows]      where a column holds text, where model.yaml declares an
                                                   input for each column, or with parameters: {columns: true};
                                                   {columns: [...]} names columns that have no names

A library's file has its columns and several outputs. `parameters: {outputs: [...]}`, or the outputs that
model.yaml declares, choose among them; what nobody has chosen is not computed. `output_names` gives them
other names, and with `column_outputs` an output of one value a row has the shape [rows, 1]. The model is run
once, over one row, to learn the dtypes and shapes of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastserve.backends.base import read_specs
from fastserve.backends.model_errors import clean
from fastserve.errors import ConfigError, Kind, ServeError, install_text
from fastserve.settings.model_options import read_options
from fastserve.tensor import DTYPES, TensorSpec

if TYPE_CHECKING:
    from fastserve.backends.base import Arrays

INPUT, PREDICTIONS = "input", "predictions"
LABELS, PROBABILITIES, SCORES = "labels", "probabilities", "scores"
LEAVES, CONTRIBUTIONS = "leaves", "contributions"
_KINDS = {"f": "float64", "i": "int64", "u": "int64", "b": "bool", "U": "bytes", "O": "bytes", "S": "bytes"}
_REFUSALS = ValueError, TypeError
"""Errors of these libraries for rows that they do not take."""


Join = Callable[[Sequence[Any]], Any]
"""Makes rows of an array for each column."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a model's rows."""

    name: str
    is_text: bool = False
    example: Any = 0.0
    """A value that the model takes."""
    missing: Any = ""
    """The value that an empty text stands for."""


@dataclass(frozen=True, slots=True)
class Derivation:
    """How an output follows from another one, which the model also gives: it is not run twice."""

    source: str
    derive: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model as its library has opened it."""

    columns: tuple[Column, ...]
    outputs: Mapping[str, Callable[[Any], Any]]
    """Outputs by name: from rows to an array with as many."""
    chosen: tuple[str, ...] = (PREDICTIONS,)
    """The outputs that it has where nobody has chosen."""
    join: Join | None = None
    """None: columns of numbers become one matrix."""
    by_column: bool = False
    """Its rows cannot be one matrix of numbers."""
    derived: Mapping[str, Derivation] = field(default_factory=dict)
    """Outputs that follow from another one to the last bit."""

    def renamed(self, names: Mapping[str, str]) -> OpenedModel:
        """Return the model with other names of its outputs."""

        def title(name: str) -> str:
            return names.get(name, name)

        return replace(
            self,
            outputs={title(name): compute for name, compute in self.outputs.items()},
            chosen=tuple(map(title, self.chosen)),
            derived={
                title(name): replace(one, source=title(one.source)) for name, one in self.derived.items()
            },
        )


class TabularBackend:
    """Runs a model of rows; a subclass opens the files of one library."""

    files: tuple[str, ...] = ()
    input_name = INPUT
    """The name of the one matrix, where the config gives none."""
    dtype = "float64"
    """The dtype of numbers in its rows."""

    def __init__(self, config: Mapping[str, Any], version_dir: Path, instance: int) -> None:
        self.inputs = read_specs(config.get("inputs"))
        self.outputs = read_specs(config.get("outputs"))
        self.parameters: Mapping[str, Any] = config.get("parameters") or {}
        self.threads = int(config.get("threads", 1))
        """Threads of one call; 0: as many as the library likes."""
        self.class_labels: Sequence[str] = config.get("class_labels") or ()
        self._config, self._folder = config, version_dir
        named = read_options(config).model_file
        self._names = (named,) if named else self.files
        self._model: OpenedModel | None = None
        self._join: Join | None = None

    def load(self) -> None:
        """Open the model's file, and run it once. Raises ConfigError, ServeError."""
        if not int(self._config.get("max_batch_size", 0)):
            raise ConfigError("max_batch_size: given 0, allowed: from 1 for a model of rows")
        file = next((self._folder / name for name in self._names if (self._folder / name).is_file()), None)
        if file is None:
            raise ConfigError(f"the version's folder has no file {' or '.join(self._names)}")
        try:
            self._model = self.open(file)
        except (ConfigError, ImportError):
            raise
        except Exception as error:
            words = clean(f"{file.name} cannot be opened: {error}", str(self._folder))
            raise ServeError(Kind.FAILED_PRECONDITION, f"{words}{self.version_text(file)}") from error
        self._model = replace(self._model, columns=self._name_columns(self._model.columns))
        self._model = self._model.renamed(self._find_names(self._model))
        self.inputs = self._find_inputs(self._model)
        self.outputs = self._find_outputs(self._model)

    def open(self, file: Path) -> OpenedModel:
        """Return the opened model. Raises ConfigError, and what the library raises."""
        raise NotImplementedError

    def version_text(self, file: Path) -> str:
        """Return a sentence about the version that wrote a file that cannot be opened; "" for none."""
        return ""

    def run(self, inputs: Arrays) -> Arrays:
        """Run one batch; see Backend.run. Raises ServeError INVALID_ARGUMENT for rows that the library
        refuses."""
        assert self._model is not None
        rows = self._rows(inputs)
        try:
            found = _compute(self._model, rows, self.outputs)
        except _REFUSALS as error:
            raise ServeError(Kind.INVALID_ARGUMENT, f"the model refuses these rows: {error}") from error
        return {name: _as_declared(found[name], spec) for name, spec in self.outputs.items()}

    def close(self) -> None:
        """Let go of the model."""
        self._model = self._join = None

    @property
    def wants_columns(self) -> bool:
        """Whether the config asks for one input for each column."""
        return len(self.inputs) > 1 or bool(self.parameters.get("columns"))

    def find_labels(self, count: int) -> Any:
        """Return the labels of `count` classes: the texts of class_labels, else their numbers. Raises
        ConfigError for another number of texts."""
        if not self.class_labels:
            return np.arange(count)
        if len(self.class_labels) != count:
            raise ConfigError(f"class_labels: given {len(self.class_labels)}, allowed: {count}")
        return np.array(self.class_labels, object)

    # ---- inputs

    def _rows(self, inputs: Arrays) -> Any:
        if self._join is None:
            (rows,) = inputs.values()
            return rows
        assert self._model is not None
        return self._join(
            [
                _read_text(column, inputs[column.name]) if column.is_text else inputs[column.name].reshape(-1)
                for column in self._model.columns
            ]
        )

    def _name_columns(self, columns: tuple[Column, ...]) -> tuple[Column, ...]:
        """Return the columns by the names that the config gives them, in the model's order. Raises
        ConfigError."""
        names = self.parameters.get("columns")
        if not isinstance(names, list) or {column.name for column in columns} == set(names):
            return columns
        if len(set(names)) != len(columns) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"parameters.columns: given {len(names)} names, allowed: a name of its own for each of the "
                f"model's {len(columns)} columns"
            )
        return tuple(replace(one, name=name) for one, name in zip(columns, names, strict=True))

    def _find_inputs(self, model: OpenedModel) -> dict[str, TensorSpec]:
        declared, width = self.inputs, len(model.columns)
        if not (model.by_column or self.wants_columns):
            name = next(iter(declared), self.input_name)
            names = tuple(column.name for column in model.columns)
            known = () if names == number_names(width) else names
            found = {name: TensorSpec(name, DTYPES[self.dtype], (width,), known)}
            declared = {name: replace(spec, columns=known) for name, spec in declared.items()}
            return _agreed("inputs", declared, found)
        self._join = model.join or self._stack
        found = {
            column.name: TensorSpec(column.name, DTYPES["bytes" if column.is_text else self.dtype], ())
            for column in model.columns
        }
        if not declared:
            return found
        for name in (*declared, *found):
            if name not in found or name not in declared:
                columns = ", ".join(found)
                raise ConfigError(
                    f"inputs: given {', '.join(declared)}, allowed: the model's columns {columns}"
                )
        for name, spec in declared.items():
            is_text = found[name].dtype.name == "bytes"
            if spec.shape not in ((), (1,)) or (spec.dtype.name == "bytes") != is_text:
                kind = "bytes" if is_text else "numbers"
                raise ConfigError(
                    f"inputs.{name}: given {_describe(spec)}, allowed: {kind} of shape [] or [1]"
                )
        return {name: declared[name] for name in found}

    def _stack(self, columns: Sequence[Any]) -> Any:
        return np.column_stack(columns).astype(self.dtype, copy=False)

    # ---- outputs

    def _find_outputs(self, model: OpenedModel) -> dict[str, TensorSpec]:
        wanted = self._choose(model)
        by_column = self._join is not None
        rows = {
            name: _first_row(spec, model.columns, by_column=by_column) for name, spec in self.inputs.items()
        }
        try:
            joined = self._rows(rows)
            found = {name: self._as_rows(array) for name, array in _compute(model, joined, wanted).items()}
        except ConfigError:
            raise
        except Exception as error:
            raise ServeError(Kind.FAILED_PRECONDITION, f"the model fails for a first row: {error}") from error
        made = {name: _spec_of(name, array) for name, array in found.items()}
        return _agreed("outputs", self.outputs, made)

    def _as_rows(self, array: Any) -> Any:
        array = np.asarray(array)
        return array.reshape(-1, 1) if array.ndim == 1 and self.parameters.get("column_outputs") else array

    def _find_names(self, model: OpenedModel) -> Mapping[str, str]:
        """Return the names that the config gives outputs, of those that the model has and of others. Raises
        ConfigError for a name that is given twice."""
        names = self.parameters.get("output_names") or {}
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
            raise ConfigError(f"parameters.output_names: given {names!r}, allowed: a name for each output")
        titles = [names.get(name, name) for name in model.outputs]
        if len(set(titles)) != len(titles):
            raise ConfigError("parameters.output_names: a name is given twice")
        return names

    def _choose(self, model: OpenedModel) -> Sequence[str]:
        given: Any = list(self.outputs) or self.parameters.get("outputs", model.chosen)
        where = "outputs" if self.outputs else "parameters.outputs"
        allowed = ", ".join(model.outputs)
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ConfigError(f"{where}: given {given!r}, allowed: a list of {allowed}")
        for name in given:
            if name not in model.outputs:
                raise ConfigError(f"{where}: given {name!r}, allowed: {allowed}")
        return tuple(given)


def make_frame(names: Sequence[str], dtypes: Mapping[str, Any] | None = None) -> Join:
    """Return what makes a pandas table of an array for each column. `dtypes` are pandas' own of some columns.

    Raises ConfigError where pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(f"a model of named columns needs pandas: {install_text('pandas', '')}") from error

    known = dtypes or {}

    def join(columns: Sequence[Any]) -> Any:
        series = {
            name: pandas.Series(column, dtype=known.get(name), copy=False)
            for name, column in zip(names, columns, strict=True)
        }
        return pandas.DataFrame(series, copy=False)

    return join


def number_columns(names: Sequence[str]) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(name) for name in names)


def number_names(width: int) -> tuple[str, ...]:
    """Return the names of columns that have none."""
    return tuple(map(str, range(width)))


def _compute(model: OpenedModel, rows: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the outputs of these names, one that follows from another of them without running the model."""
    ways = {name: way for name, way in model.derived.items() if name in names and way.source in names}
    found = {name: model.outputs[name](rows) for name in names if name not in ways}
    return found | {name: way.derive(found[way.source]) for name, way in ways.items()}


def _first_row(spec: TensorSpec, columns: Sequence[Column], *, by_column: bool) -> Any:
    """Return one row of an input, of values that the model takes."""
    shape = (1, *(spec.shape or ()))
    if not by_column:
        return np.array([[column.example for column in columns]], spec.dtype.name)
    example = next(column.example for column in columns if column.name == spec.name)
    if spec.dtype.name == "bytes":
        return np.full(shape, str(example).encode(), object)
    return np.full(shape, example, spec.dtype.name)


def _read_text(column: Column, array: Any) -> Any:
    texts = np.empty(array.size, object)
    for at, value in enumerate(array.reshape(-1)):
        try:
            text = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise ServeError(
                Kind.INVALID_ARGUMENT, f"input {column.name!r}, row {at}: not UTF-8: {error.reason}"
            ) from None
        texts[at] = text or column.missing
    return texts


def _spec_of(name: str, array: Any) -> TensorSpec:
    dtype = "float32" if array.dtype == np.float32 else _KINDS.get(array.dtype.kind, "")
    if not dtype:
        raise ConfigError(f"output {name!r} of the model has the dtype {array.dtype}")
    return TensorSpec(name, DTYPES[dtype], array.shape[1:])


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype.name} {'null' if spec.shape is None else list(spec.shape)}"


def _agreed(
    side: str, declared: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Return the tensors that a config declares, where the model has them; all of the model's where it
    declares none. Raises ConfigError."""
    for name, spec in declared.items():
        if found.get(name) != spec:
            had = ", ".join(f"{one.name}: {_describe(one)}" for one in found.values())
            raise ConfigError(f"{side}: given {name}: {_describe(spec)}, allowed: what the model has, {had}")
    return dict(declared or found)


def _as_declared(array: Any, spec: TensorSpec) -> Any:
    array = np.asarray(array)
    if array.ndim == 1 and spec.shape:
        array = array.reshape(-1, 1)
    if spec.dtype.name == "bytes":
        return array.astype(object)
    return np.ascontiguousarray(array, spec.dtype.name)
