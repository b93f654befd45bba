"""The example of docs/app.md, and the first model of the README, served as they are written."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.app.apps import RunningApp

ROOT = Path(__file__).parents[2]


def test_the_example(tmp_path: Path) -> None:
    with RunningApp(ROOT / "examples" / "app" / "app.py", tmp_path / "log") as server:
        assert server.ask("/greet", {"name": "Ann"}) == {"text": "Hello Ann! "}
        assert server.ask("/scale", {"x": [1, 2, 3, 4]}) == [3, 6, 9, 12]
        asked = {"title": "a", "words": ["one", "three", "two"]}
        assert server.ask("/v1/longest", asked) == {"title": "a", "word": "three"}
        assert server.ask("/Classifier", {"numbers": [1, 0, 0, 0]}) == {"class": 1, "scores": [0, 1]}
        said = server.post("/countdown", {"start": 2}, accept="text/event-stream")[2]
        assert said == b'data: {"left":2}\n\ndata: {"left":1}\n\n'


def test_the_model_of_the_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(
        r"```python\n# app.py\n(.*?)```.*?8000(\S+) -d '(.*?)'\n```\n\n```\n(.*?)\n```", text, re.DOTALL
    )
    assert found is not None
    source, path, body, answer = found.groups()
    assert len([line for line in source.splitlines() if line]) == 5
    file = tmp_path / "app.py"
    file.write_text(source)
    with RunningApp(file, tmp_path / "log") as server:
        assert server.post(path, json.loads(body))[2].decode() == answer
