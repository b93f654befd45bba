"""h2spec in strict mode, where FASTSERVE_H2SPEC names it (tools/build_h2spec.sh builds it)."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.net.kit import run, serving
from tests.net.tls.kit import credentials

H2SPEC = os.environ.get("FASTSERVE_H2SPEC", "")


@pytest.mark.skipif(not H2SPEC, reason="FASTSERVE_H2SPEC does not name an h2spec")
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("tls", [True, False])
def test_h2spec(alone: bool, tls: bool) -> None:
    async def main() -> None:
        endpoints = {"/": lambda call: call.reply(200, b"hello", b"text/plain")}
        async with serving(endpoints, only_http2=alone, tls=credentials() if tls else None) as listener:
            command = [H2SPEC, "--strict", "--host", "127.0.0.1", "--port", str(listener.address[1])]
            command += ["--tls", "--insecure"] if tls else []
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            told = (await process.communicate())[0].decode()
        assert "147 tests" in told
        if alone or tls:  # ALPN has said that it is HTTP/2
            assert "147 passed, 0 skipped, 0 failed" in told, told[told.find("Failures") :]
        else:  # what is no preface is a request of HTTP/1.1 there, and is answered 400 in its words
            assert "146 passed, 0 skipped, 1 failed" in told, told[told.find("Failures") :]
            assert "Sends invalid connection preface" in told[told.find("Failures") :]

    run(main())
