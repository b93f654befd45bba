"""Words for the operator who starts a server: the banner of a ready one, with requests to paste, and what to
do about a start that failed."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

from fastserve.errors import ConfigError
from fastserve.metrics import Readiness
from fastserve.net import AddressError
from fastserve.settings import Listener, Settings
from fastserve.settings.server_settings import names_file

log = logging.getLogger(__name__)

# One held-out digit (a seven) as 64 grey values, so that the line can be pasted as it is.
SEVEN = (
    "0,0,0,7,16,15,6,0, 0,0,4,16,13,16,15,0, 0,0,4,9,3,16,11,0, 0,0,6,13,15,16,13,0, "
    "0,0,13,16,16,13,7,0, 0,0,3,9,16,5,0,0, 0,0,0,12,14,0,0,0, 0,0,0,12,8,0,0,0"
)


MODELS_SHOWN = 8

EMPTY = (
    "There is no model in {folder}: a model is a folder such as {folder}/NAME, with a model.yaml and a "
    "version in {folder}/NAME/1 (model.py or model.onnx)."
)


IN_PROCESS = (
    "Models run in this process, each a thread: a run that hangs is not ended, and a crash of a model is the "
    "server's."
)


def banner_text(
    settings: Settings,
    http: tuple[Listener, ...],
    grpc: tuple[Listener, ...],
    readiness: Readiness,
    *,
    at_terminal: bool = False,
    sizing: str = "",
) -> str:
    """Return a line for scripts and people: the addresses, and what is wrong; and then, of the demo and at a
    terminal, what to try."""
    secure = bool(settings.tls.cert)
    places = [_place("http", secure, listener) for listener in http]
    places += [_place("grpc", secure, listener) for listener in grpc]
    how = "is ready" if readiness.ready else "listens and is not ready"
    lines = [f"fastserve {how}: {' '.join(places) or 'no listener'}"]
    if sizing:
        lines.append(sizing)
    if settings.in_process:
        lines.append(IN_PROCESS)
    if not readiness.ready:
        checked = settings.repository or "--config FILE"
        lines.append(f"{readiness.reason}; `fastserve check {checked}` tells more")
    if not readiness.models and settings.repository:
        lines.append(EMPTY.format(folder=settings.repository))
    ports = [listener for listener in http if not listener.in_file]
    if settings.repository == "demo" and ports:
        ready = [name for name, state in readiness.models.items() if state.ready]
        lines += ["", "Try:", *(f"  {line}" for line in demo_requests(ports[0], settings, ready))]
        if settings.allow_metrics:
            place = _place("http", secure, ports[0])
            lines.append(f"and, in a browser, to see what it does: {place}/console")
    elif at_terminal and ports and readiness.models:
        lines += list_models(settings, ports[0], readiness)
    return "\n".join(lines)


def list_models(settings: Settings, listener: Listener, readiness: Readiness) -> list[str]:
    """Return lines that name the models and places to look at them."""
    ready = [name for name, state in readiness.models.items() if state.ready]
    more = f" and {len(ready) - MODELS_SHOWN} more" if len(ready) > MODELS_SHOWN else ""
    lines = [f"models: {', '.join(ready[:MODELS_SHOWN])}{more}"] if ready else []
    root = _place("http", bool(settings.tls.cert), listener)
    for every in ("[::]", "0.0.0.0"):  # no browser goes there
        root = root.replace(f"//{every}:", "//localhost:")
    if ready and (not listener.dialects or "kserve_v2" in listener.dialects):
        lines.append(f"  curl {root}/v2/models/{ready[0]}")
    if settings.allow_metrics and (not listener.dialects or "ops" in listener.dialects):
        lines.append(f"and, in a browser, to see what they do: {root}/console")
    return lines


def advise(settings: Settings, error: Exception) -> str:
    """Return what to do about a failed start, to stand behind its error; "" where that says so itself."""
    if isinstance(error, AddressError):
        return _advise_of_address(settings, error)
    folder = Path(settings.repository)
    if isinstance(error, ConfigError) and settings.repository not in ("", "demo") and not folder.exists():
        return _advise_of_folder(folder.absolute())
    return ""


def _advise_of_address(settings: Settings, error: AddressError) -> str:
    named = {"listen": settings.listen, "http": settings.http, "grpc": settings.grpc}
    flags = [f"--{name} HOST:PORT" for name, found in named.items() if error.place in _places(found)]
    other = flags[0] if flags else "another address"
    if error.place.startswith("unix:"):
        return ""
    if isinstance(error.__cause__, socket.gaierror):
        return (
            f"; give an address of this machine: {other}, where HOST is 127.0.0.1, or 0.0.0.0 for all of them"
        )
    if error.errno == errno.EADDRINUSE:
        port = error.place.rpartition(":")[2]
        return f"; stop what listens there (`ss -ltnp sport = :{port}` names it), or choose another: {other}"
    if error.errno == errno.EACCES:
        return f"; ports below 1024 are for root: choose a higher one, {other}"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"; this machine does not have that address: {other}, where HOST is 127.0.0.1, or 0.0.0.0 for all"
        )
    return ""


def _places(listeners: tuple[Listener, ...]) -> list[str]:
    return [listener.address for listener in listeners]


def _advise_of_folder(folder: Path) -> str:
    """Return where the folder was looked for, and one beside it whose name is near."""
    beside = [one.name for one in folder.parent.iterdir() if one.is_dir()] if folder.parent.is_dir() else []
    near = get_close_matches(folder.name, beside, 1, 0.6)
    return f"; there is no {folder}" + (f", did you mean {folder.parent / near[0]}?" if near else "")


def is_terminal(descriptor: int) -> bool:
    """Return whether a person reads the descriptor."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _place(name: str, secure: bool, listener: Listener) -> str:
    """Return an address as curl takes it; a socket file has its protocol in front."""
    scheme = f"{name}s" if secure and listener.tls else name
    return f"{scheme}+{listener.address}" if listener.in_file else f"{scheme}://{listener.address}"


def announce(text: str) -> None:
    """Write to standard output. A closed or full one is logged, and the server goes on."""
    try:
        # Past sys.stdout, which would keep what it could not write and fail once more when the process ends.
        with open(1, "w", closefd=False) as output:
            output.write(f"{text}\n")
    except OSError as error:
        log.warning("standard output cannot be written: %s", error.strerror or error)


def fill_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed.

    Its number would go to a socket, and a library's writes to standard error to a client.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def demo_requests(listener: Listener, settings: Settings, models: Collection[str]) -> list[str]:
    """Return curl lines for models of the demo repository."""
    tls = settings.tls
    root = _place("http", bool(tls.cert), listener)
    curl = f"curl --cacert {tls.cert}" if root.startswith("https") and names_file(tls.cert) else "curl"
    base = f"{curl} {root}/v1/models"
    prompt = {
        "inputs": "In the beginning",
        "stream": True,
        "parameters": {"max_new_tokens": 40, "do_sample": True},
    }
    digit = json.dumps({"instances": [[int(n) for n in SEVEN.split(",")]]}, separators=(",", ":"))
    halves = '{"instances": [1.0, 2.0, 5.0]}'
    lines = {
        "scribe": [f"{curl} -N {root}/infer -d '{json.dumps(prompt)}'"],
        "half_plus_two": [f"{base}/half_plus_two:predict -d '{halves}'"],
        "digits": [f"{base}/digits:predict -d '{digit}'", f"{base}/digits/metadata"],
    }
    return [*(line for name in lines if name in models for line in lines[name]), f"{curl} {root}/metrics"]
