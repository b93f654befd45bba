"""`pytest -p tests.again`: tests that failed are run again, alone in one process, at most TRIES times.

Tests here wait for real processes on a shared machine. If one of 14,000 lost a race, the result of the run
would be useless; a test with a real fault fails each time. Tests that pass alone are listed in the last
lines as races to fix, in the test or in the product. More failures than MOST are not taken for races. A run
in which a process died or a module could not be imported fails in any case: some tests did not run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest

MOST = 10
TRIES = 2


class Retries:
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
        for left in reversed(range(TRIES)):
            print(
                f"\nOnce more, alone: {len(self.failed)} that failed; then {left} tries are left", flush=True
            )
            status = subprocess.run(
                [sys.executable, "-m", "pytest", *again_options(session.config), *self.failed]
            )
            if status.returncode == 0:
                break
        else:
            return
        session.exitstatus = pytest.ExitCode.OK
        print("RACE, to be mended (failed among others, passed alone):", *self.failed, sep="\n  ", flush=True)


def again_options(config: pytest.Config) -> list[str]:
    """Return the options that a second run needs: a skip that is not listed fails there, too."""
    if not config.pluginmanager.has_plugin("tests.skips"):
        return []
    extras = config.getoption("--extras", None)
    return ["-p", "tests.skips", *(["--extras", extras] if extras else [])]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Retries())
