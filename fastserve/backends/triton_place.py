"""Where a model's exception comes from, in Triton's form, below its words:

    At:
      NAME/1/model.py(12): scale
      NAME/1/model.py(7): execute

Files are told from the repository on, or from the folder they are imported from: a caller learns nothing of
the machine. Frames of the server and of asyncio are left out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import traceback
from pathlib import Path

MOST_FRAMES = 20
_OURS = (
    *(f"{Path(str(package.__file__)).parent}/" for package in (asyncio, concurrent.futures)),
    f"{Path(__file__).parents[1]}/",
)


def tell_place(error: BaseException, repository: Path) -> str:
    """The text to put behind an exception's words, innermost frame first; "" when no frame is the model's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    if not frames:
        return ""
    folders = [str(repository), *sorted(sys.path, key=len, reverse=True)]
    inner_first = frames[: -MOST_FRAMES - 1 : -1]
    lines = [f"  {_shorten(f.filename, folders)}({f.lineno}): {f.name}\n" for f in inner_first]
    return "\n\nAt:\n" + "".join(lines)


def _shorten(file: str, folders: list[str]) -> str:
    for folder in folders:
        if folder and file.startswith(folder + "/"):
            return file[len(folder) + 1 :]
    return Path(file).name
