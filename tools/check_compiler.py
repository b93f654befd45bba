"""Can the compiled modules be built here? Says in a sentence what is missing, and what to install.

    python3 tools/check_compiler.py      # `make build` runs it first, and setup.py before it compiles

It asks the compiler that setuptools will use ($CXX, else the one Python was built with) for a file of
C++20 that includes Python.h. Plain enough to run, and to say so, on a Python that is too old.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST = (3, 10)
CONCEPT = "#include <concepts>\ntemplate <std::integral T> T twice(T x) { return x + x; }\n"
PYTHON = "#include <Python.h>\n"


def compiler():
    """The command line setuptools begins with."""
    return shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")


def compiles(command, text):
    """Whether the compiler takes it; nothing is left behind."""
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "probe.cpp")
        with open(path, "w") as probe:
            probe.write(text)
        more = ["-std=c++20", "-fsyntax-only", "-I" + include, path]
        return subprocess.call([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def fault():
    """What is missing, "" when nothing is."""
    here, oldest = ("{}.{}".format(*one[:2]) for one in (sys.version_info, OLDEST))
    if sys.version_info < OLDEST:
        return f"Python {here} is too old, it needs {oldest} or newer; name one: make PYTHON=python3.12"
    command = compiler()
    name = command[0] if command else "CXX is empty"
    if shutil.which(name) is None:
        return (
            f"there is no C++ compiler ({name}): install one (Debian and Ubuntu: apt install g++; "
            "Fedora: dnf install gcc-c++), or name yours: CXX=clang++ make build"
        )
    if not compiles(command, CONCEPT):
        return f"{name} cannot compile C++20: GCC 10, clang 13 or newer can; name it: CXX=clang++ make build"
    if not compiles(command, PYTHON):
        return (
            f"the headers of Python {here} are missing (Python.h): install them (Debian and Ubuntu: "
            f"apt install python{here}-dev; Fedora: dnf install python3-devel)"
        )
    return ""


def main():
    found = fault()
    if found:
        print("fastserve cannot be built: " + found, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
