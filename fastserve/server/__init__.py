"""The composition root: the only place where rooms are built and wired. Nothing below imports it."""

from fastserve.garbage import unsearched

with unsearched():
    from fastserve.server.server import Server, run

__all__ = ["Server", "run"]
