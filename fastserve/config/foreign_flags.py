"""What command lines of other servers have in common: words for yes and no, flags that are not built."""

from __future__ import annotations

from fastserve.config.fields import fault_text

BOOLS = {"true": True, "1": True, "false": False, "0": False}


def unbuilt_fault(name: str, value: str, idle: str) -> str:
    """Why a flag that is not built cannot be taken; "" where it asks for nothing, as with `idle`."""
    if value == idle or (idle == "false" and BOOLS.get(value.lower()) is False):
        return ""
    return fault_text(f"--{name}", value, f"{idle or 'nothing'}: this flag is not built")
