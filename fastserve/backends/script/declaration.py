"""Declarations: what `@fastserve.model` finds out about a function or class, as a model of a repository.

    arrays          every parameter is an Array: rows of many callers in one call; tensors of every API
    json            anything else: the function gets what a JSON body says, and what it returns is written so
    stream          json, of generators and of async functions: any number of answers, many requests at a time

A script is run to declare its models, in each worker and in the process that serves. Nothing of a model is
made then: classes are called in the workers alone.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from fastserve.backends.script.json_body import BodyReader
from fastserve.backends.script.json_schema import describe_types, is_array, tensor_of

BODY = "body"
OUTPUT = "output"
BACKENDS = {"arrays": "script", "json": "script_json", "stream": "script_stream"}
DECLARED = "__fastserve_model__"
"""The attribute of a function or class that was declared; its value is the ScriptModel."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_PATH = re.compile(r"/[A-Za-z0-9._~/-]{1,256}")
RESERVED = re.compile(r"/(v2|console|metrics|healthz)(/.*)?")
"""Paths of the server's own, which no model may have."""


@dataclass(frozen=True, slots=True)
class ScriptModel:
    """One model of a script. `options` are fields of model.yaml; `batched` functions of JSON get lists."""

    name: str
    target: Any
    kind: str
    version: int = 1
    path: str = ""
    batched: bool = False
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    """Names of models that it calls by `fastserve.remote`."""
    example: Any = None

    @property
    def key(self) -> str:
        """NAME/VERSION, by which a worker finds it."""
        return f"{self.name}/{self.version}"

    def config(
        self,
        file: str,
        paths: Mapping[str, str],
        stamp: str = "",
        types: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the fields of its model.yaml. `paths` and `types` are those of all versions, by number; a
        change of `stamp` loads the model anew."""
        options = dict(self.options)
        script: dict[str, Any] = {"file": file, "paths": dict(paths)}
        script |= {"stamp": stamp} if stamp else {}
        script |= {"uses": list(self.uses)} if self.uses else {}
        script |= {"types": dict(types)} if types else {}
        parameters = {**options.pop("parameters", {}), "script": script}
        fixed = {"backend": BACKENDS[self.kind], "inputs": dict(self.inputs), "outputs": dict(self.outputs)}
        if self.kind != "arrays":
            fixed["warmup"] = "off"
        return {**fixed, **options, "parameters": parameters}

    def types(self) -> dict[str, Any]:
        """Return what a function of JSON takes and returns; of one of arrays its example, if it has one.
        Raises TypeError."""
        if self.kind == "arrays":
            return {} if self.example is None else {"example": self.example}
        return ModelSteps.of(self.target, self.name).types(self)


_declared: dict[str, ScriptModel] = {}


def declared() -> list[ScriptModel]:
    """Return the models that were declared in this process, in order."""
    return list(_declared.values())


def forget_declared() -> None:
    """Begin anew: another script is run."""
    _declared.clear()


def model(target: Any = None, /, **options: Any) -> Any:
    """Declare a function or a class to be a model, and return it as it is.

    `name` and `path` are what clients call it, `version` its number; `batch` is max_batch_size; `uses` are
    the models it calls by `fastserve.remote`, or their names; `example` is a body for /docs. All other
    options are fields of model.yaml. Raises TypeError, ValueError for what cannot be served.
    """
    if target is None:
        return lambda found: model(found, **options)
    made = declare(target, **options)
    before = _declared.get(made.key)
    if before is not None and _place(before.target) != _place(target):
        raise ValueError(f"there are two models {made.name!r} of version {made.version}: name= or version=")
    _declared[made.key] = made
    with contextlib.suppress(AttributeError):  # of what takes no attributes, `remote` says so
        setattr(target, DECLARED, made)
    return target


def declare(
    target: Any,
    *,
    name: str = "",
    path: str = "",
    version: int = 1,
    batch: int | None = None,
    uses: Iterable[Any] = (),
    example: Any = None,
    **options: Any,
) -> ScriptModel:
    """Return what a function or class is as a model. Raises TypeError, ValueError."""
    if not callable(target):
        raise TypeError(f"@fastserve.model is for functions and classes, not for a {type(target).__name__}")
    name = name or str(getattr(target, "__name__", ""))
    if not _NAME.fullmatch(name) or not name.strip("."):
        raise ValueError(f"name: given {name!r}, allowed: 1 to 128 of letters, digits, _ . -")
    path = path or f"/{name}"
    if not _PATH.fullmatch(path) or RESERVED.fullmatch(path):
        raise ValueError(
            f"path: given {path!r}, allowed: /... of letters, digits, _ . ~ - /, not the server's"
        )
    if type(version) is not int or version < 1:
        raise ValueError(f"version: given {version!r}, allowed: a whole number from 1")
    steps = ModelSteps.of(target, name)
    if batch is not None:
        options["max_batch_size"] = batch
    used = names_of(name, uses)
    arrays = steps.arrays()
    if arrays is not None and used:
        raise TypeError(
            f"{name}: uses: a function of Arrays runs rows of many callers and calls no other model"
        )
    if arrays is not None:
        inputs, outputs = arrays
        return ScriptModel(
            name, target, "arrays", version, path, True, inputs, outputs, options, example=example
        )
    options.setdefault("max_batch_size", 1)
    batched, kind = options["max_batch_size"] > 1, "stream" if steps.streams else "json"
    if kind == "stream" and batched:
        raise TypeError(f"{name}: a generator or an async function takes one request at a time: no batch")
    if options["max_batch_size"] < 1:
        raise ValueError(f"batch: given {options['max_batch_size']}, allowed: from 1")
    steps.reader(batched=batched)
    body = {BODY: {"dtype": "bytes", "shape": []}}
    return ScriptModel(name, target, kind, version, path, batched, body, body, options, used, example)


def names_of(owner: str, uses: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of models that are given by name, or as what was declared. Raises TypeError."""
    found = []
    for one in (uses,) if isinstance(uses, str) or callable(uses) else uses:
        made = getattr(one, DECLARED, None)
        name = one if isinstance(one, str) else made.name if made is not None else None
        if name is None:
            raise TypeError(f"{owner}: uses: {getattr(one, '__name__', one)!r} is no model: @fastserve.model")
        found.append(name)
    return tuple(dict.fromkeys(found))


def steps_of(made: ScriptModel) -> ModelSteps:
    """Return the steps of a declared model, which need not be set up."""
    return ModelSteps.of(made.target, made.name)


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """The functions a request goes through: `decode` and `encode` may be None. `owner` names it in errors."""

    owner: str
    predict: Callable[..., Any]
    decode: Callable[..., Any] | None = None
    encode: Callable[..., Any] | None = None
    bound: bool = True
    """The functions have no parameter `self` any more."""

    @classmethod
    def of(cls, target: Any, owner: str) -> ModelSteps:
        """Return the steps of a function, a class, or an instance of one. Raises TypeError."""
        if inspect.isroutine(target):
            return cls(owner, target)
        predict = getattr(target, "predict", None)
        if not callable(predict):
            raise TypeError(f"class {owner!r} has no method predict(self, ...)")
        decode, encode = getattr(target, "decode", None), getattr(target, "encode", None)
        return cls(owner, predict, decode, encode, not isinstance(target, type))

    @property
    def streams(self) -> bool:
        """Whether it yields, or is async."""
        found = (self.predict, self.decode, self.encode)
        return inspect.isgeneratorfunction(self.predict) or any(
            inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in found
        )

    def signature(self, function: Callable[..., Any]) -> inspect.Signature:
        """Return a signature with annotations as values, less `self`. Raises TypeError."""
        try:
            found = inspect.signature(function, eval_str=True)
        except NameError as fault:
            raise TypeError(f"{self.owner}: an annotation cannot be read: {fault}") from None
        if self.bound:
            return found
        return found.replace(parameters=list(found.parameters.values())[1:])

    def arrays(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return inputs and outputs of a function of arrays; None for any other. Raises TypeError."""
        if self.decode is not None or self.encode is not None or self.streams:
            return None
        signature = self.signature(self.predict)
        kinds = {name: one.annotation for name, one in signature.parameters.items()}
        if not kinds or not all(map(is_array, kinds.values())):
            return None
        outputs = _outputs_of(signature.return_annotation)
        if outputs is None:
            raise TypeError(
                f"{self.owner}: its parameters are Arrays: declare what it returns, -> Array[...]"
            )
        return {name: tensor_of(kind) for name, kind in kinds.items()}, outputs

    def types(self, model: ScriptModel) -> dict[str, Any]:
        """Return the types of bodies and answers for /openapi.json. Raises TypeError."""
        returned = self.signature(self.encode or self.predict).return_annotation
        items = get_args(returned) if model.batched and self.encode is None else ()
        if items:
            returned = items[0]
        return describe_types(
            self.reader(batched=model.batched), None if self.streams else returned, model.example
        )

    def reader(self, *, batched: bool) -> BodyReader:
        """Return the reader of its bodies. Raises TypeError."""
        signature = self.signature(self.decode or self.predict)
        if batched and self.decode is None:
            signature = _one_of_many(signature, self.owner)
        return BodyReader(signature, self.owner)


def _one_of_many(signature: inspect.Signature, owner: str) -> inspect.Signature:
    """Return the signature of one request of a batch: the items of the list that the function takes."""
    parameters = list(signature.parameters.values())
    if len(parameters) != 1:
        raise TypeError(f"{owner}: with batch it takes one list, of a body of each request")
    kind = parameters[0].annotation
    if kind not in (inspect.Parameter.empty, Any, list) and get_origin(kind) is not list:
        raise TypeError(f"{owner}: with batch {parameters[0].name!r} is a list: list[...]")
    (item,) = get_args(kind) or (inspect.Parameter.empty,)
    one = parameters[0].replace(annotation=item, kind=inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[one])


def _outputs_of(returned: Any) -> dict[str, Any] | None:
    """Return the outputs that a return annotation stands for: an Array, a dict or a tuple of them."""
    if is_array(returned):
        return {OUTPUT: tensor_of(returned)}
    if isinstance(returned, Mapping) and returned and all(map(is_array, returned.values())):
        return {str(name): tensor_of(kind) for name, kind in returned.items()}
    items = get_args(returned) if get_origin(returned) is tuple else ()
    if items and all(map(is_array, items)):
        return {f"{OUTPUT}_{at}": tensor_of(kind) for at, kind in enumerate(items)}
    return None


def _place(target: Any) -> tuple[str, str]:
    return str(getattr(target, "__module__", "")), str(getattr(target, "__qualname__", ""))
