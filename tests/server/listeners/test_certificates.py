"""The watch over certificates goes on, whatever it meets."""

from __future__ import annotations

import asyncio

import pytest

from fastserve.net.tls import Credentials
from fastserve.server.front import FileWatch
from fastserve.settings.server_settings import TlsOptions


class Failing(Credentials):
    """Certificates in a process that has no descriptor left."""

    looks = 0

    def renew(self) -> bool:
        self.looks += 1
        raise OSError("too many open files")


def test_what_nobody_foresaw_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        credentials = Failing(TlsOptions(poll_s=0.01))
        watch = FileWatch("certificates", credentials.renew, lambda: credentials.options.poll_s)
        watch.open()
        end = asyncio.get_running_loop().time() + 5
        while credentials.looks < 2 and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        watch.close()
        assert credentials.looks >= 2

    asyncio.run(work())
