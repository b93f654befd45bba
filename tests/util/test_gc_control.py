"""When garbage is searched for, and that what was there at the start is not looked at again."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from fastserve.util.memory import gc_paused


def fail() -> None:
    assert not gc.isenabled()
    raise ImportError


def test_imports_are_not_searched() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), gc_paused():
        fail()
    assert gc.isenabled()


def test_who_never_searches_goes_on_so() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_kept_is_not_searched_again() -> None:
    code = "import gc, fastserve.util.memory as g; g.gc_freeze(); print(len(gc.get_objects()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(found.stdout) < 100  # of thousands
