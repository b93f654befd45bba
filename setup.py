"""Builds every ext/*.pyx into fastserve._ext, and protos/*/*.proto into descriptor sets and structs.

FASTSERVE_EXT=json_reader,flatten builds only those modules (FASTSERVE_EXT=none: none of them);
FASTSERVE_DEBUG=1 builds with bounds checks and with the address and undefined-behaviour
sanitizers; FASTSERVE_PORTABLE=1 builds for glibc 2.28 (a wheel);
FASTSERVE_JOBS is the number of compilers at a time (default: the cores).
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

ROOT = Path(__file__).resolve().parent
PROTOS = ROOT / "fastserve" / "protos"
sys.path.insert(0, str(ROOT / "tools"))
import check_compiler  # noqa: E402

DEBUG = os.environ.get("FASTSERVE_DEBUG") == "1"
PORTABLE = os.environ.get("FASTSERVE_PORTABLE") == "1"
CHOSEN = set(filter(None, os.environ.get("FASTSERVE_EXT", "").split(",")))
JOBS = int(os.environ.get("FASTSERVE_JOBS") or os.cpu_count() or 1)

CLANG = any("clang" in word for word in check_compiler.compiler()[:1])  # it has not all of GCC's flags

CPP = "-std=c++20"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
# Passes of -O3 over loops, which take a twentieth of -O2's time.
LOOPS = [
    *("-fvect-cost-model=dynamic", "-fpeel-loops", "-funswitch-loops", "-fsplit-loops", "-fsplit-paths"),
    *("-fpredictive-commoning", "-fgcse-after-reload", "-ftree-partial-pre"),
]
# -O3 also inlines more, which takes a third of the time again. These modules lose 4 to 17 percent of a
# benchmark without it; the last four were not tried as they are now.
INLINED = {
    *("flatten", "forest", "http2_frames", "infer_reply", "json_writer", "message_skeleton", "proto_wire"),
    *("proto_wire_v1", "request_template", "sampler", "tensor_proto", "text_tokens"),
    *("decode_step", "infer_json", "json_reader", "skinny_gemm"),
}
# -g0 against the -g Python was built with: debug information is nine tenths of a module's size.
COMPILE_ARGS = (
    ["-O1", "-g", "-fno-omit-frame-pointer", *SANITIZE]
    if DEBUG
    else ["-g0", "-fno-strict-aliasing", "-Wall", "-Wno-unused-function", "-Werror=vla"]
)
# For systems with glibc 2.28: libgcc's own functions are linked into each module, but not its unwinder, which
# all share. auditwheel names what is still missing there.
PORTABLE_ARGS = ["-include", "ext/include/portable.h"] if PORTABLE else []
READ_TOO = ["setup.py", "ext/include/portable.h"]  # a wheel is made anew where its flags may have changed
PORTABLE_LINKS = ["-Wl,--gc-sections", "-Wl,--exclude-libs,ALL", "-Wl,-s", "-lgcc"]
# The C++ library there cannot convert between text and floating-point numbers: the builder's is linked into
# the modules that do, which costs 30 to 100 kB of a wheel each. The others take the system's.
CONVERTING = {
    *("infer_json", "infer_reply", "json_reader", "json_value"),
    *("json_writer", "request_template", "text_tokens"),
}
# Cython's own code for memory views is half of what a module with one is compiled from: all share it.
SHARED_UTILITY = "fastserve._ext._cyutility"
# Headers that nearly all modules include, parsed once: half a second of each module's compilation.
STANDARD_HEADERS = (
    *("math.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"),
    *("atomic", "charconv", "cmath", "ios", "memory", "mutex", "new", "stdexcept", "string", "typeinfo"),
    *("utility", "vector"),
)
FEW = 4  # modules, for which it would not pay
# Directives are not part of Cython's up-to-date check: each build has its own folder.
CYTHON_DIR = "build/cython-debug" if DEBUG else "build/cython"
DIRECTIVES = {
    "auto_pickle": False,
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": DEBUG,
    "freethreading_compatible": False,
}


# The headers and the .pxd files that a file of ours names.
NAMED = re.compile(
    r'^\s*(?:#include|cdef extern from)\s*"([\w.]+)"|^\s*(?:from\s+(\w+)\s+cimport|cimport\s+(\w+))\b', re.M
)


def headers_of(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """Our headers that a module is compiled from: a change of any other compiles nothing anew."""
    seen = set() if seen is None else seen
    for header, source, module in NAMED.findall(path.read_text()):
        named = ROOT / "ext/include" / header if header else ROOT / "ext" / f"{source or module}.pxd"
        if named.is_file() and named not in seen:
            seen.add(named)
            headers_of(named, seen)
    return {one for one in seen if one.suffix == ".h"}


def extension(path: Path) -> Extension:
    return Extension(
        f"fastserve._ext.{path.stem}",
        [path.relative_to(ROOT).as_posix()],
        include_dirs=["ext/include"],
        depends=[p.relative_to(ROOT).as_posix() for p in sorted(headers_of(path))] + READ_TOO * PORTABLE,
        language="c++",
        extra_compile_args=[CPP, *COMPILE_ARGS, *speed_args(path.stem), *PORTABLE_ARGS],
        extra_link_args=link_args(path.stem),
    )


def speed_args(module: str) -> list[str]:
    if DEBUG:
        return []
    return ["-O3"] if CLANG or module in INLINED else ["-O2", *LOOPS]


def link_args(module: str) -> list[str]:
    if DEBUG:
        return SANITIZE
    if not PORTABLE:
        return []
    return ["-static-libstdc++", *PORTABLE_LINKS] if module in CONVERTING else PORTABLE_LINKS


def shared_utility() -> Extension:
    """Cython writes its source, in C."""
    Path(ROOT / CYTHON_DIR).mkdir(parents=True, exist_ok=True)
    return Extension(
        SHARED_UTILITY,
        [f"{CYTHON_DIR}/_cyutility.c"],
        extra_compile_args=[*COMPILE_ARGS, *speed_args("_cyutility")],
        extra_link_args=link_args("_cyutility"),
    )


def extensions() -> list[Extension]:
    """The chosen modules, and the one that they share."""
    found = sorted((ROOT / "ext").glob("*.pyx"))
    if unknown := CHOSEN - {path.stem for path in found} - {"none"}:
        raise SystemExit(f"FASTSERVE_EXT names {', '.join(sorted(unknown))}, which ext/ does not have")
    chosen = [extension(path) for path in found if not CHOSEN or path.stem in CHOSEN]
    return [shared_utility(), *chosen] if chosen else []


def compile_protos() -> None:
    """One descriptor set per folder of protos/, and structs of one file, beside the code that loads them."""
    for folder in sorted(p for p in (ROOT / "protos").glob("*") if p.is_dir()):
        files = [str(p) for p in sorted(folder.rglob("*.proto"))]
        if files:
            compile_folder(folder, files)
    from write_triton_structs import write  # imports protobuf, as protoc does

    write(PROTOS / "kserve_v2.binpb", PROTOS / "model_config.py")


def compile_folder(folder: Path, files: list[str]) -> None:
    from grpc_tools import protoc  # a build requirement, absent at run time

    well_known = Path(protoc.__file__).parent / "_proto"
    out = PROTOS / f"{folder.name}.binpb"
    # Files are named with their folder: two dialects have a grpc_service.proto, one reflection pool both.
    args = [
        "protoc",
        f"-I{folder.parent}",
        f"-I{well_known}",
        f"--descriptor_set_out={out}",
        "--include_imports",
    ]
    if protoc.main([*args, *files]) != 0:
        raise SystemExit(f"protoc failed on protos/{folder.name}")


class BuildPy(build_py):
    """The ordinary step (editable installs take it too), after the descriptor sets are written."""

    def run(self) -> None:
        compile_protos()
        super().run()


class BuildExt(build_ext):
    """The ordinary step, after a look at what it needs."""

    def run(self) -> None:
        missing = check_compiler.fault() if self.extensions else ""
        if missing:
            raise SystemExit(f"fastserve cannot be built: {missing}")
        super().run()

    def build_extensions(self) -> None:
        command = getattr(self.compiler, "compiler_so_cxx", [])
        old = [one for one in self.extensions if one.language == "c++" and self.is_old(one)]
        # The sanitizers' build is left plain, and clang has a way of its own.
        if DEBUG or CLANG or not command:
            old = []
        groups: dict[tuple[str, ...], list[Extension]] = {}
        for one in old:
            groups.setdefault(tuple(speed_args(one.name.rpartition(".")[2])), []).append(one)
        with tempfile.TemporaryDirectory() as folder:
            for number, (speed, group) in enumerate(groups.items()):
                if len(group) < FEW:
                    continue
                header = Path(folder) / f"standard{number}.h"
                self.precompile(command, header, speed)
                for one in group:
                    # First, or it is not taken. A compiler that finds it unfit reads the header itself.
                    one.extra_compile_args[:0] = ["-include", str(header)]
            super().build_extensions()

    def is_old(self, one: Extension) -> bool:
        return bool(self.force or newer_group([*one.sources, *one.depends], self.get_ext_fullpath(one.name)))

    def precompile(self, command: list[str], header: Path, speed: tuple[str, ...]) -> None:
        """Write a precompiled header, for modules of the same optimisations: these are part of it."""
        names = ("Python.h", *STANDARD_HEADERS)
        header.write_text("#define PY_SSIZE_T_CLEAN\n" + "".join(f"#include <{name}>\n" for name in names))
        paths = [f"-I{path}" for path in self.compiler.include_dirs]
        made = ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
        subprocess.run([*command, *paths, CPP, *COMPILE_ARGS, *speed, *made], check=True)


class Protos(Command):
    """`setup.py protos`: only the descriptor sets."""

    user_options: list = []

    def initialize_options(self) -> None:
        """No options."""

    def finalize_options(self) -> None:
        """No options."""

    def run(self) -> None:
        compile_protos()


def sources() -> list[Extension]:
    """The modules in C++. A source distribution is made without them, and so is what other systems than Linux
    get: clients, and the batching library in one process."""
    if "sdist" in sys.argv or sys.platform != "linux":
        return []
    found = extensions()
    return cythonize(
        found,
        include_path=["ext"],
        build_dir=CYTHON_DIR,
        compiler_directives=DIRECTIVES,
        shared_utility_qualified_name=SHARED_UTILITY,
        nthreads=JOBS if len(found) > 2 else 0,
    )


setup(
    ext_modules=sources(),
    options={
        "build_ext": {"parallel": JOBS},
        # A wheel's modules are compiled otherwise than those of `make build`.
        **({"build": {"build_base": "build/portable"}} if PORTABLE else {}),
    },
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "protos": Protos},
)
