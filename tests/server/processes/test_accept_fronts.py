"""Connections of a server with several front processes: even, and never lost with one of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc.aio
import pytest

from fastserve.protos import load
from fastserve.server import Server
from fastserve.settings import Listener, Settings
from tests import proc
from tests.server.rig import Client, Served, run, serving, write_model

pb = load("kserve_v2")
BOUND_S = 15.0  # of an answer: a front that is stopped is noticed after a quarter of a second


def counts(served: Served, port: int = 0) -> list[int]:
    balancer = served.server.front.balancer
    assert balancer is not None
    return balancer.table.counts(port)


async def ask(served: Served, value: float = 1.0) -> Client:
    """A connection that was answered, within BOUND_S, and stays open."""
    client = await asyncio.wait_for(served.client(), BOUND_S)
    assert await asyncio.wait_for(client.predict(value), BOUND_S) == (200, [value * 2])
    return client


@pytest.mark.parametrize("fronts", [2, 3])
def test_connections_opened_one_by_one_differ_by_one_at_most(tmp_path: Path, fronts: int) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=fronts) as served:
            for opened in range(1, 2 * fronts + 2):
                await ask(served)
                found = counts(served)
                assert sum(found) == opened
                assert max(found) - min(found) <= 1, found

    run(work())


def test_a_socket_file_is_shared_by_all_fronts(tmp_path: Path) -> None:
    repository, path = tmp_path / "models", tmp_path / "s"
    write_model(repository)

    async def work() -> None:
        async with serving(repository, frontends=3, http=(Listener(f"unix:{path}"),)) as served:
            clients = [Client(*await asyncio.open_unix_connection(str(path))) for _ in range(6)]
            for client in clients:
                assert await client.predict(3.0) == (200, [6.0])
            assert counts(served) == [2, 2, 2]
            link = served.links[0]
            victim = link.pid
            os.kill(victim, signal.SIGKILL)
            await served.until(lambda: link.pid not in (0, victim) and link._listening)
            again = Client(*await asyncio.open_unix_connection(str(path)))
            assert await again.predict(4.0) == (200, [8.0])
            for client in (*clients, again):
                client.close()
        assert not path.exists()

    run(work())


def test_channels_of_grpc_on_a_port_for_all_protocols(tmp_path: Path) -> None:
    write_model(tmp_path)
    request = pb.ModelInferRequest(model_name="twice")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.0, 0.5])

    async def work() -> None:
        server = Server(
            Settings(
                repository=str(tmp_path),
                listen=(Listener("127.0.0.1:0"),),
                http=(),
                grpc=(),
                frontends=3,
                model_control="explicit",
                load_models=("*",),
                drain_s=5.0,
            )
        )
        await server.open()
        served = Served(server)
        place = f"127.0.0.1:{served.port}"
        channels = []
        for i in range(6):
            options = [("grpc.use_local_subchannel_pool", 1), ("fastserve.test", i)]
            channels.append(grpc.aio.insecure_channel(place, options=options))
            infer = channels[-1].unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                pb.ModelInferRequest.SerializeToString,
                pb.ModelInferResponse.FromString,
            )
            reply = await infer(request, timeout=BOUND_S)
            assert list(reply.outputs[0].contents.fp32_contents) == [2.0, 1.0] or reply.raw_output_contents
            assert max(counts(served)) - min(counts(served)) <= 1
        assert counts(served) == [2, 2, 2]
        for channel in channels:
            await channel.close()
        await server.drain(5)

    run(work())


def test_a_killed_fronts_new_connections_go_elsewhere_at_once(tmp_path: Path) -> None:
    """Connections are opened without a pause while it is killed; those that it had are lost, no other."""
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=3) as served:
            for _ in range(3):
                await ask(served)
            assert counts(served) == [1, 1, 1]
            link = served.links[0]
            victim = link.pid
            proc.stop(victim)  # what it is given from now on, it has never seen
            clients = [await served.client() for _ in range(30)]
            asked = [asyncio.ensure_future(client.predict(2.0)) for client in clients]
            os.kill(victim, signal.SIGKILL)
            answers = await asyncio.wait_for(asyncio.gather(*asked), BOUND_S)
            assert answers == [(200, [4.0])] * 30
            await served.until(lambda: link.pid not in (0, victim) and link._listening)
            before = sum(counts(served))
            while counts(served)[1] == 0:  # the new one is at the least, so it is given the next
                await ask(served)
            assert sum(counts(served)) <= before + 2

    run(work())


def test_a_stopped_front_is_given_nothing_after_a_moment(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def work() -> None:
        async with serving(tmp_path, frontends=3) as served:
            for _ in range(6):
                await ask(served)
            assert counts(served) == [2, 2, 2]
            (stopped, _) = served.links
            proc.stop(stopped.pid)
            try:
                for _ in range(6):
                    await ask(served)
                assert counts(served)[1] == 2
                began = time.monotonic()
                for _ in range(60):  # as many quarters of a second
                    await ask(served)
                assert time.monotonic() - began < BOUND_S, "nobody waited for it again and again"
                assert counts(served)[1] == 2
            finally:
                os.kill(stopped.pid, signal.SIGCONT)
            for _ in range(400):
                await ask(served)
                if counts(served)[1] > 2:
                    return
                await asyncio.sleep(0.01)  # its next beat tells the others that it runs
            raise AssertionError("it is given nothing though it runs")

    run(work())
