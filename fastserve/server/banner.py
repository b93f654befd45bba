"""The banner that a ready server prints: its addresses, and requests to paste."""

from __future__ import annotations

import json
import logging
import os

from fastserve.metrics import Readiness
from fastserve.settings import Listener, Settings
from fastserve.settings.server_settings import names_file

log = logging.getLogger(__name__)

# One held-out digit (a seven) as 64 grey values, so that the line can be pasted as it is.
SEVEN = (
    "0,0,0,7,16,15,6,0, 0,0,4,16,13,16,15,0, 0,0,4,9,3,16,11,0, 0,0,6,13,15,16,13,0, "
    "0,0,13,16,16,13,7,0, 0,0,3,9,16,5,0,0, 0,0,0,12,14,0,0,0, 0,0,0,12,8,0,0,0"
)


EMPTY = (
    "There is no model in {folder}: a model is a folder such as {folder}/NAME, with a model.yaml and a "
    "version in {folder}/NAME/1 (model.py or model.onnx)."
)


IN_PROCESS = (
    "Models run in this process, each a thread: a run that hangs is not ended, and a crash of a model is the "
    "server's."
)


def banner_text(
    settings: Settings, http: tuple[Listener, ...], grpc: tuple[Listener, ...], readiness: Readiness
) -> str:
    """Return a few lines for a person at a terminal."""
    secure = bool(settings.tls.cert)
    places = [_place("http", secure, listener) for listener in http]
    places += [_place("grpc", secure, listener) for listener in grpc]
    how = "is ready" if readiness.ready else "listens and is not ready"
    lines = [f"fastserve {how}: {' '.join(places) or 'no listener'}"]
    if settings.in_process:
        lines.append(IN_PROCESS)
    if not readiness.ready:
        checked = settings.repository or "--config FILE"
        lines.append(f"{readiness.reason}; `fastserve check {checked}` tells more")
    if not readiness.models and settings.repository:
        lines.append(EMPTY.format(folder=settings.repository))
    ports = [listener for listener in http if not listener.in_file]
    if settings.repository == "demo" and ports:
        lines += ["", "Try:", *(f"  {line}" for line in demo_requests(ports[0], settings))]
        if settings.allow_metrics:
            place = _place("http", secure, ports[0])
            lines.append(f"and, in a browser, to see what it does: {place}/console")
    return "\n".join(lines)


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


def demo_requests(listener: Listener, settings: Settings) -> list[str]:
    """Return curl lines for the demo repository."""
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
    return [
        f"{curl} -N {root}/infer -d '{json.dumps(prompt)}'",
        f"{base}/half_plus_two:predict -d '{halves}'",
        f"{base}/digits:predict -d '{digit}'",
        f"{base}/digits/metadata",
        f"{curl} {root}/metrics",
    ]
