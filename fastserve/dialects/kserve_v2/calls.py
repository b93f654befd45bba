"""The calls that are no inference: read, ask, write, each in a few lines. Which path is which: `routes`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastserve.dialects.kserve_v2.document import read_object
from fastserve.dialects.kserve_v2.errors import error_body, invalid
from fastserve.dialects.kserve_v2.infer import find_plan
from fastserve.dialects.kserve_v2.lookup import read_version, ready_versions
from fastserve.dialects.kserve_v2.memory_calls import (
    cuda_status,
    register_cuda,
    register_system,
    system_status,
    unregister,
)
from fastserve.dialects.kserve_v2.metadata import model_config, model_metadata, server_metadata
from fastserve.dialects.kserve_v2.repository import (
    check_repository,
    list_models,
    load_model,
    read_index_request,
    read_load_request,
    read_unload_request,
    unload_model,
)
from fastserve.dialects.kserve_v2.routes import Target
from fastserve.dialects.kserve_v2.service import TEXT, Service, show, show_nothing
from fastserve.errors import ServeError
from fastserve.serving.model_view import find_version
from fastserve.wire.call import Call

Plain = Callable[[Service, Target, Call], None]
Slow = Callable[[Service, Target, Call], Awaitable[None]]


def show_live(service: Service, target: Target, call: Call) -> None:
    show_nothing(call)


def show_ready(service: Service, target: Target, call: Call) -> None:
    call.reply(200 if service.readiness.ready else 400, b"", TEXT)


def show_model_ready(service: Service, target: Target, call: Call) -> None:
    if service.catalog.available(target.model, read_version(target.version)) is None:
        raise invalid("Model version not ready")
    show_nothing(call)


def show_server(service: Service, target: Target, call: Call) -> None:
    show(call, server_metadata())


def show_model(service: Service, target: Target, call: Call) -> None:
    number = read_version(target.version)
    version = find_version(service.catalog, target.model, number)
    numbers = [v.number for v in ready_versions(service.catalog, target.model)]
    show(call, model_metadata(service.plans.of(version), numbers if number is None else [number]))


def show_config(service: Service, target: Target, call: Call) -> None:
    show(call, model_config(find_plan(service, target).version))


def show_statistics(service: Service, target: Target, call: Call) -> None:
    show(call, service.statistics.show(target.model, read_version(target.version)))


def set_trace(service: Service, target: Target, call: Call) -> None:
    if target.model and service.catalog.available(target.model, None) is None:
        raise invalid(f"Request for unknown model : {target.model}")
    if call.method == "POST":
        service.trace.change(read_object(call.body), target.model)
    show(call, service.trace.show(target.model))


def set_logging(service: Service, target: Target, call: Call) -> None:
    if call.method == "POST":
        service.must_allow_log_settings()
        service.log.change(read_object(call.body))
    show(call, service.log.show())


def show_system_memory(service: Service, target: Target, call: Call) -> None:
    show(call, system_status(service.regions, target.parts.get("region", "")))


def show_cuda_memory(service: Service, target: Target, call: Call) -> None:
    show(call, cuda_status(service.regions, target.parts.get("region", "")))


def register_system_memory(service: Service, target: Target, call: Call) -> None:
    register_system(service.regions, target.parts.get("region", ""), call.body)
    show_nothing(call)


def register_cuda_memory(service: Service, target: Target, call: Call) -> None:
    register_cuda(service.regions, target.parts.get("region", ""), call.body)
    show_nothing(call)


def unregister_system_memory(service: Service, target: Target, call: Call) -> None:
    unregister(service.regions, target.parts.get("region", ""))
    show_nothing(call)


def unregister_cuda_memory(service: Service, target: Target, call: Call) -> None:
    service.regions.must_be_allowed()
    show_nothing(call)


async def show_index(service: Service, target: Target, call: Call) -> None:
    only_ready = read_index_request(call.body)
    show(call, await list_models(service.repository, service.catalog, only_ready))


async def load(service: Service, target: Target, call: Call) -> None:
    check_repository(target.parts.get("repository", ""))
    override = await service.apart(len(call.body), read_load_request, call.body)
    service.must_allow_files(override)
    await load_model(service.repository, service.catalog, target.model, override)
    show_nothing(call)


async def unload(service: Service, target: Target, call: Call) -> None:
    check_repository(target.parts.get("repository", ""))
    await unload_model(service.repository, target.model, read_unload_request(call.body))
    show_nothing(call)


PLAIN: dict[str, Plain] = {
    "live": show_live,
    "ready": show_ready,
    "model_ready": show_model_ready,
    "server_metadata": show_server,
    "model_metadata": show_model,
    "model_config": show_config,
    "statistics": show_statistics,
    "trace": set_trace,
    "logging": set_logging,
    "system_status": show_system_memory,
    "system_register": register_system_memory,
    "system_unregister": unregister_system_memory,
    "cuda_status": show_cuda_memory,
    "cuda_register": register_cuda_memory,
    "cuda_unregister": unregister_cuda_memory,
}
SLOW: dict[str, Slow] = {"index": show_index, "load": load, "unload": unload}


class Ask:
    """The endpoint of a target that is answered from what is known."""

    __slots__ = ("_do", "_service", "_target")

    def __init__(self, service: Service, target: Target, do: Plain) -> None:
        self._service = service
        self._target = target
        self._do = do

    def __call__(self, call: Call) -> None:
        try:
            self._do(self._service, self._target, call)
        except ServeError as fault:
            self._service.refuse(call, fault, self._target.model)


class AskSlowly:
    """The endpoint of a target whose answer has to be waited for. It goes on if the client leaves."""

    __slots__ = ("_do", "_service", "_target")

    def __init__(self, service: Service, target: Target, do: Slow) -> None:
        self._service = service
        self._target = target
        self._do = do

    def __call__(self, call: Call) -> Coroutine[Any, Any, None]:
        return self._run(call)

    async def _run(self, call: Call) -> None:
        call.on_gone = None
        try:
            await self._do(self._service, self._target, call)
        except ServeError as fault:
            self._service.refuse(call, fault, self._target.model)


def answer_not_found(call: Call) -> None:
    call.reply(404, error_body("Not Found"), TEXT)


def answer_wrong_verb(call: Call) -> None:
    # To HEAD as well, as the original does; the connection ends, so that it cannot be taken for a next reply.
    call.reply(405, error_body("Method Not Allowed"), TEXT, close=call.method == "HEAD", even_to_head=True)
