"""The source of workers and backends never unpickles, evaluates or forks (hardening I1)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOMS = Path(__file__).parents[2] / "fastserve"
FILES = sorted([*(ROOMS / "workers").rglob("*.py"), *(ROOMS / "backends").glob("*.py")])
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
# What runs the source of a class typed into a notebook, and what forks before there is a thread.
ALLOWED = {"class_source.py": {"exec", "compile"}, "fork_server.py": {"fork"}, "forked_worker.py": {"fork"}}
CALLS = {"eval", "exec", "compile", "fork", "forkpty", "system", "popen"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_dangerous_is_named(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in MODULES
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            mode = name == "eval" and isinstance(node.func, ast.Attribute) and not node.args  # an nn.Module's
            allowed = name in ALLOWED.get(path.name, set())
            assert (
                name not in CALLS
                or mode
                or allowed
                or ast.unparse(node.func) in ("re.compile", "torch.compile")
            )
            assert not [word for word in node.keywords if word.arg == "allow_pickle"]
