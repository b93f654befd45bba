"""gRPC's interoperability cases by their names, with grpc-js (interop.js), on both transports.

They run where FASTSERVE_GRPC_JS names a folder that tools/install_grpc_js.sh has filled.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.net.grpc import test_interop
from tests.net.grpc.interop_service import serving
from tests.net.grpc.test_methods import run

SCRIPT = Path(__file__).with_name("interop.js")


@pytest.fixture
def folder() -> Path:
    named = os.environ.get("FASTSERVE_GRPC_JS", "")
    if not named or shutil.which("node") is None:
        pytest.skip(
            "FASTSERVE_GRPC_JS names no folder (tools/install_grpc_js.sh FOLDER), or there is no node"
        )
    return Path(named)


def test_grpc_js(folder: Path) -> None:
    told: list[str] = []

    async def main() -> None:
        async with serving() as place:
            command = ["node", str(SCRIPT), place]
            ask = partial(subprocess.run, command, cwd=folder, capture_output=True, timeout=120, text=True)
            asked = await asyncio.get_running_loop().run_in_executor(None, ask)
            assert asked.returncode == 0, asked.stderr
            told.extend(asked.stdout.splitlines())

    run(main())
    assert sorted(told) == sorted(f"{case.__name__} ok" for case in test_interop.CASES)
