"""Finds the test modules that start servers or workers: `pytest --no-processes` leaves them out.

There is no list of tests: a module starts processes when its names, or those of a module under tests/ that
one of them comes from, include one of STARTERS. A short script in a process does not count; a module whose
commands start servers sets STARTS_PROCESSES.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

STARTERS = {
    ("tests.running", "Running"),
    ("fastserve.server.server", "Server"),
    ("fastserve.engine.loader", "Host"),
    ("fastserve.workers.group", "WorkerGroup"),
    ("fastserve.workers.process", "WorkerProcess"),
    ("fastserve.batching", "BatchedService"),
}


def origin(value: Any) -> tuple[str, str]:
    """The module a name's value comes from, and its name there; "" for a module itself."""
    if isinstance(value, ModuleType):
        return value.__name__, ""
    return str(getattr(value, "__module__", "")), str(getattr(value, "__name__", ""))


def starts_processes(module: ModuleType, seen: set[str]) -> bool:
    seen.add(module.__name__)
    places = {origin(value) for value in list(vars(module).values())}
    if places & STARTERS or getattr(module, "STARTS_PROCESSES", False):
        return True
    ours = {name for name, _ in places if name.startswith("tests.") and name not in seen}
    return any(starts_processes(sys.modules[name], seen) for name in ours if name in sys.modules)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-processes", action="store_true", help="leave out modules that start servers or workers"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--no-processes"):
        return
    modules = {item.module for item in items if isinstance(item, pytest.Function)}
    out = {module for module in modules if starts_processes(module, {"tests.conftest"})}
    left = [item for item in items if isinstance(item, pytest.Function) and item.module in out]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not (isinstance(item, pytest.Function) and item.module in out)]
