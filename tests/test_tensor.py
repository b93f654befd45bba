"""The numbers of element types: fastserve/tensor.py holds those of the compiled modules."""

from __future__ import annotations

import re
from pathlib import Path

from fastserve.tensor import DTYPES

HEADER = Path(__file__).resolve().parent.parent / "ext/include/tensor.h"


def test_codes_are_the_headers() -> None:
    """DTYPES has each type of `enum DTypeCode`, with its number and the size in dtype_bytes()."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    codes = re.search(r"enum DTypeCode[^{]*{([^}]*)}", text)
    sizes = re.search(r"SIZES\[DT_COUNT\] = {([^}]*)}", text)
    assert codes is not None
    assert sizes is not None
    names = re.findall(r"DT_(\w+)", codes[1])
    assert (names[0], names[-1]) == ("NONE", "COUNT")
    named = zip(names, map(int, sizes[1].split(",")), strict=False)
    header = {name.lower(): (code, size) for code, (name, size) in enumerate(named)}
    del header["none"]
    assert {dtype.name: (dtype.code, dtype.item_bytes) for dtype in DTYPES.values()} == header
