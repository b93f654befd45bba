"""The text model of examples/, and the one that docs/writing-a-backend.md shows, served whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.server.rig import Served, run, serving

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text()


async def infer(served: Served, text: str, **parameters: object) -> dict[str, object]:
    client = await served.client()
    status, page = await client.post(
        "/infer", json.dumps({"inputs": text, "parameters": {**parameters, "details": True}}).encode()
    )
    assert status == 200, page
    found: dict[str, object] = json.loads(page)
    return found


def test_the_example() -> None:
    async def work() -> None:
        async with serving(ROOT / "examples" / "text_markov") as served:
            first, again, other = [
                await infer(served, "A request", seed=seed, max_new_tokens=100) for seed in (7, 7, 8)
            ]
            assert first == again
            assert first != other
            assert str(first["generated_text"]).endswith(".")
            assert first["details"]["finish_reason"] == "eos_token"  # type: ignore[index]

    run(work())


def test_the_guides_model(tmp_path: Path) -> None:
    for name, file in (("yaml", "model.yaml"), ("python", "1/model.py")):
        found = re.search(rf"```{name}\n# models/counting/{file}\n(.*?)```", PAGE, re.DOTALL)
        assert found is not None
        path = tmp_path / "counting" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found[1])

    async def work() -> None:
        async with serving(tmp_path) as served:
            assert (await infer(served, "a b c"))["generated_text"] == "3 2 1 "

    run(work())
