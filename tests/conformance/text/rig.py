"""One server with a text model that does what its prompt says, inside the tests' own loop.

plain|      one two three, then its end
hold|       one, then nothing until `go`, then two three
silent|     nothing until `go`, then one two three
for ever|   more, as long as it is wanted
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from fastserve.metrics import names
from fastserve.server import Server
from fastserve.settings import Listener, Settings, TextgenOptions
from tests.conformance.text.apis import FULL, MODEL, TEXT, VECTOR, Api, Reply
from tests.conformance.text.lines import Line, open_line

SLOTS, WAITING = 2, 2
SOURCE = """
import pathlib
import time

FOLDER = pathlib.Path({folder!r})

class Model:
    info = {{"tokenizer": ""}}

    def __init__(self, config):
        pass

    def generate(self, request):
        word = request.text.partition("|")[0]
        while word == "for ever":
            yield 9, "more "
        words = iter(("one ", "two ", "three "))
        if word == "hold":
            yield 1, next(words)
        while word != "plain" and not (FOLDER / "go").exists():
            time.sleep(0.001)
            yield None
        for at, text in enumerate(words):
            yield 5 + at, text
"""
VECTORS = """
import pathlib
import time
from array import array

from fastserve.codec.generation import Extra, Finish, write_text

FOLDER = pathlib.Path({folder!r})
MADE = write_text(Extra(vector=array("f", {vector}).tobytes()))

class Model:
    info = {{"tokenizer": "", "embeds": 3, "writes": False}}

    def __init__(self, config):
        self.asked, self.ended = {{}}, {{}}

    def submit(self, request):
        self.asked[request.rid] = request.note.text

    def cancel(self, rid, why):
        if rid in self.asked:
            self.ended[rid] = why

    def pending(self):
        return len(self.asked)

    def step(self, out):
        for rid, why in self.ended.items():
            out.end(rid, why)
            del self.asked[rid]
        self.ended.clear()
        go = (FOLDER / "go").exists()
        for rid, text in list(self.asked.items())[:{slots}]:
            if go or text.startswith("plain"):
                out.end(rid, Finish.STOP, MADE)
                del self.asked[rid]
        time.sleep(0.001)
        return True

    def close(self):
        pass
"""
"""A model of the same words and vector: an engine that runs its sequences itself."""
CONFIG = {
    "backend": "text_python",
    "text": {
        "max_sequences": SLOTS,
        "max_waiting": WAITING,
        "max_new_tokens": 1 << 20,
        "max_tokens": 1 << 21,
    },
    "restart_backoff_s": 0.01,
    "restart_backoff_max_s": 0.02,
}
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"


class TextRig:
    """An open server; everything of it runs inside `run`."""

    def __init__(self, folder: Path, source: str = SOURCE) -> None:
        self.folder, self._source = folder, source
        self.loop = uvloop.new_event_loop()
        # Of many threads each test that makes one more would leave it behind.
        self.loop.set_default_executor(ThreadPoolExecutor(1))
        self.write(MODEL)
        self.server = Server(
            Settings(
                repository=str(folder),
                http=(Listener("127.0.0.1:0", ("textgen",)), Listener("127.0.0.1:0", ("kserve_v2",))),
                grpc=(Listener("127.0.0.1:0", ("kserve_v2",)),),
                model_control="explicit",
                load_models=("*",),
                textgen=TextgenOptions(default_model=MODEL),
                drain_s=5.0,
            )
        )
        self.lines: list[Line] = []

    def write(self, model: str, more: str = "") -> None:
        place = self.folder / model / "1"
        place.mkdir(parents=True, exist_ok=True)
        source = self._source.format(folder=str(self.folder), vector=VECTOR, slots=SLOTS)
        (place / "model.py").write_text(source + more)
        (place / "chat_template.jinja").write_text(TEMPLATE)
        (self.folder / model / "model.yaml").write_text(json.dumps(CONFIG))

    async def open(self) -> None:
        await self.server.open()
        await asyncio.to_thread(int)
        front = self.server.front
        self.http = {"textgen": front.http[0].address, "kserve_v2": front.http[1].address}
        self.channel = grpc.aio.insecure_channel("{}:{}".format(*front.grpc[0].address))
        await self.channel.channel_ready()

    async def close(self) -> None:
        await self.channel.close()
        await self.server.drain(5)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """A test; afterwards everybody is gone, and nothing may be held or be in a gauge."""
        self.loop.run_until_complete(asyncio.wait_for(self._run(work), 200))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            for line in self.lines:
                line.leave()
            self.lines.clear()
            self.go()
        await self.settled()

    async def settled(self) -> None:
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: not any(self.held()))
        assert not any(self.held()), self.held()

    def held(self) -> list[float]:
        """Return the rows outstanding in any arena, and the gauges."""
        queues = [hosted.queue for hosted in self.server.host.hosted.values()]
        levels = self.server.registry.read(names.TEXT_RUNNING, names.TEXT_WAITING, names.TEXT_KV_USED)
        return [
            *(queue.ring.outstanding() for queue in queues),
            *(queue.ring.slab_pages_used() for queue in queues),
            *(queue.waiting + queue.unreleased for queue in queues),
            *(level for found in levels for (level,) in found.values()),
        ]

    async def until(self, true: Callable[[], object], limit_s: float = 60.0) -> None:
        end = self.loop.time() + limit_s
        while not true():
            if self.loop.time() > end:
                raise TimeoutError(str(self.held()))
            await asyncio.sleep(0.001)  # below, uvloop does not wait at all

    # --- the model

    def stop(self) -> None:
        (self.folder / "go").unlink(missing_ok=True)

    def go(self) -> None:
        (self.folder / "go").touch()

    def kill(self) -> None:
        (hosted,) = [one for one in self.server.host.hosted.values() if one.version.model == MODEL]
        for pid in hosted.group.pids:
            os.kill(pid, signal.SIGKILL)

    def outstanding(self) -> int:
        return sum(one.queue.ring.outstanding() for one in self.server.host.hosted.values())

    async def until_held(self, count: int) -> None:
        """So many sequences have a place."""
        await self.until(lambda: self.outstanding() == count)

    # --- clients

    async def send(self, api: Api, transport: str, prompt: str, model: str = MODEL, **more: Any) -> Line:
        line = await open_line(transport, self.http[api.dialect], self.channel)
        self.lines.append(line)
        line.send(api.path_of(model), api.ask(prompt + "|", **more))
        return line

    async def ask(self, api: Api, transport: str, prompt: str = "plain", **more: Any) -> Reply:
        line = await self.send(api, transport, prompt, **more)
        reply = await line.rest()
        line.leave()
        return reply

    async def is_well(self, api: Api, transport: str) -> None:
        """It is answered as ever, but for a full queue: who has just left may still be there."""
        while True:
            reply = await self.ask(api, transport)
            said = api.read(reply)
            if not (api.is_told(reply, FULL) or "Exceeds maximum queue size" in said.error):
                assert (said.text, said.error) == (TEXT, ""), reply
                return

    def count(self, api: Api) -> Counter[str]:
        """Requests of its dialect and sequences, by how they ended, so far."""
        found: Counter[str] = Counter()
        requests, ends, rejects = self.server.registry.read(
            names.REQUESTS, names.TEXT_SEQUENCES, names.REJECTS
        )
        for labels, (value,) in requests.items():
            if labels[2] == api.dialect:
                found[labels[3]] += int(value)
        for series in (ends, rejects):
            for labels, (value,) in series.items():
                found[labels[-1]] += int(value)
        return +found


@contextlib.contextmanager
def open_text_rig(folder: Path, source: str = SOURCE) -> Iterator[TextRig]:
    rig = TextRig(folder, source)
    try:
        rig.loop.run_until_complete(rig.open())
        try:
            yield rig
        finally:
            rig.loop.run_until_complete(rig.close())
    finally:
        rig.loop.run_until_complete(rig.loop.shutdown_default_executor())
        rig.loop.close()
