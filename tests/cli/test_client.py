"""The client commands, and `fastserve.Client`, of a server that asks for API keys."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from click.testing import CliRunner, Result
from tritonclient.utils import InferenceServerException

from fastserve import AsyncClient, Client
from fastserve.cli import main
from fastserve.errors import Kind, ServeError
from fastserve.settings.key_file import changing, make_key
from tests.running import Running

MODELS = ("--load-model", "half_plus_two", "--load-model", "scribe")
LOAD = ("bench", "half_plus_two", "-c", "2", "-d", "0.1", "--warm-up", "0")
COMMANDS = [
    (("models",), "metadata"),
    (("infer", "half_plus_two", "[1.0]"), "infer"),
    (("generate", "LAWYER, n.", "--model", "scribe", "-n", "3"), "infer"),
    (LOAD, "metadata"),
]


class KeyedServer(Running):
    """A server of the demo, with its keys by name."""

    def __init__(self, folder: Path) -> None:
        self.keys = {}
        with changing(folder / "keys.yaml") as entries:
            for name, scopes in {
                "both": ("infer", "metadata"),
                "reads": ("metadata",),
                "asks": ("infer",),
            }.items():
                self.keys[name], entry = make_key(name, scopes)  # type: ignore[arg-type]
                entries.append(entry)
        super().__init__(Path("demo"), folder / "log", "--keys", str(folder / "keys.yaml"), *MODELS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    uvloop.new_event_loop().close()  # libuv opens a pipe for signals once in a process
    keyed = KeyedServer(tmp_path_factory.mktemp("keyed"))
    with keyed:
        yield keyed


def run(server: KeyedServer, *command: str, key: str = "", **environment: str) -> Result:
    words = [*command, "--url", f"http://{server.http}", *(["--api-key", key] if key else [])]
    return CliRunner().invoke(main, words, env={"FASTSERVE_API_KEY": None, **environment})


@pytest.mark.parametrize(("command", "scope"), COMMANDS, ids=lambda given: given[0] if given else "")
def test_a_command_sends_its_key(server: KeyedServer, command: tuple[str, ...], scope: str) -> None:
    without = run(server, *command)
    assert (without.exit_code, without.output.count("--api-key or FASTSERVE_API_KEY")) == (1, 1), (
        without.output
    )
    assert run(server, *command, key=server.keys["both"]).exit_code == 0
    lacking = server.keys["reads" if scope == "infer" else "asks"]
    refused = run(server, *command, FASTSERVE_API_KEY=f" {lacking}\n")
    assert (refused.exit_code, f"403: this API key lacks the scope {scope}" in refused.output) == (1, True)


@pytest.mark.parametrize("protocol", ["tfserving", "v2-binary", "v2-grpc"])
def test_the_load_generator_sends_it_with_each_request(server: KeyedServer, protocol: str) -> None:
    where = ("--protocol", protocol, "--grpc", server.grpc)
    done = run(server, *LOAD, *where, FASTSERVE_API_KEY=server.keys["both"])
    assert done.exit_code == 0, done.output
    assert set(re.findall(r"status (\w+)", done.output)) == {"OK" if protocol == "v2-grpc" else "200"}
    refused = run(server, *LOAD, *where, key=server.keys["reads"])
    assert refused.exit_code == 1
    assert set(re.findall(r"status (\w+)", refused.output)) == {
        "PERMISSION_DENIED" if protocol == "v2-grpc" else "403"
    }


def test_a_key_that_no_header_can_have_is_not_repeated(server: KeyedServer) -> None:
    done = run(server, "models", key="secret\nx: y")
    assert (done.exit_code, "a header cannot have" in done.output, "secret" in done.output) == (
        2,
        True,
        False,
    )


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_client_sends_its_key(server: KeyedServer, kind: str) -> None:
    url = f"{kind}://{getattr(server, kind)}"
    with Client(url, api_key=server.keys["both"]) as client:
        assert client.half_plus_two([2.0]).tolist() == [3.0]
    with Client(url) as client, pytest.raises(ServeError, match="a valid API key is required") as found:
        client.half_plus_two([2.0])
    assert found.value.kind is Kind.UNAUTHENTICATED
    with (
        Client(url, api_key=server.keys["asks"]) as client,
        pytest.raises(ServeError, match="scope metadata"),
    ):
        client.half_plus_two([2.0])

    async def ask() -> Any:
        async with AsyncClient(url, api_key=server.keys["both"]) as client:
            return await client.half_plus_two([2.0])

    assert asyncio.run(ask()).tolist() == [3.0]


@pytest.mark.lingers  # the first client of gevent's opens a loop, for good
@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_tritonclient_sends_it_as_docs_clients_says(server: KeyedServer, kind: str) -> None:
    module = import_module(f"tritonclient.{kind}")
    row = np.array([2.0], np.float32)
    with module.InferenceServerClient(getattr(server, kind)) as client:
        x = module.InferInput("x", row.shape, "FP32")
        x.set_data_from_numpy(row)
        headers = {"authorization": f"Bearer {server.keys['asks']}"}
        assert client.infer("half_plus_two", [x], headers=headers).as_numpy("y").tolist() == [3.0]
        with pytest.raises(InferenceServerException, match="a valid API key is required"):
            client.infer("half_plus_two", [x])


def test_a_client_has_one_key() -> None:
    with pytest.raises(ValueError, match="api_key: not beside a header authorization"):
        Client("http://127.0.0.1:1", headers={"Authorization": "Bearer a"}, api_key="b")
