"""The public protobuf messages of a dialect, from the descriptor sets the build writes beside this file.

    kserve = load("kserve_v2")
    kserve.ModelReadyResponse(ready=True).SerializeToString()
    kserve.DataType.Value("TYPE_FP32")

Each set has a descriptor pool of its own and nothing is registered in protobuf's default pool: both
Triton dialects, and an official client in the same process, bring messages of the same names.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

_FOLDER = Path(__file__).parent


class Messages:
    """The message classes and enums of one set, as attributes by their names, whichever its packages.

    `descriptor_set` is the serialized FileDescriptorSet (what gRPC reflection shows), `package` the
    package of the last file in it, `services` the full names of its services, `pool` the private pool.
    """

    def __init__(self, descriptor_set: bytes) -> None:
        files = FileDescriptorSet.FromString(descriptor_set).file
        self.descriptor_set = descriptor_set
        self.package: str = files[-1].package
        self.services = [f"{file.package}.{service.name}" for file in files for service in file.service]
        self.pool = DescriptorPool()
        # The package's own go before those of the packages it imports.
        own_last = sorted(files, key=lambda file: file.package == self.package)
        self._messages = {one.name: f"{f.package}.{one.name}" for f in own_last for one in f.message_type}
        self._enums = {one.name: f"{f.package}.{one.name}" for f in own_last for one in f.enum_type}
        for file in files:
            self.pool.AddSerializedFile(file.SerializeToString())

    def __getattr__(self, name: str) -> Any:
        """A message class, or an enum with Name() and Value(). Raises AttributeError."""
        try:
            found = self._find(name)
        except KeyError:
            raise AttributeError(f"package {self.package} has no message or enum {name}") from None
        setattr(self, name, found)  # the next access is an ordinary one
        return found

    def _find(self, name: str) -> Any:
        if name in self._enums:
            return EnumTypeWrapper(self.pool.FindEnumTypeByName(self._enums[name]))
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(self._messages[name]))


@cache
def load(name: str) -> Messages:
    """The messages of `protos/<name>/`. Raises FileNotFoundError when the build has no such set."""
    return Messages((_FOLDER / f"{name}.binpb").read_bytes())
