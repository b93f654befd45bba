"""Write the documentation as a site: `make docs`, which needs mkdocs-material.

    python tools/build_docs.py

README.md is the first page. Links to files that are no pages, such as examples and modules, lead to the
repository if FASTSERVE_REPOSITORY_URL names it (https://host/owner/name/blob/main), else they are plain text.
A link to a page or a heading that is not there ends the build: mkdocs runs with --strict.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "site-pages"
FIRST = {"README.md": "index.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def list_sources() -> dict[str, Path]:
    """Return every file of the site by its path from the root of the checkout."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*")]
    return {path.relative_to(ROOT).as_posix(): path for path in found if path.is_file()}


def place(source: str) -> str:
    return FIRST.get(source, source)


def rewrite(text: str, source: str, sources: dict[str, Path], repository: str) -> str:
    """Return a page with links that hold in the site."""
    folder = Path(source).parent

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target or not target:
            return found[0]
        named = os.path.normpath(folder / target)
        if named in sources:
            relative = os.path.relpath(place(named), Path(place(source)).parent)
            return f"{image}[{words}]({relative}{anchor})"
        return f"[{words}]({repository}/{named}{anchor})" if repository else words

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def write_pages(repository: str) -> None:
    sources = list_sources()
    shutil.rmtree(PAGES, ignore_errors=True)
    for name, path in sources.items():
        target = PAGES / place(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(rewrite(path.read_text(), name, sources, repository))
        else:
            shutil.copy(path, target)


if __name__ == "__main__":
    write_pages(os.environ.get("FASTSERVE_REPOSITORY_URL", "").rstrip("/"))
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    raise SystemExit(subprocess.run(command).returncode)
