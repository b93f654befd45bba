"""The CUDA driver, as little of it as is needed: devices, memory that another process lends, and copies.

    cuda = Cuda.load()                  None: this machine has no driver
    cuda.enter(0)                       this thread uses device 0, in the context that frameworks share
    at = cuda.open_handle(handle)       64 bytes of another process's cudaIpcGetMemHandle
    cuda.to_host(memory, at + 16)       returns when the bytes are there

Run as a program it prints the devices that CUDA gives to a process with this environment, as JSON, and ends
(`found`). It then runs alone, without the package: nothing but the standard library is imported here.

Loaded by name, as every program does it. A call that initialises CUDA makes threads and takes memory, and a
process that was forked after it is broken: only workers and their like call anything of this (hardening R11).
"""

from __future__ import annotations

import ctypes
import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LIBRARIES = ("libcuda.so.1", "libcuda.so")

HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process

_ORDINAL, _RANGE_START, _RANGE_SIZE = 9, 11, 12  # CU_POINTER_ATTRIBUTE_*

_OUT_OF_MEMORY = 2

# Errors of a bad argument, or of something that this machine lacks; after anything else the context may
# be broken for good. By CUresult: INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_CONTEXT, MAP_FAILED,
# UNMAP_FAILED, ALREADY_MAPPED, NOT_MAPPED, PEER_ACCESS_UNSUPPORTED, OPERATING_SYSTEM, INVALID_HANDLE,
# PEER_ACCESS_ALREADY_ENABLED, TOO_MANY_PEERS, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED,
# NOT_PERMITTED, NOT_SUPPORTED.
HARMLESS = frozenset({1, 2, 101, 201, 205, 206, 208, 211, 217, 304, 400, 704, 711, 712, 713, 800, 801})

_NAME_BYTES = 96

_Address = ctypes.c_uint64  # CUdeviceptr

_Pointer = ctypes.c_void_p

_Size = ctypes.c_size_t


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


def _ref(kind: Any) -> Any:
    return ctypes.POINTER(kind)


# name in the library -> its arguments; newer names first, where there is an older one
_CALLS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "init": (("cuInit",), (ctypes.c_uint,)),
    "count": (("cuDeviceGetCount",), (_ref(ctypes.c_int),)),
    "device": (("cuDeviceGet",), (_ref(ctypes.c_int), ctypes.c_int)),
    "name": (("cuDeviceGetName",), (ctypes.c_char_p, ctypes.c_int, ctypes.c_int)),
    "memory": (("cuDeviceTotalMem_v2",), (_ref(_Size), ctypes.c_int)),
    "uuid": (("cuDeviceGetUuid_v2", "cuDeviceGetUuid"), (_ref(_Uuid), ctypes.c_int)),
    # of the GPU that a MIG instance is of; a driver without the older call tells of all as of whole GPUs
    "whole_uuid": (("cuDeviceGetUuid", "cuDeviceGetUuid_v2"), (_ref(_Uuid), ctypes.c_int)),
    "retain": (("cuDevicePrimaryCtxRetain",), (_ref(_Pointer), ctypes.c_int)),
    "current": (("cuCtxSetCurrent",), (_Pointer,)),
    "open": (("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle"), (_ref(_Address), _Handle, ctypes.c_uint)),
    "close": (("cuIpcCloseMemHandle",), (_Address,)),
    "range": (("cuMemGetAddressRange_v2",), (_ref(_Address), _ref(_Size), _Address)),
    "to_host": (("cuMemcpyDtoH_v2",), (_Pointer, _Address, _Size)),
    "attribute": (("cuPointerGetAttribute",), (_Pointer, ctypes.c_int, _Address)),
    "register": (("cuMemHostRegister_v2", "cuMemHostRegister"), (_Pointer, _Size, ctypes.c_uint)),
    "unregister": (("cuMemHostUnregister",), (_Pointer,)),
    "synchronize": (("cuCtxSynchronize",), ()),
    "to_device": (("cuMemcpyHtoD_v2",), (_Address, _Pointer, _Size)),
    "error_name": (("cuGetErrorName",), (ctypes.c_int, _ref(ctypes.c_char_p))),
}


class CudaFault(Exception):
    """A call of the driver's failed. The text names the call and the driver's own name for what is wrong."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code
        self.out_of_memory = code == _OUT_OF_MEMORY


class Cuda:
    """The driver in this process. Every call but `load` raises CudaFault."""

    def __init__(self, library: Any) -> None:
        self._calls: dict[str, Callable[..., int]] = {}
        self._names: dict[str, str] = {}
        for call, (names, arguments) in _CALLS.items():
            name = next(name for name in names if hasattr(library, name))
            found = getattr(library, name)
            found.argtypes, found.restype = arguments, ctypes.c_int
            self._calls[call], self._names[call] = found, name
        self._contexts: dict[int, ctypes.c_void_p] = {}

    @classmethod
    def load(cls) -> Cuda | None:
        """The driver, initialised; None where there is none, or none that works."""
        for name in LIBRARIES:
            try:
                cuda = cls(ctypes.CDLL(name))
                cuda._do("init", 0)
            except (OSError, StopIteration, CudaFault):  # no library, an ancient one, no device behind it
                continue
            return cuda
        return None

    # --- devices ------------------------------------------------------------------------------------

    def count(self) -> int:
        """Devices this process may use: CUDA_VISIBLE_DEVICES is looked at once, by the driver."""
        return int(self._get("count", ctypes.c_int))

    def describe(self, device: int) -> dict[str, Any]:
        """uuid, name and memory_bytes of a device, and whether it is a MIG instance: its own UUID is then
        another than that of the GPU it is a part of."""
        name, told, whole = ctypes.create_string_buffer(_NAME_BYTES), _Uuid(), _Uuid()
        number = self._get("device", ctypes.c_int, device)
        self._do("name", name, _NAME_BYTES, number)
        self._do("uuid", ctypes.byref(told), number)
        self._do("whole_uuid", ctypes.byref(whole), number)
        return {
            "uuid": str(uuid.UUID(bytes=bytes(told.bytes))),
            "name": name.value.decode("utf-8", "replace"),
            "mig": bytes(told.bytes) != bytes(whole.bytes),
            "memory_bytes": int(self._get("memory", _Size, number)),
        }

    def enter(self, device: int) -> None:
        """Make `device` current on this thread, in its primary context, which every framework of the process
        uses. Called each time: a framework on the same thread may have changed it."""
        if device not in self._contexts:
            number = self._get("device", ctypes.c_int, device)
            context = _Pointer()
            self._do("retain", ctypes.byref(context), number)
            self._contexts[device] = context
        self._do("current", self._contexts[device])

    # --- memory -------------------------------------------------------------------------------------

    def open_handle(self, handle: bytes) -> int:
        """The address of memory that another process lends. A handle that this context has open already is
        counted, and has to be closed as often."""
        return int(self._get("open", _Address, _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS))

    def close_handle(self, address: int) -> None:
        """Close a handle by its address."""
        self._do("close", address)

    def extent(self, address: int) -> int | None:
        """Bytes from `address` to the end of the allocation it is in; None where the driver does not tell:
        its documentation promises it of memory this process has allocated, not of what another one lends."""
        base, size = _Address(), _Size()
        try:
            self._do("range", ctypes.byref(base), ctypes.byref(size), address)
        except CudaFault:
            try:
                self._do("attribute", ctypes.byref(base), _RANGE_START, address)
                self._do("attribute", ctypes.byref(size), _RANGE_SIZE, address)
            except CudaFault:
                return None
        return int(base.value + size.value - address)

    def device_of(self, address: int) -> int | None:
        """The device that memory is on; None where the driver does not say, as for one that is not visible
        here."""
        ordinal = ctypes.c_int(-1)
        try:
            self._do("attribute", ctypes.byref(ordinal), _ORDINAL, address)
        except CudaFault:
            return None
        return ordinal.value if ordinal.value >= 0 else None

    def register(self, memory: Any) -> int:
        """Pin memory of the host where it lies, for DMA from all contexts of this process: whole pages, until
        `unregister` is given the address that this returns, and that before they are unmapped. By the driver
        and not by the runtime: a refusal of the runtime's would be told again by the next kernel's launch."""
        start = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        self._do("register", start, len(memory), _PORTABLE)
        return start

    def unregister(self, start: int) -> None:
        """Undo `register`."""
        self._do("unregister", start)

    def to_host(self, memory: Any, address: int) -> None:
        """Fill a writable buffer. Returns when it is filled."""
        view = memoryview(memory).cast("B")
        if view.nbytes:
            into = (ctypes.c_ubyte * view.nbytes).from_buffer(view)
            self._do("to_host", ctypes.addressof(into), address, view.nbytes)

    def to_device(self, address: int, memory: Any) -> None:
        """Write a buffer, read-only ones too. Returns when it is there: of memory that is not pinned the copy
        alone returns when the driver has taken the bytes, before they are on the device."""
        view = memoryview(memory).cast("B")
        if not view.nbytes:
            return
        if view.readonly:
            source: Any = ctypes.create_string_buffer(view.tobytes(), view.nbytes)
        else:
            source = (ctypes.c_ubyte * view.nbytes).from_buffer(view)
        self._do("to_device", address, ctypes.addressof(source), view.nbytes)
        self._do("synchronize")

    # --- calls --------------------------------------------------------------------------------------

    def _get(self, call: str, kind: Any, *arguments: Any) -> Any:
        """Return the value that a call stores where its first argument points."""
        found = kind()
        self._do(call, ctypes.byref(found), *arguments)
        return found.value

    def _do(self, call: str, *arguments: Any) -> None:
        code = self._calls[call](*arguments)
        if code:
            name = ctypes.c_char_p()
            self._calls["error_name"](code, ctypes.byref(name))
            text = name.value.decode("ascii", "replace") if name.value else f"error {code}"
            raise CudaFault(self._names[call], code, text)


def describe_all() -> list[dict[str, Any]]:
    """Every device of this process; [] without a driver."""
    cuda = Cuda.load()
    return [] if cuda is None else [cuda.describe(device) for device in range(cuda.count())]


if __name__ == "__main__":
    print(json.dumps(describe_all()))

Key = tuple[int, bytes]  # device, handle


@dataclass(slots=True)
class _Opened:
    """An open handle. `owners` are compared by identity."""

    address: int
    owners: dict[int, object] = field(default_factory=dict)


class OpenHandles:
    """The client handles that one process has open. Any method may raise CudaFault, and enters the device on
    the calling thread.

    A driver counts how often a context has opened a handle, and closing it once too often takes it from every
    other user in the process: a shared worker has a thread for each model, in one context. So the driver sees
    the first owner that opens a handle and the last that closes it. Opening and closing are done under one
    lock: no owner gets an address that is being closed.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._turn = threading.Lock()
        self._opened: dict[Key, _Opened] = {}

    def open(self, owner: object, device: int, handle: bytes) -> int:
        """Open a handle once, and return its address, valid for `owner` until it closes it."""
        with self._turn:
            self.cuda.enter(device)
            found = self._opened.get((device, handle))
            if found is None:
                found = self._opened[device, handle] = _Opened(self.cuda.open_handle(handle))
            found.owners[id(owner)] = owner
            return found.address

    def has(self, owner: object, device: int, handle: bytes) -> bool:
        """Whether `owner` has the handle open."""
        with self._turn:
            found = self._opened.get((device, handle))
            return found is not None and id(owner) in found.owners

    def close(self, owner: object, device: int, handle: bytes) -> None:
        """Close the handle for `owner`, which has nothing enqueued that uses it."""
        with self._turn:
            found = self._opened.get((device, handle))
            if found is None or found.owners.pop(id(owner), None) is None or found.owners:
                return
            del self._opened[device, handle]  # also where the driver refuses: it would again
            self.cuda.enter(device)
            self.cuda.close_handle(found.address)


_begin = threading.Lock()

_ours: OpenHandles | None = None


def process_handles() -> OpenHandles | None:
    """Return the handles of this process; the first call initialises CUDA. None without a driver that
    works."""
    global _ours
    with _begin:
        if _ours is None:
            cuda = Cuda.load()
            _ours = None if cuda is None else OpenHandles(cuda)
        return _ours
