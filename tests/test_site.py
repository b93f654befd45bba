"""The documentation builds as a site: every page is in its navigation, every link and heading is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import build_docs

ROOT = Path(__file__).resolve().parent.parent


def test_links_of_the_site() -> None:
    sources = {name: ROOT / name for name in ("README.md", "docs/app.md", "docs/dialects/grps.md", "LICENSE")}
    text = "[a](docs/app.md#types) [b](LICENSE) [c](tests/README.md) [d](https://x/y)\n```\n[e](no.md)\n```\n"
    page = build_docs.rewrite(text, "README.md", sources, "")
    assert page == "[a](docs/app.md#types) [b](LICENSE) c [d](https://x/y)\n```\n[e](no.md)\n```\n"
    inner = build_docs.rewrite(
        "[a](../../README.md) [c](../../tests/README.md)", "docs/dialects/grps.md", sources, "u"
    )
    assert inner == "[a](../../index.md) [c](u/tests/README.md)"


def test_the_site_builds() -> None:
    pytest.importorskip("material", reason="there is no mkdocs-material")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "tools/build_docs.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "build/site/docs/recipes/scikit-learn.html").exists()
