"""`pytest -p tests.forks --forks N`: collect once, and run the tests in N processes that are forked.

Collecting these 15,000 tests takes 10 s of CPU, of which torch and transformers, that some of them import,
are a third. Processes that are forked afterwards share all of it.

    this process                     each forked one
    collect, fork N       <- ask --  takes a file
    tell what came        <- ran --  runs its tests, in their order, and sends their reports

A file's tests stay together, and so do, as far as that keeps everybody busy, the files of a folder, which
share servers: a process goes on in its folder, then takes one where nobody is, then helps with what is left.
Files whose tests mostly wait for time to pass (`pytestmark = pytest.mark.waits`) are for one process, which
begins with them: the others have the processors meanwhile.
`--forks 0`, or none, is pytest as it is. A process that dies fails the test that it ran, and what nobody ran
fails the run.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests import alone

Items = range
"""Positions of one file's tests among the session's."""
AT_IMPORT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Read by libraries that are imported: OpenMP and OpenBLAS start no threads, no hub is asked for models."""


class Shares:
    """The files that nobody has taken yet, by folder."""

    def __init__(self, nodeids: Sequence[str], waiting: Collection[int] = ()) -> None:
        """`waiting` are the positions of tests in files that mostly wait."""
        self._left: dict[str, list[Items]] = {}
        self._waiting: list[Items] = []
        files = groupby(range(len(nodeids)), key=lambda at: nodeids[at].partition("::")[0])
        for file, positions in files:
            first, *more = positions
            taken = range(first, first + 1 + len(more))
            if first in waiting:
                self._waiting.append(taken)
            else:
                self._left.setdefault(file.rpartition("/")[0], []).append(taken)
        self._folders: dict[int, str] = {}

    def take(self, process: int) -> Items | None:
        """The next file of a process; None when all are taken."""
        if self._waiting and (process == 0 or not self._left):
            return self._waiting.pop(0)
        folder = self._folders.get(process, "")
        if folder not in self._left:
            free = self._left.keys() - self._folders.values()
            if free:
                folder = next(one for one in self._left if one in free)
            elif self._left:
                folder = max(self._left, key=lambda one: sum(map(len, self._left[one])))
            else:
                return None
            self._folders[process] = folder
        files = self._left[folder]
        taken = files.pop(0)
        if not files:
            del self._left[folder]
        return taken


@dataclass
class Process:
    """A forked process, as the one that collected sees it."""

    number: int
    pid: int
    line: Connection
    given: list[int] = field(default_factory=list)
    """Positions of tests that it was given and has not yet run."""

    def end(self) -> int:
        """Wait for its end; the exit status as subprocess has it."""
        self.line.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Forks:
    """Runs the session's tests in `count` processes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: dict[Connection, Process] = {}
        self._servers_own: frozenset[str] = frozenset()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Libraries that are imported meanwhile start no threads: a process that is forked has none of them,
        and GNU's OpenMP would wait for them for ever."""
        before = {name: os.environ.get(name) for name in AT_IMPORT}
        os.environ.update({name: value for name, value in AT_IMPORT.items() if before[name] is None})
        try:
            result = yield
            if warm := sys.modules.get("tests.warm"):
                self._servers_own = warm.import_torch()
                warm.freeze_for_good()
            return result
        finally:
            for name in AT_IMPORT:
                if before[name] is None:
                    del os.environ[name]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        config = session.config
        if session.testsfailed and not config.option.continue_on_collection_errors:
            return None  # pytest's own loop says so, as it does of --collect-only
        if config.option.collectonly or not session.items:
            return None
        waiting = {at for at, item in enumerate(session.items) if item.get_closest_marker("waits")}
        shares = Shares([item.nodeid for item in session.items], waiting)
        lost: list[str] = []
        try:
            for number in range(self._count):
                self._fork(session, number)
            while self._processes:
                for line in wait(list(self._processes)):
                    assert isinstance(line, Connection)
                    self._hear(session, self._processes[line], shares, lost)
                    if session.shouldfail or session.shouldstop:
                        self._interrupt()
                        raise session.Failed(session.shouldfail or session.shouldstop)
        finally:  # those who have not ended do so when they next ask or tell
            for process in self._processes.values():
                process.end()
            self._processes.clear()
        left = shares.take(0)
        while left is not None:
            lost += [session.items[at].nodeid for at in left]
            left = shares.take(0)
        if lost:
            session.shouldfail = (
                f"{len(lost)} tests did not run to their end, because a process died: {lost[0]} ..."
            )
            raise session.Failed(session.shouldfail)
        return True

    def _interrupt(self) -> None:
        """As Ctrl-C does, which all of them hear."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)

    def _fork(self, session: pytest.Session, number: int) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            theirs.close()
            self._processes[ours] = Process(number, pid, ours)
            return
        ours.close()
        for line in self._processes:
            line.close()
        if self._servers_own:
            sys.modules["tests.warm"].ZYGOTES.fork_with_torch(self._servers_own)
        run_share(session, theirs, number)

    def _hear(self, session: pytest.Session, process: Process, shares: Shares, lost: list[str]) -> None:
        try:
            word, *said = process.line.recv()
        except (EOFError, ConnectionError):
            self._bury(session, process, lost)
            return
        if word == "ask":
            taken = shares.take(process.number)
            process.given += taken or ()
            process.line.send(taken)
        elif word == "warned":
            text, place, told = said
            warning = warnings.WarningMessage(UserWarning(text), UserWarning, *place)
            session.config.hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": warning, **told}
            )
        else:
            at, reports = said
            process.given.remove(at)
            self._tell(session, session.items[at], reports)

    def _tell(self, session: pytest.Session, item: pytest.Item, reports: list[Any]) -> None:
        config, hook = session.config, item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in reports:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _bury(self, session: pytest.Session, process: Process, lost: list[str]) -> None:
        """A process has ended: well if it has run all that it was given."""
        del self._processes[process.line]
        status = process.end()
        if not process.given:
            return
        running, *never = (session.items[at] for at in process.given)
        lost += [running.nodeid, *(item.nodeid for item in never)]
        report = pytest.TestReport(
            running.nodeid, running.location, dict.fromkeys(running.keywords, 1), "failed",
            f"the process that ran {running.nodeid} has died, with status {status}", "call",
        )  # fmt: skip
        running.ihook.pytest_runtest_logreport(report=report)


# ---------------------------------------------------------------- the forked process


class Sender:
    """Sends what each test reports, in place of telling it here."""

    def __init__(self, config: pytest.Config, line: Connection) -> None:
        self._config, self._line = config, line
        self.at = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        data = [
            self._config.hook.pytest_report_to_serializable(config=self._config, report=one)
            for one in reports
        ]
        self._line.send(("ran", self.at, data))
        return True

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        place = warning_message.filename, warning_message.lineno
        self._line.send(("warned", text, place, {"when": when, "nodeid": nodeid, "location": location}))


def run_share(session: pytest.Session, line: Connection, number: int) -> NoReturn:
    """Run files until there is none left, and end this process."""
    status = 1
    try:
        settle_in(session.config, number)
        sender = Sender(session.config, line)
        session.config.pluginmanager.register(sender)
        following = Following(session.items, take_files(line))
        while (at := following.take()) is not None:
            sender.at, item = at, session.items[at]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        status = 0
    except (EOFError, ConnectionError, KeyboardInterrupt):  # nobody hears any more: end what has been begun
        session._setupstate.teardown_exact(None)
    except BaseException:
        session.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(status)


class Following:
    """The next test of this process, as pytest sees it when it ends what the next does not share.

    A file is asked for no sooner: the last test of the one before may take long, and others be free."""

    def __init__(self, items: Sequence[pytest.Item], positions: Iterator[int]) -> None:
        self._items, self._positions = items, positions
        self._taken: list[int | None] = []

    def listchain(self) -> list[Any]:
        """Return the next test's collectors and itself; nothing after the last."""
        if not self._taken:
            self._taken = [next(self._positions, None)]
        (at,) = self._taken
        return [] if at is None else self._items[at].listchain()

    def take(self) -> int | None:
        """Return the next test's position, None after the last, and go on to the one after it."""
        self.listchain()
        return self._taken.pop()


def take_files(line: Connection) -> Iterator[int]:
    while True:
        line.send(("ask",))
        taken = line.recv()
        if taken is None:
            return
        yield from taken


def settle_in(config: pytest.Config, number: int) -> None:
    """Have nothing in common with the other processes that one of them could disturb."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs beside
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    alone.ROOM.reopen()
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._given_basetemp, folders._basetemp = folders.getbasetemp() / f"process{number}", None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run in N forked processes")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks:
        config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        config.pluginmanager.register(Forks(config.option.forks))
