"""Where a model's exception comes from, in Triton's form, below its words:

    At:
      NAME/1/model.py(12): scale
      NAME/1/model.py(7): execute

Only files of the repository are told, from it on: a caller learns nothing of the machine or of
the server. Triton tells of every frame, by its whole path.
"""

from __future__ import annotations

import traceback
from pathlib import Path

MOST_FRAMES = 20


def tell_place(error: BaseException, repository: Path) -> str:
    """The text to put behind an exception's words, innermost frame first; "" when no frame is the model's."""
    root = f"{repository}/"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(root)]
    if not frames:
        return ""
    inner_first = frames[: -MOST_FRAMES - 1 : -1]
    lines = [f"  {f.filename.removeprefix(root)}({f.lineno}): {f.name}\n" for f in inner_first]
    return "\n\nAt:\n" + "".join(lines)
