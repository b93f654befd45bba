"""Requests that schemathesis makes of /openapi.json, to the demo: no 5xx, and no answer beside its schema.

docs/openapi.md has the same two commands. The first holds every answer against the document. The second looks
for 5xx; V2's inference is left out of it, whose malformed bodies are 500 as Triton's are.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.running import Running

COMMAND = shutil.which("schemathesis")
CONFIG = '[phases.coverage]\nunexpected-methods = ["PUT", "DELETE", "PATCH"]\n'
CONFORMS = "status_code_conformance,content_type_conformance,response_schema_conformance"
NO_FAULT = (
    "not_a_server_error",
    "--exclude-path-regex",
    "^/v2/models/[^/]+/(infer|generate|generate_stream)$",
)
LEAST_CASES = 300


@pytest.mark.skipif(COMMAND is None, reason="there is no schemathesis")
@pytest.mark.logs_errors
@pytest.mark.timeout(1200)  # thousands of requests, one after the other
def test_every_answer_is_as_described(tmp_path: Path) -> None:
    assert COMMAND is not None
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with Running(Path("demo"), tmp_path / "log") as server:
        start = [
            COMMAND,
            "run",
            f"http://{server.http}/openapi.json",
            "--phases",
            "examples,coverage,fuzzing",
        ]
        common = [*start, "--max-examples", "10", "--seed", "7", "--no-color"]
        for checks in ((CONFORMS,), NO_FAULT):
            command = [*common, "--checks", *checks]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=550)
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
            cases = int(done.stdout.split(" generated, ")[0].split()[-1])
            assert cases > LEAST_CASES, done.stdout[-2000:]
        assert server.alive
