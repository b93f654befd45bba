"""`pytest -p tests.again`: tests that failed are run once more, alone in one process.

Tests here wait for real processes on a shared machine. If one of 14,000 lost a race, the result of the run
would be useless; a test with a real fault fails again. Tests that pass alone are listed in the last lines as
races to fix, in the test or in the product. More failures than MOST are not taken for races. A run in which a
process died or a module could not be imported fails in any case: some tests did not run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest

MOST = 10


class SecondTry:
    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.all_ran = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.all_ran = self.all_ran and not report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield  # the failures have been told
        excusable = self.all_ran and not session.shouldfail and 0 < len(self.failed) <= MOST
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not excusable:
            return
        print(f"\nOnce more, alone: {len(self.failed)} that failed among others", flush=True)
        # A skip that is not listed fails alone, too.
        listed = ["-p", "tests.skips"] if session.config.pluginmanager.has_plugin("tests.skips") else []
        alone = [sys.executable, "-m", "pytest", *listed, *self.failed]
        if subprocess.run(alone).returncode == 0:
            session.exitstatus = pytest.ExitCode.OK
            print(
                "RACE, to be mended (failed among others, passed alone):",
                *self.failed,
                sep="\n  ",
                flush=True,
            )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SecondTry())
