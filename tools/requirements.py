"""Print requirements that pyproject.toml lists, one a line.

    python tools/requirements.py requires                    # of the build
    python tools/requirements.py dependencies tensorflow     # of the package and of an extra

Python 3.10 has no tomllib and nothing is installed yet, so the lists are cut out of the text.
"""

import ast
import re
import sys
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def listed(name: str) -> list[str]:
    """The requirements of the list `name`."""
    found = re.search(rf"^{name} = (\[.*?\]) *(#[^\n]*)?$", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"pyproject.toml has no list {name}")
    requirements: list[str] = ast.literal_eval(found.group(1))
    return requirements


if __name__ == "__main__":
    print(*(line for name in sys.argv[1:] for line in listed(name)), sep="\n")
