"""The entry of a worker process: `python -m fastserve.workers.main FD`. One backend, one control channel.

    read "load" -> create and load the backend -> say "loaded" -> read "serve" + descriptors
    -> the batch loop (workers/loop.py: attaches, warms up, says "ready", runs batches)
    -> close the backend, exit 0

It ends on the message "stop", when the control channel reads EOF, and when the owner's thread dies.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from fastserve.backends import Backend, create, model_callbacks
from fastserve.backends.base import CompletedConfig, SupportsSignatures, check_capabilities, write_specs
from fastserve.backends.model_errors import explain, kind_of
from fastserve.backends.registry import find_backend
from fastserve.errors import ConfigError
from fastserve.settings.model_options import INPUTS, OUTPUTS
from fastserve.util.logs import log_prints, log_uncaught, raw_trace, setup_logs
from fastserve.workers.control import (
    ControlChannel,
    ControlFault,
    LoadChannel,
    PeerGone,
    enter_child,
    name_process,
)
from fastserve.workers.device.base import runs_there
from fastserve.workers.pinning import PRIORITY

if TYPE_CHECKING:
    from fastserve.backends.llm.protocols import TextBackend

log = logging.getLogger(__name__)

# serve(backend, control, config, message, fds): owns the fds; returns on "stop" and on EOF.
Serve = Callable[[Backend, ControlChannel, Mapping[str, Any], Mapping[str, Any], list[int]], None]


def main(arguments: list[str], serve: Serve | None = None) -> int:
    """Runs one worker to its end; the exit status. `serve` replaces the batch loop in tests."""
    control = enter_child(int(arguments[0]))
    try:
        order = control.receive().message
        if order["op"] != "load":
            return 0
        _introduce(order)
        if order.get("aside"):
            PRIORITY.step_back()
        model_callbacks.process.channel = LoadChannel(control)
        return live(control, order, serve or _batch_loop)
    except PeerGone:
        return 0
    finally:
        control.close()


def live(control: ControlChannel, order: Mapping[str, Any], serve: Serve) -> int:
    """One worker's life, from the order to load to the backend's end; the exit status."""
    version_dir = Path(order["version_dir"])
    backend: Backend | None = None
    try:
        backend = _create(order, version_dir)
        backend.load()
        check_capabilities(backend)
        control.send({"op": "loaded", **_describe(backend, order["config"])})
        message, fds = control.receive()
        if message["op"] == "serve":
            serve(backend, control, order["config"], message, fds)
        return 0
    except PeerGone:
        return 0
    # A model may raise anything, sys.exit() included; all of it is a load that failed.
    except BaseException as error:
        _report(control, error, str(version_dir))
        return 1
    finally:
        if backend is not None:
            _close(backend)


def _create(order: Mapping[str, Any], version_dir: Path) -> Backend:
    """Make the model's backend, or what has its face where remote workers run it."""
    if order["config"].get("placement"):
        from fastserve.workers.remote.runner import RemoteVersion

        return RemoteVersion(order["config"], version_dir, str(order["name"]))
    return create({"name": order["name"], **order["config"]}, version_dir, order["instance"])


def _describe(backend: Backend, config: Mapping[str, Any]) -> dict[str, Any]:
    if find_backend(str(config.get("backend"))).takes == "text":
        info = cast("TextBackend", backend).info
        return {"inputs": dict(INPUTS), "outputs": dict(OUTPUTS), "text": msgspec.to_builtins(info)}
    specs = {"inputs": write_specs(backend.inputs), "outputs": write_specs(backend.outputs)}
    signatures = backend.signatures if isinstance(backend, SupportsSignatures) else {}
    return {**specs, "signatures": signatures, "on_device": runs_there(config, backend)}


def _report(control: ControlChannel, error: BaseException, version_dir: str) -> None:
    message: dict[str, Any] = {"op": "failed"}
    if isinstance(error, CompletedConfig):
        message["completed"] = error.fields
    elif not isinstance(error, ConfigError):  # which says where and what by itself
        message["trace"] = raw_trace(error)  # the owner logs it, once for all that fail alike
    message |= {"message": explain(error, version_dir), "kind": kind_of(error).value}
    with contextlib.suppress(ControlFault):
        control.send(message)


def _close(backend: Backend) -> None:
    try:
        backend.close()
    except Exception:
        log.exception("the model failed to close")


def _batch_loop(
    backend: Backend,
    control: ControlChannel,
    config: Mapping[str, Any],
    message: Mapping[str, Any],
    fds: list[int],
) -> None:
    if config.get("placement"):
        from fastserve.workers.remote.runner import RemoteVersion, serve_remote

        serve_remote(cast("RemoteVersion", backend), control, config, message, fds)
        return
    from fastserve.workers import loop  # with what it imports, once the model has loaded

    loop.serve(backend, control, config, message, fds)


def title_of(order: Mapping[str, Any]) -> str:
    """The worker's name in logs."""
    return f"{order['name']}/{Path(order['version_dir']).name}#{order['instance']}"


def _introduce(order: Mapping[str, Any]) -> None:
    title = title_of(order)
    name_process(title)
    open_logs(order["logs"], title)
    sys.path.extend(path for path in order["sys_path"] if path not in sys.path)


def open_logs(logs: Mapping[str, Any], title: str) -> None:
    """Log as the owner does, each line with the worker's name, and what is printed or left uncaught."""
    setup_logs(logs["level"], logs["format"], fields={"worker": title})
    log_uncaught()
    if logs["format"]:
        log_prints()
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a model's print() shows when it happens


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
