"""Fixtures of the library's tests."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture
def loop():
    """The loop that start() finds outside a running one: the thread's own."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.close()
    asyncio.set_event_loop(None)
