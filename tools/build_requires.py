"""Prints what pyproject.toml says the build needs, one requirement a line, for `make build`.

Python 3.10 has no tomllib and nothing is installed yet, so the one list is cut out of the text.
"""

import ast
import re
from pathlib import Path

text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
found = re.search(r"^requires = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
if found is None:
    raise SystemExit("pyproject.toml has no [build-system] requires")
print(*ast.literal_eval(found.group(1)), sep="\n")
