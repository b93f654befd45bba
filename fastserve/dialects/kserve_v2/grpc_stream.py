"""ModelStreamInfer: any number of requests and responses on one stream (spec 11).

    ordinary models    answered one by one, in the order asked
    decoupled models   answered as they answer, beside one another

Faults of one request are told in its response, and the stream goes on. A client that leaves cancels
everything of its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from time import monotonic_ns
from typing import Any

from fastserve._ext.proto_wire import write_stream_response
from fastserve.dialects.kserve_v2.answers import reply_parameters
from fastserve.dialects.kserve_v2.errors import tell
from fastserve.dialects.kserve_v2.grpc_infer import Job, Sent, collect_outputs, make_job, read_sent
from fastserve.dialects.kserve_v2.operations import SERVICE, STREAM
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import ServeError
from fastserve.request import InferResponse
from fastserve.serving.exchange import unforeseen
from fastserve.wire.grpc import Method, Rpc
from fastserve.wire.scope import Scope

MOST_AT_ONCE = 256
"""Requests of one stream that may be under way; the stream is read no further until one has ended."""
MOST_WAITING = 64
"""Responses that may wait for a client to read them."""
FINAL = "triton_final_response"
ERROR_MODE = ("triton_grpc_error", "true")


class ModelFault(Exception):
    """What a model answered with an error, in the mode where that ends the stream."""

    def __init__(self, fault: ServeError) -> None:
        super().__init__(fault.message)
        self.fault = fault


def make_stream(service: Service) -> Method:
    """ModelStreamInfer."""
    run = partial(stream, service)
    return Method(SERVICE + STREAM, read_sent, run, bytes, True, True, scope=Scope.INFER)


async def stream(service: Service, requests: AsyncIterator[Sent], rpc: Rpc) -> AsyncIterator[bytes]:
    """Serialized ModelStreamInferResponses. Raises ServeError for a model's fault if the client asked so."""
    conversation = _Conversation(service, rpc)
    reading = asyncio.ensure_future(conversation.read(requests))
    try:
        while (piece := await conversation.out.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece.fault if isinstance(piece, ModelFault) else piece
            yield piece
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


class _Conversation:
    """One stream."""

    def __init__(self, service: Service, rpc: Rpc) -> None:
        self.out: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(MOST_WAITING)
        self._service = service
        self._rpc = rpc
        self._ends_on_fault = ERROR_MODE in rpc.metadata
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self, requests: AsyncIterator[Sent]) -> None:
        """Start every request; end when the last is answered. What goes wrong ends the stream."""
        turn: asyncio.Future[None] | None = None  # done when the ordinary request before is answered
        try:
            async for sent in requests:
                await self._room.acquire()
                before, turn = turn, asyncio.get_running_loop().create_future()
                task = asyncio.ensure_future(self._answer(sent, before, turn))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            await asyncio.gather(*self._tasks)
            await self.out.put(None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await self.out.put(error)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()

    async def _answer(
        self, sent: Sent, before: asyncio.Future[None] | None, turn: asyncio.Future[None]
    ) -> None:
        try:
            job = self._check(sent)
            if isinstance(job, Job) and job.plan.decoupled:
                _pass_on(before, turn)
                await self._answer_many(sent, job)
                return
            try:
                piece = await self._answer_one(sent, job) if isinstance(job, Job) else job
                if before is not None:
                    await before
                await self.out.put(piece)
            finally:
                if not turn.done():
                    turn.set_result(None)
        except Exception as error:
            await self.out.put(error)

    def _check(self, sent: Sent) -> Job | bytes:
        """The job, or the response that says why there is none."""
        try:
            return make_job(
                self._service,
                self._service.find(sent.message.model_name, sent.message.model_version),
                sent,
                self._rpc,
            )
        except ServeError as fault:
            told = tell(fault, sent.message.id)
            self._service.traffic.refused(sent.message.model_name, told.kind.name)
            return write_stream_response(told.message, id=sent.message.id)

    async def _answer_one(self, sent: Sent, job: Job) -> bytes:
        started_ns = monotonic_ns()
        service = self._service
        with job.rooms, service.traces.one(job.plan.model) as traced:
            try:
                response = await service.infer(job.plan.version, job.request, traced)
                try:
                    reply = self._write(job, response, final=True)
                finally:
                    response.release()
            except Exception as error:
                return self._write_fault(sent, job, self._told(error), final=True)
        service.traffic.count(job.plan.model, job.plan.version.number, monotonic_ns() - started_ns)
        return reply

    async def _answer_many(self, sent: Sent, job: Job) -> None:
        started_ns = monotonic_ns()
        service, ended = self._service, False
        with job.rooms, service.traces.one(job.plan.model) as traced:
            try:
                async with aclosing(service.stream(job.plan.version, job.request, traced)) as responses:
                    async for response in responses:
                        try:
                            piece = self._write_part(sent, job, response)
                        finally:
                            response.release()
                        if piece:
                            ended = response.final
                            await self.out.put(piece)
            except ModelFault:
                raise
            except Exception as error:
                await self.out.put(self._write_fault(sent, job, self._told(error), final=True))
                return
        if job.parameters.empty_final and not ended:
            message = sent.message
            await self.out.put(
                write_stream_response(
                    "", message.model_name, message.model_version, message.id, {FINAL: True}
                )
            )
        service.traffic.count(job.plan.model, job.plan.version.number, monotonic_ns() - started_ns)

    def _told(self, error: Exception) -> ServeError:
        """What a client is told of what went wrong with one request, which ends no stream: the others of it
        are answered."""
        if isinstance(error, ServeError):
            return error
        return unforeseen(self._rpc, error)

    def _write_part(self, sent: Sent, job: Job, response: InferResponse) -> bytes:
        """One response of several, which may be an error that others follow; b"" for a bare final flag."""
        if response.error is not None:
            return self._write_fault(sent, job, response.error, final=response.final)
        return self._write(job, response, final=response.final) if response.outputs else b""

    def _write(self, job: Job, response: InferResponse, *, final: bool) -> bytes:
        outputs, raws = collect_outputs(job, response)
        plan = job.plan
        parameters: dict[str, Any] = {**reply_parameters(plan, job.parameters, response), FINAL: final}
        return write_stream_response(
            "", plan.model, str(plan.version.number), job.body.request_id, parameters, outputs, raws
        )

    def _write_fault(self, sent: Sent, job: Job, fault: ServeError, *, final: bool) -> bytes:
        """A model's error as a response. Raises ModelFault where it ends the stream."""
        told = tell(fault, sent.message.id)
        self._service.traffic.refused(job.plan.model, told.kind.name)
        if self._ends_on_fault:
            raise ModelFault(told)
        message = sent.message
        return write_stream_response(
            told.message, message.model_name, message.model_version, message.id, {FINAL: final}
        )


def _pass_on(before: asyncio.Future[None] | None, turn: asyncio.Future[None]) -> None:
    """A decoupled request holds up nobody: its turn is over when the one before it is."""
    if before is None or before.done():
        turn.set_result(None)
    else:
        before.add_done_callback(lambda _: None if turn.done() else turn.set_result(None))
