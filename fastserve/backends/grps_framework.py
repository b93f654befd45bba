"""What a grps project imports: `grps_framework` and `grps_apis`, with the names of the original's packages.

    from grps_framework.apis.grps_pb2 import GrpsMessage
    from grps_framework.converter.converter import Converter, converter_register
    from grps_framework.model_infer.inferer import ModelInferer, inferer_register

`install` puts them where `import` finds them, whether or not the original is installed: its own would run the
server that this is in place of.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any, Generic, TypeVar

from fastserve.backends.grps_context import GrpsContext
from fastserve.backends.grps_monitor import app_monitor
from fastserve.protos import load

logger = logging.getLogger("grps")
_MESSAGES = (
    "DataType", "EmptyGrpsMessage", "GenericMapData", "GenericTensor", "GenericTensorData", "GrpsMessage",
    "NDArrayData", "Status",
)  # fmt: skip


class Converter:
    """Between messages and what a model takes: the base of a project's converters."""

    _path: str | None = None
    _args: Any = None

    def init(self, path: str | None = None, args: Any = None) -> None:
        """Called once, when the model loads."""
        self._path, self._args = path, args

    def preprocess(self, inp: Any, context: GrpsContext) -> Any:
        """A message, or what the node before gave, as the model takes it."""
        raise NotImplementedError(f"{type(self).__name__} has no preprocess")

    def postprocess(self, inp: Any, context: GrpsContext) -> Any:
        """What the model gave, as a message."""
        raise NotImplementedError(f"{type(self).__name__} has no postprocess")

    def batch_preprocess(self, inps: list[Any], contexts: list[GrpsContext]) -> Any:
        """The messages of a batch, as the model takes them."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_preprocess")

    def batch_postprocess(self, inp: Any, contexts: list[GrpsContext]) -> list[Any]:
        """What the model gave for a batch, a message each."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_postprocess")


class ModelInferer(ABC):
    """What runs a model: the base of a project's inferers."""

    _path: str | None = None
    _device: str | None = None
    _args: Any = None

    def init(self, path: str, device: str | None = None, args: Any = None) -> None:
        """Called once, before `load`."""
        self._path, self._device, self._args = path, device, args

    @abstractmethod
    def load(self) -> bool:
        """Load the model. False, or an exception, fails the load."""

    @abstractmethod
    def infer(self, inp: Any, context: GrpsContext) -> Any:
        """Run one request."""

    def batch_infer(self, inp: Any, contexts: list[GrpsContext]) -> Any:
        """Run a batch."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_infer")


T = TypeVar("T")


class Register(Generic[T]):
    """Objects by the names that inference.yml gives them."""

    def __init__(self) -> None:
        self._known: dict[str, T] = {}

    def register(self, name: str, registered: T) -> None:
        """Make an object known under a name."""
        self._known[name] = registered

    def get(self, name: str) -> T | None:
        """The object of that name."""
        return self._known.get(name)

    def names(self) -> list[str]:
        """All of them."""
        return sorted(self._known)


converter_register: Register[Any] = Register()
inferer_register: Register[Any] = Register()


def install() -> None:
    """Make the packages importable in this process."""
    apis = _make_apis()
    for name, members in {
        "grps_apis": {},
        "grps_apis.grps_pb2": apis,
        "grps_framework": {},
        "grps_framework.apis": {},
        "grps_framework.apis.grps_pb2": apis,
        "grps_framework.context": {},
        "grps_framework.context.context": {"GrpsContext": GrpsContext},
        "grps_framework.converter": {},
        "grps_framework.converter.converter": {
            "Converter": Converter,
            "converter_register": converter_register,
        },
        "grps_framework.model_infer": {},
        "grps_framework.model_infer.inferer": {
            "ModelInferer": ModelInferer,
            "inferer_register": inferer_register,
        },
        "grps_framework.logger": {},
        "grps_framework.logger.logger": {"clogger": logger, "logger": logger},
        "grps_framework.monitor": {},
        "grps_framework.monitor.monitor": {"app_monitor": app_monitor},
    }.items():
        _put(name, members)


def _make_apis() -> dict[str, Any]:
    messages = load("grps")
    members = {name: getattr(messages, name) for name in _MESSAGES}
    return {**members, **dict(members["DataType"].items())}


def _put(name: str, members: dict[str, Any]) -> None:
    module = ModuleType(name)
    module.__path__ = []  # a package: more may be below it
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
