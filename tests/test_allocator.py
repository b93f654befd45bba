"""The allocator's setting, in a process of its own because it cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["keep_freed_memory", "share_heap"])
def test_it_can_be_set(name: str) -> None:
    code = f"import sys; from fastserve.allocator import {name}; sys.exit(0 if {name}() else 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
