"""Builds every ext/*.pyx into fastserve._ext, and protos/*.proto into descriptor sets.

FASTSERVE_EXT=json_reader,flatten builds only those modules; FASTSERVE_DEBUG=1 builds all of
them with bounds checks and with the address and undefined-behaviour sanitizers.
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DEBUG = os.environ.get("FASTSERVE_DEBUG") == "1"
CHOSEN = set(filter(None, os.environ.get("FASTSERVE_EXT", "").split(",")))

COMPILE_ARGS = ["-std=c++20", "-O3", "-fno-strict-aliasing", "-Wall", "-Wno-unused-function", "-Werror=vla"]
DEBUG_ARGS = ["-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": DEBUG,
    "freethreading_compatible": False,
}


def extension(path: Path) -> Extension:
    return Extension(
        f"fastserve._ext.{path.stem}",
        [path.relative_to(ROOT).as_posix()],
        include_dirs=["ext/include"],
        depends=[p.as_posix() for p in sorted(Path("ext/include").glob("*.h"))],
        language="c++",
        extra_compile_args=DEBUG_ARGS if DEBUG else COMPILE_ARGS,
        extra_link_args=["-fsanitize=address,undefined"] if DEBUG else [],
    )


def sources() -> list[Path]:
    found = sorted((ROOT / "ext").glob("*.pyx"))
    return [p for p in found if not CHOSEN or p.stem in CHOSEN]


class BuildPy(build_py):
    """The ordinary step, after protoc has written the descriptor sets the package reads."""

    def run(self) -> None:
        compile_protos()
        super().run()


def compile_protos() -> None:
    from grpc_tools import protoc  # a build requirement, absent at run time

    for folder in sorted(p for p in (ROOT / "protos").iterdir() if p.is_dir()):
        files = [str(p) for p in sorted(folder.rglob("*.proto"))]
        if not files:
            continue
        out = ROOT / "fastserve" / "protos" / f"{folder.name}.binpb"
        args = ["protoc", f"-I{folder}", f"--descriptor_set_out={out}", "--include_imports", *files]
        if protoc.main(args) != 0:
            raise SystemExit(f"protoc failed on protos/{folder.name}")


setup(
    ext_modules=cythonize(
        [extension(p) for p in sources()],
        include_path=["ext"],
        build_dir="build/cython",
        compiler_directives=DIRECTIVES,
        nthreads=int(os.environ.get("FASTSERVE_JOBS", "0")),
    ),
    cmdclass={"build_py": BuildPy},
)
