"""The allocator's setting, in a process of its own because it cannot be taken back."""

from __future__ import annotations

import subprocess
import sys


def test_freed_memory_can_be_kept() -> None:
    code = (
        "import sys; from fastserve.wire import keep_freed_memory; sys.exit(0 if keep_freed_memory() else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
