"""What the system tells of a process that may end at any time: of one that is gone, nothing.

A process that lives when it is listed may be gone when it is looked at; who reads /proc/PID himself must
know that this one lives.
"""

from __future__ import annotations

import os
from pathlib import Path


def read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it was read
        return ""


def name_of(pid: int) -> str:
    return read(pid, "comm").removesuffix("\n")


def children_of(pid: int) -> list[int]:
    """Of all its threads, those that end meanwhile included."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    return sorted(int(child) for task in tasks for child in read(pid, f"task/{task}/children").split())
