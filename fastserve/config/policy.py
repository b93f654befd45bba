"""Which versions of a model are wanted, as written in a configuration. `repository.policy` applies it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

VersionNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class PolicyChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{latest: N}` or `{specific: [N, ...]}`, exactly one of them."""

    latest: Annotated[int, Meta(ge=0, description="The N highest versions; 0 means 1.")] | None = None
    specific: Annotated[list[VersionNumber], Meta(min_length=1, description="These versions.")] | None = None

    def __post_init__(self) -> None:
        if (self.latest is None) == (self.specific is None):
            raise ValueError("latest, specific: exactly one of them must be given")


VersionPolicy = PolicyChoice | Literal["all"]
DEFAULT_POLICY: VersionPolicy = PolicyChoice(latest=1)
