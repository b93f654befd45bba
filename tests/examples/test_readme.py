"""The README's own model: its files, and the commands below them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.running import CLI, Running

ROOT = Path(__file__).parents[2]


def run(*words: str, folder: Path) -> str:
    command = [sys.executable, "-m", CLI, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_your_own_model(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().split("## Your own model")[1].split("\n## ")[0]
    for path, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", section, re.DOTALL):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert sorted(file.name for file in tmp_path.rglob("*.*") if file.is_file()) == ["model.py", "model.yaml"]
    commands = re.findall(r"^fastserve (\w+) (.*?)(?: +#.*)?$", section, re.MULTILINE)
    assert [name for name, _ in commands[:4]] == ["check", "serve", "infer", "bench"]
    assert "scale: version 1" in run("check", "models", folder=tmp_path)
    with Running(tmp_path / "models", tmp_path / "log") as server:
        model, rows = commands[2][1].split(" ", 1)
        url = f"http://{server.http}"
        answer = run("infer", model, rows.strip('"'), "--url", url, folder=tmp_path)
        assert json.loads(answer) == [3, 6, 9, 12]
        run("bench", commands[3][1], "--url", url, "-d", "0.1", "--warm-up", "0", folder=tmp_path)
