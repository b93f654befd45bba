"""A server of text models in a thread: the real dialect over a scripted engine, for commands that block."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from fastserve.codec.generation import Info
from fastserve.dialects.textgen import SPEC
from fastserve.settings import Settings
from tests.text_rig import LocalEngine, Said, Scripted, listening

INFO = Info(vocab_size=1 << 20, tokenizer="words", slots=64)


@contextmanager
def serving(
    script: Iterable[Said], names: tuple[str, ...] = ("tiny",), folder: Path | None = None, **more: Any
) -> Iterator[str]:
    """Its URL."""
    ready, urls = Event(), list[str]()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        with LocalEngine() as engine:
            for name in names:
                engine.add(name, Scripted(script, **{"info": INFO, **more}), folder)
            async with listening(SPEC.build(engine.context, SPEC.read_options(Settings()))) as port:
                urls.append(f"http://127.0.0.1:{port}")
                over = asyncio.Event()
                ends.append(lambda: loop.call_soon_threadsafe(over.set))
                ready.set()
                await over.wait()
                await engine.idle()

    ends: list[Any] = []
    thread = Thread(target=asyncio.run, args=(work(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        ends[0]()
        thread.join()
