"""The logging call of this dialect sets the level of the whole package: each test gets it back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    logger = logging.getLogger("fastserve")
    before = logger.level
    yield
    logger.setLevel(before)
