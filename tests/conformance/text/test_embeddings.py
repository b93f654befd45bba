"""The lives of requests for vectors: those of texts, with a model that makes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.serving.text import stream
from fastserve.serving.text.models import TextModel
from tests.conformance.text import test_lives as lives
from tests.conformance.text.apis import EMBEDDINGS, INTERNAL, LATE, TEXT
from tests.conformance.text.rig import VECTORS, TextRig, open_text_rig

TRANSPORTS = pytest.mark.parametrize("transport", ["h1", "h2"])


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextRig]:
    with open_text_rig(tmp_path_factory.mktemp("vectors"), VECTORS) as opened:
        yield opened


@TRANSPORTS
def test_lives(rig: TextRig, transport: str) -> None:
    lives.test_lives(rig, EMBEDDINGS, transport)


@TRANSPORTS
def test_clients_that_leave(rig: TextRig, transport: str) -> None:
    lives.test_clients_that_leave_at_any_byte(rig, EMBEDDINGS, transport)


def test_a_version_is_loaded_anew_and_unloaded(rig: TextRig) -> None:
    lives.test_a_version_is_loaded_anew_and_unloaded_under_streams(rig, EMBEDDINGS, "h1")


@pytest.mark.logs_errors
def test_the_next_worker_makes_what_a_lost_one_had_not(rig: TextRig) -> None:
    """Of a vector nothing has been said before it is there: nobody need hear of the death."""

    async def work() -> None:
        rig.stop()
        asked = [await rig.send(EMBEDDINGS, transport, "hold") for transport in ("h1", "h2")]
        await rig.until_held(2)
        rig.kill()
        rig.go()
        for line in asked:
            assert EMBEDDINGS.read(await line.rest()).text == TEXT
        await rig.is_well(EMBEDDINGS, "h1")

    rig.run(work())


@TRANSPORTS
def test_time_is_up(rig: TextRig, transport: str) -> None:
    async def work() -> None:
        rig.stop()
        reply = await rig.ask(EMBEDDINGS, transport, "hold", timeout=1)
        assert EMBEDDINGS.is_told(reply, LATE), reply

    rig.run(work())


@pytest.mark.logs_errors
@TRANSPORTS
@pytest.mark.parametrize("step", ["prompts", "note", "vector"])
def test_an_exception_at_each_step(
    rig: TextRig, monkeypatch: pytest.MonkeyPatch, transport: str, step: str
) -> None:
    """While prompts are read, one is begun, its vector comes: told, not how."""

    def fail(*_args: object, **_named: object) -> Any:
        raise RuntimeError("a secret of the server's")

    place, name = {
        "prompts": (TextModel, "_read_all"),
        "note": (stream.Embedding, "_begin"),
        "vector": (stream, "_read_vector"),
    }[step]

    async def work() -> None:
        rig.go()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            reply = await rig.ask(EMBEDDINGS, transport)
        assert EMBEDDINGS.is_told(reply, INTERNAL), reply
        assert b"secret" not in reply.body
        await rig.is_well(EMBEDDINGS, transport)

    rig.run(work())
