"""Version policies: which of the version folders at hand are wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastserve.config import VersionPolicy

_NUMBER = re.compile(r"[0-9]{1,40}")
HIGHEST = 2**63 - 1


def version_number(folder_name: str) -> int | None:
    """The version a folder name stands for ("00000123" is 123), None when it is no int64 (spec 5)."""
    if not _NUMBER.fullmatch(folder_name):
        return None
    number = int(folder_name)
    return number if number <= HIGHEST else None


def wanted_versions(policy: VersionPolicy, numbers: Iterable[int]) -> list[int]:
    """The wanted ones of the versions at hand, lowest first."""
    ordered = sorted(set(numbers))
    if policy == "all":
        return ordered
    if policy.specific is not None:
        return [number for number in ordered if number in policy.specific]
    return ordered[-(policy.latest or 1) :]


def missing_versions(policy: VersionPolicy, numbers: Iterable[int]) -> list[int]:
    """Versions the policy names outright that are not at hand."""
    if policy == "all" or policy.specific is None:
        return []
    return sorted(set(policy.specific) - set(numbers))


def policy_text(policy: VersionPolicy) -> str:
    """The policy in words: "all versions", "the latest 2", "versions 1, 3"."""
    if policy == "all":
        return "all versions"
    if policy.specific is not None:
        return "versions " + ", ".join(map(str, sorted(policy.specific)))
    count = policy.latest or 1
    return "the latest version" if count == 1 else f"the latest {count} versions"
