"""tritonclient's streams, cancellations and deadlines against decoupled models; generate over plain HTTP."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dialects.kserve.client_rig import BLOCKING, COUNT, ONES, Answers, Client, Refused, connected, run
from tests.running import Running, until

WAITS = -2  # `repeat` sends nothing until its caller has left
FAILS = -1
PATIENCE_S = (0.3, 1, 3, 9)  # deadlines that leave time to begin: the first, on all but a busy machine


@pytest.fixture
def held(models: Path) -> Iterator[Path]:
    """The folder where `held` says that it `began`, and that its caller has `left`; `go` lets it answer."""
    folder = models / "held"
    yield folder
    for name in ("began", "left", "go"):
        (folder / name).unlink(missing_ok=True)


def final(result: Any) -> bool:
    found: bool = result.get_response().parameters["triton_final_response"].bool_param
    return found


def test_a_stream_of_every_kind_of_model(served: Running) -> None:
    """Answers to one request are in order; those of models with one answer each are so among themselves."""

    async def work() -> None:
        async with connected("grpc", served) as client:
            answers = Answers()
            await client.start_stream(answers)
            asked: list[tuple[str, list[Any]]] = [
                ("sums", client.pair()),
                ("repeat", client.numbers(*range(20))),
                ("simple", client.pair()),
                ("double", [client.input("X", COUNT)]),
                ("repeat", client.numbers(7, FAILS, 8)),
                ("sums", client.pair(COUNT, COUNT)),
            ]
            for number, (model, given) in enumerate(asked):
                await client.async_stream_infer(model, given, request_id=str(number))
            found: dict[str, list[Any]] = {}
            order, errors = [], []
            for _ in range(4 + 20 + 3):
                result, error = answers.next()
                if error is not None:
                    errors.append(error.message())
                    continue
                order.append(result.get_response().id)
                found.setdefault(order[-1], []).append(result)
            await client.stop_stream()
            assert errors == ["a bad value"]
            assert [one for one in order if one in "0235"] == ["0", "2", "3", "5"]
            assert [int(r.as_numpy("OUT")[0]) for r in found["1"]] == list(range(20))
            assert [int(r.as_numpy("OUT")[0]) for r in found["4"]] == [7, 8]
            assert np.array_equal(found["3"][0].as_numpy("Y"), 2 * COUNT)
            assert all(final(found[one][0]) for one in "0235")

    run(work())


@pytest.mark.parametrize("asked", [False, True])
def test_the_empty_last_response(served: Running, asked: bool) -> None:
    async def work() -> None:
        async with connected("grpc", served) as client:
            answers = Answers()
            await client.start_stream(answers)
            given = client.numbers(1, 2)
            await client.async_stream_infer("repeat", given, enable_empty_final_response=asked)
            await client.async_stream_infer("repeat", client.numbers(), enable_empty_final_response=asked)
            await client.stop_stream()
            results = []
            while not answers.empty():
                result, error = answers.next()
                assert error is None
                results.append(result)
            numbers = [int(r.as_numpy("OUT")[0]) for r in results if r.get_response().outputs]
            assert numbers == [1, 2]
            assert sum(final(r) for r in results if not r.get_response().outputs) == 2 * asked

    run(work())


def test_sequences_in_a_stream(served: Running) -> None:
    async def work() -> None:
        async with connected("grpc", served) as client:
            answers = Answers()
            await client.start_stream(answers)
            for number in range(1, 6):
                await client.async_stream_infer(
                    "total", [client.input("IN", np.array([[number]], np.int32))],
                    sequence_id=77, sequence_start=number == 1, sequence_end=number == 5,
                )  # fmt: skip
            sums = [int(answers.next()[0].as_numpy("OUT")[0, 0]) for _ in range(5)]
            await client.stop_stream()
            assert sums == [1, 3, 6, 10, 15]

    run(work())


@pytest.mark.lingers  # the client's thread that reads its queue of requests is told nothing, and stays
def test_a_stream_that_is_cancelled_stops_its_model(served: Running) -> None:
    """stop_stream(cancel_requests=True): `repeat` sees it, and is free for the next one at once."""

    async def work() -> None:
        async with connected("grpc", served) as client:
            answers = Answers()
            await client.start_stream(answers)
            await client.async_stream_infer("repeat", client.numbers(1, WAITS, 2))
            result, error = answers.next()
            assert (error, int(result.as_numpy("OUT")[0])) == (None, 1)
            await client.stop_stream(cancel_requests=True)
            _, error = answers.next()
            assert "CANCELLED" in str(error.status())
            await client.start_stream(answers)
            await client.async_stream_infer("repeat", client.numbers(3))
            result, error = answers.next()
            assert (error, int(result.as_numpy("OUT")[0])) == (None, 3)
            await client.stop_stream()

    run(work())


def test_a_stream_that_takes_too_long(served: Running) -> None:
    async def work() -> None:
        async with connected("grpc", served) as client:
            for timeout_s in PATIENCE_S:
                answers = Answers()
                await client.start_stream(answers, stream_timeout=timeout_s)
                await client.async_stream_infer("repeat", client.numbers(1, WAITS))
                _, error = answers.next()
                if error is None:
                    break
                await client.stop_stream()
            _, error = answers.next()
            assert error.status() == "StatusCode.DEADLINE_EXCEEDED"
            await client.stop_stream()

    run(work())


def test_errors_that_end_a_stream(served: Running) -> None:
    """With triton_grpc_error a model's error is the status of the call."""

    async def work() -> None:
        async with connected("grpc", served) as client:
            answers = Answers()
            await client.start_stream(answers, headers={"triton_grpc_error": "true"})
            await client.async_stream_infer("repeat", client.numbers(1, FAILS, 2))
            assert answers.next()[1] is None
            _, error = answers.next()
            assert (error.status(), error.message()) == ("StatusCode.INTERNAL", "a bad value")
            await client.stop_stream()

    run(work())


def test_an_aio_stream_that_is_left(served: Running) -> None:
    async def work() -> None:
        async with connected("grpc.aio", served) as client:

            async def asking() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "repeat", "inputs": client.numbers(1, WAITS, 2)}
                await asyncio.Event().wait()

            stream = await client.stream_infer(asking())
            result, error = await anext(stream)
            assert (error, int(result.as_numpy("OUT")[0])) == (None, 1)
            assert stream.cancel()

            async def once() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "repeat", "inputs": client.numbers(4)}

            found = [int(r.as_numpy("OUT")[0]) async for r, _ in await client.stream_infer(once())]
            assert found == [4]

    run(work())


# --- one request, one answer -----------------------------------------------------------------------


@pytest.mark.parametrize("flavour", BLOCKING)
def test_decoupled_models_have_streams_only(served: Running, flavour: str) -> None:
    async def work() -> None:
        async with connected(flavour, served) as client:
            with pytest.raises(Refused, match="support models with decoupled transaction policy"):
                await client.infer("repeat", client.numbers(1))

    run(work())


@pytest.mark.parametrize("flavour", ["grpc", "grpc.aio"])
def test_a_deadline(served: Running, held: Path, flavour: str) -> None:
    """The model hears of it, and goes on with the next request."""

    async def work() -> None:
        async with connected(flavour, served) as client:
            for timeout_s in PATIENCE_S:
                with pytest.raises(Refused) as late:
                    await client.infer("held", client.numbers(1), client_timeout=timeout_s)
                assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
                if (held / "began").exists():
                    break
            until((held / "left").exists, "the model sees that its caller has left")
            assert (await client.infer("held", client.numbers(0))).as_numpy("OUT").tolist() == [0]
            assert await client.is_server_live(client_timeout=60)

    run(work())


def test_a_cancelled_call(served: Running, held: Path) -> None:
    async def work() -> None:
        async with connected("grpc", served) as client:
            answers = Answers()
            handle = await client.async_infer("held", client.numbers(1), answers)
            until((held / "began").exists, "the model runs")
            handle.cancel()
            until((held / "left").exists, "the model sees that its caller has left")
            result, error = answers.next()
            assert result is None
            assert "CANCELLED" in str(error.status())
            assert (await client.infer("held", client.numbers(0))).as_numpy("OUT").tolist() == [0]

    run(work())


@pytest.mark.parametrize("flavour", ["http.aio", "grpc.aio"])
def test_a_cancelled_task(served: Running, held: Path, flavour: str) -> None:
    """Nobody waits any more: the model is told, over HTTP by the closed connection."""

    async def work() -> None:
        async with connected(flavour, served) as client:
            asking = asyncio.ensure_future(client.infer("held", client.numbers(1)))
            await asyncio.to_thread(until, (held / "began").exists, "the model runs")
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(until, (held / "left").exists, "the model sees that its caller has left")
            assert (await client.infer("held", client.numbers(0))).as_numpy("OUT").tolist() == [0]

    run(work())


# --- generate --------------------------------------------------------------------------------------


def generate(served: Running, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    url = f"http://{served.http}/v2/models/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read()
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, fault.headers["Content-Type"], fault.read()


def test_generate(served: Running) -> None:
    status, kind, body = generate(served, "chat/generate", {"text_input": "a b", "id": "g1"})
    shown = {"id": "g1", "model_name": "chat", "model_version": "1", "text_output": "A B"}
    assert (status, kind, json.loads(body)) == (200, "application/json", shown)
    status, _, body = generate(served, "chat/generate", {"text_input": "a b", "stream": True})
    assert "expects model to produce exactly 1 response" in json.loads(body)["error"]
    status, _, body = generate(served, "simple/generate", {"INPUT0": [1] * 16, "INPUT1": [2] * 16})
    assert (status, json.loads(body)["OUTPUT1"]) == (200, [-1] * 16)
    status, _, body = generate(served, "simple/generate", {"INPUT0": [1] * 15, "INPUT1": [2] * 16})
    assert (status, "can not convert input 'INPUT0'" in json.loads(body)["error"]) == (400, True)


def test_generate_stream(served: Running) -> None:
    status, kind, body = generate(served, "chat/generate_stream", {"text_input": "a b c", "stream": True})
    events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line]
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert [event["text_output"] for event in events] == ["A", "B", "C"]
    status, _, body = generate(served, "repeat/generate_stream", {"IN": [5, FAILS, 6]})
    events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line]
    assert (status, events[0]["OUT"], events[1]) == (200, 5, {"error": "a bad value"})


def test_the_rows_of_others(served: Running) -> None:
    """A stream, and clients of one answer each, at the same model at the same time."""

    async def work() -> None:
        async with connected("grpc.aio", served) as streaming, connected("http.aio", served) as asking:

            async def stream() -> None:
                async def requests(client: Client) -> AsyncIterator[dict[str, Any]]:
                    for n in range(50):
                        yield {"model_name": "simple", "inputs": client.pair(COUNT * n), "request_id": str(n)}

                found = [result async for result, _ in await streaming.stream_infer(requests(streaming))]
                assert [int(result.get_response().id) for result in found] == list(range(50))
                for number, result in enumerate(found):
                    assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT * number + ONES)

            async def ask(number: int) -> None:
                result = await asking.infer("simple", asking.pair(COUNT * 1000 + number))
                assert np.array_equal(result.as_numpy("OUTPUT0"), COUNT * 1000 + number + ONES)

            await asyncio.gather(stream(), *(ask(number) for number in range(50)))

    run(work())
