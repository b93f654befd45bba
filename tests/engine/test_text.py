"""Text versions on real workers: tokens arrive in order and whole, whoever leaves, dies or is slow."""

from __future__ import annotations

import asyncio

from fastserve.codec.text import Finish
from tests.text.serving import run, serving

SEED = "am a French photographer based in Paris.\nI have been shooting since I was 15"


def test_the_seeds_stream(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_rig("llm-seed1")
            heard = at.ask(version, max_new_tokens=20)
            assert await heard.end() is Finish.LENGTH
            assert heard.text == SEED
            assert heard.ids[-1] == 29945
            assert version.text is not None
            assert version.text.tokenizer == "words"

    run(work())


def test_many_at_once(tmp_path):
    async def work() -> None:
        async with serving(tmp_path) as at:
            version = await at.load_rig("llm-seed1")
            asked = [at.ask(version, max_new_tokens=1 + n % 50) for n in range(200)]
            ends = await asyncio.gather(*(heard.end() for heard in asked))
            assert set(ends) == {Finish.LENGTH}
            assert [len(heard.ids) for heard in asked] == [1 + n % 50 for n in range(200)]

    run(work())
