"""GPUs on a machine without any: a CUDA driver that is a library of a few functions over files (fake_cuda.c).

The server's own processes load it as they load the real one, by its name; nothing of ours is replaced. What a
GPU computes it cannot show, only who opens what, when it is closed, and where bytes go.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm

SOURCE = Path(__file__).with_name("fake_cuda.c")
NVML_SOURCE = Path(__file__).with_name("fake_nvml.c")


@functools.cache
def build_libraries() -> Path:
    """Compile the drivers, once in a process, and return their folder."""
    compiler = os.environ.get("CC", "cc").split()
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler to make the simulated CUDA driver with")
    folder = Path(tempfile.mkdtemp(prefix="fastserve-drivers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for source, name in ((SOURCE, "libcuda.so.1"), (NVML_SOURCE, "libnvidia-ml.so.1")):
        made = [f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run([*compiler, "-shared", "-fPIC", *made], check=True)
    return folder


class FakeGpus:
    """`count` devices for processes started while `here` is entered."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.libraries, self.memory = build_libraries(), folder / "memory"
        self.memory.mkdir()
        (self.memory / "devices").write_text(str(count))

    @property
    def environment(self) -> dict[str, str]:
        """Variables for processes that are to see these devices."""
        path = os.pathsep.join(filter(None, [str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]))
        return {"LD_LIBRARY_PATH": path, "FAKE_CUDA": str(self.memory)}

    @contextmanager
    def here(self, **more: str) -> Iterator[FakeGpus]:
        """Processes started meanwhile have them."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**self.environment, **more}.items():
                patch.setenv(name, value)
            with warm.ZYGOTES.under(os.environ):
                yield self

    def fail_with(self, code: int) -> None:
        """Every copy fails from now on, 0 for none."""
        (self.memory / "fail").write_text(str(code))

    @contextmanager
    def handles(self) -> Iterator[Callable[[], list[str]]]:
        """Record the handles that are opened and closed meanwhile, a line each: "PID open NAME COUNT"."""
        told = self.memory / "handles"
        self.set("handles")
        try:
            yield lambda: told.read_text().splitlines()
        finally:
            self.set("handles", on=False)

    def set(self, switch: str, on: bool = True) -> None:
        """Turn one of the files on that fake_cuda.c looks for: mig, shy, unpinnable."""
        (self.memory / switch).write_text("") if on else (self.memory / switch).unlink(missing_ok=True)

    @property
    def broken(self) -> str:
        """The driver's rules that somebody has broken, a line each."""
        told = self.memory / "broken"
        return told.read_text() if told.exists() else ""

    def allocate(self, nbytes: int, device: int = 0) -> Allocation:
        """Memory of a client's."""
        return Allocation(self.memory / uuid.uuid4().hex[:16], nbytes, device)

    def readers(self, pid: int) -> int:
        """How many allocations a process has open."""
        return Path(f"/proc/{pid}/maps").read_text().count(str(self.memory))


class Allocation:
    """One piece of a device's memory."""

    def __init__(self, path: Path, nbytes: int, device: int) -> None:
        path.write_bytes(bytes(nbytes))
        self._path, self.device, self.nbytes = path, device, nbytes
        self.handle = b"fakecuda" + device.to_bytes(4, "little") + path.name.encode().ljust(52, b"\0")

    def put(self, data: bytes, offset: int = 0) -> None:
        with self._path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def get(self, nbytes: int, offset: int = 0) -> bytes:
        return self._path.read_bytes()[offset : offset + nbytes]

    def free(self, *, early: bool = False) -> None:
        """Raises AssertionError while a process has it open (undefined, the driver's documentation says), but
        not where it is `early` on purpose."""
        for maps in () if early else Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                assert str(self._path) not in maps.read_text(), f"{maps.parent} has it open"
        self._path.unlink()


# --- what tritonclient.utils.cuda_shared_memory imports: cuda-python's face, as far as it is used ---------


class _Error(enum.IntEnum):
    cudaSuccess = 0


class _Result(enum.IntEnum):
    CUDA_SUCCESS = 0


class _Kind(enum.IntEnum):
    cudaMemcpyDefault = 4


class _Attribute(enum.IntEnum):
    cudaDevAttrUnifiedAddressing = 41


class _Handle:
    def __init__(self, data: bytes) -> None:
        self._data = ctypes.create_string_buffer(data, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._data)


class _Stream(int):
    def getPtr(self) -> int:
        return int(self)


class _Runtime:
    """The client's process has a GPU, too: its addresses are numbers no pointer has."""

    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus, self._device, self._next = gpus, 0, 1 << 62
        self._allocations: dict[int, Allocation] = {}

    def get_device(self) -> Any:
        return _Error.cudaSuccess, self._device

    def set_device(self, device: int) -> Any:
        self._device = device
        return (_Error.cudaSuccess,)

    def malloc(self, nbytes: int) -> Any:
        at, self._next = self._next, self._next + (1 << 32)
        self._allocations[at] = self._gpus.allocate(nbytes, self._device)
        return _Error.cudaSuccess, at

    def free(self, at: int) -> Any:
        self._allocations.pop(at).free()
        return (_Error.cudaSuccess,)

    def handle(self, at: int) -> Any:
        return _Error.cudaSuccess, _Handle(self._allocations[at].handle)

    def copy(self, to: Any, source: Any, nbytes: int, kind: Any, stream: Any) -> Any:
        data = bytes(source[:nbytes]) if isinstance(source, bytes) else self._read(source, nbytes)
        if isinstance(to, int) and to >= 1 << 62:
            base = max(at for at in self._allocations if at <= to)
            self._allocations[base].put(data, to - base)
        else:
            ctypes.memmove(to, data, nbytes)
        return (_Error.cudaSuccess,)

    def _read(self, source: int, nbytes: int) -> bytes:
        if source < 1 << 62:
            return ctypes.string_at(source, nbytes)
        base = max(at for at in self._allocations if at <= source)
        return self._allocations[base].get(nbytes, source - base)


@contextmanager
def client_library(gpus: FakeGpus) -> Iterator[Any]:
    """`tritonclient.utils.cuda_shared_memory`, unmodified, over these devices."""
    real, made = _Runtime(gpus), {}
    for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime", "cuda.bindings.driver"):
        made[name] = types.ModuleType(name)
    vars(made["cuda.bindings.runtime"]).update(
        cudaError_t=_Error, cudaMemcpyKind=_Kind, cudaDeviceAttr=_Attribute, cudaIpcMemHandle_t=_Handle,
        CUDA_IPC_HANDLE_SIZE=64, cudaGetDevice=real.get_device, cudaSetDevice=real.set_device,
        cudaMalloc=real.malloc, cudaFree=real.free, cudaIpcGetMemHandle=real.handle,
        cudaMemcpyAsync=real.copy,
        cudaStreamCreate=lambda: (_Error.cudaSuccess, _Stream(0)),
        cudaStreamDestroy=lambda stream: (_Error.cudaSuccess,),
        cudaStreamSynchronize=lambda stream: (_Error.cudaSuccess,),
        cudaDeviceGetAttribute=lambda attribute, device: (_Error.cudaSuccess, 1),
        cudaGetErrorString=lambda error: (_Error.cudaSuccess, b"an error"),
    )  # fmt: skip
    vars(made["cuda.bindings.driver"]).update(
        CUresult=_Result,
        cuDeviceGet=lambda device: (_Result.CUDA_SUCCESS, device),
        cuDevicePrimaryCtxGetState=lambda device: (_Result.CUDA_SUCCESS, 0, 1),
    )
    for name in ("runtime", "driver"):
        setattr(made["cuda.bindings"], name, made[f"cuda.bindings.{name}"])
    with pytest.MonkeyPatch.context() as patch:
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        library = pytest.importorskip("tritonclient.utils.cuda_shared_memory")
        yield library
        for name in [name for name in sys.modules if "cuda_shared_memory" in name]:
            del sys.modules[name]
