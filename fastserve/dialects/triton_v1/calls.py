"""What clients ask besides inference, over either transport: health, status, control, repository, regions
(spec 4-7). Each raises ServeError in the original's words, and is counted when it went well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from fastserve.dialects.triton_v1.service import Service
from fastserve.dialects.triton_v1.status import write_status
from fastserve.engine import Took
from fastserve.errors import Kind, NoDeviceError, ServeError, invalid
from fastserve.protos import load
from fastserve.repository.version import VersionState
from fastserve.serving.device_regions import HANDLE_BYTES
from fastserve.serving.model_control import must_be_explicit


class Calls:
    """Those of one front process. Messages are given as such; how they are shown is the transport's."""

    def __init__(self, service: Service) -> None:
        self._service, self._counts = service, service.statistics
        self._messages = load("triton_v1")

    def health(self, mode: str) -> bool:
        """Whether the server is `live`, or `ready`."""
        with _counted(self._counts.health):
            if mode not in ("live", "ready"):
                raise ServeError(Kind.UNKNOWN, f"unknown health mode '{mode}'")
            return mode == "live" or self._service.readiness.ready

    def status(self, name: str) -> Any:
        """ServerStatus of one model, of all for ""."""
        with _counted(self._counts.status):
            return write_status(self._service, name)

    async def index(self) -> Any:
        """ModelRepositoryIndex: every model folder, loaded or not."""
        with _counted(self._counts.repository):
            message = self._messages.ModelRepositoryIndex()
            for name in sorted(await self._service.repository.names()):
                message.models.add(name=name)
            return message

    async def control(self, name: str, *, load: bool) -> None:
        """Load or reload a model, or unload it; one that nobody knows is unloaded already."""
        with _counted(self._counts.control):
            repository = self._service.repository
            must_be_explicit(repository)
            try:
                await (repository.load(name, None) if load else repository.unload(name, False))
            except ServeError as fault:
                if load:
                    raise self._why_not(name, fault) from None
                if fault.kind is not Kind.NOT_FOUND:
                    raise ServeError(Kind.INTERNAL, f"failed to unload '{name}'") from None

    def _why_not(self, name: str, fault: ServeError) -> ServeError:
        model = self._service.catalog.models.get(name)
        if fault.kind is Kind.NOT_FOUND or model is None or not model.versions:
            reason = "failed to poll from model repository"
            if model is not None and model.error is None:
                reason = "no version is available"
        else:
            down = [n for n, v in sorted(model.versions.items()) if v.state is not VersionState.AVAILABLE]
            reason = f"versions that are not available: {','.join(map(str, down))}"
        return ServeError(Kind.INTERNAL, f"failed to load '{name}', {reason}")

    def regions(self) -> Any:
        """SharedMemoryStatus: every region."""
        message = self._messages.SharedMemoryStatus()
        for region in self._service.regions.list_files():
            one = message.shared_memory_region.add(name=region.name, byte_size=region.byte_size)
            one.system_shared_memory.shared_memory_key = region.key
            one.system_shared_memory.offset = region.offset
        for lent in self._service.regions.list_devices():
            one = message.shared_memory_region.add(name=lent.name, byte_size=lent.byte_size)
            one.cuda_shared_memory.device_id = lent.device
        return message

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Raises ServeError, in the words of a server without a GPU where there is none (spec 6)."""
        if len(handle) != HANDLE_BYTES:
            raise invalid("unexpected size for CUDA shared-memory handle, expecting 64 bytes")
        failed = "failed to register CUDA shared memory region"
        try:
            await self._service.regions.register_device(name, handle, device, byte_size)
        except NoDeviceError:
            raise invalid(f"{failed}: '{name}', GPUs not supported") from None
        except ServeError as fault:
            if fault.kind is not Kind.INVALID_ARGUMENT:
                raise
            raise invalid(f"{failed} '{name}'") from None


@contextlib.contextmanager
def _counted(took: Took) -> Iterator[None]:
    began_ns = monotonic_ns()
    yield
    took.add(monotonic_ns() - began_ns)
