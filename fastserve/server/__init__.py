"""The composition root: builds the packages below and wires them. Nothing below imports it."""

from fastserve.util.memory import gc_paused

with gc_paused():
    from fastserve.server.server import Server, run

__all__ = ["Server", "run"]
