"""Number of examples that hypothesis tries for a property, by profile.

    @examples(300)      120 in the suite, 60 in `make test-fast`, 3000 in `make torture`
    @given(...)

Every run tries new examples, so a few in each run find over time what many would find at once. A property
without a number gets 40, 20 and 1000.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

EXAMPLES = 100
"""The base of all numbers: hypothesis' own default."""
SUITE, FAST, TORTURE = 40, 20, 1000


def load_profile() -> None:
    """Load the suite's profile; --hypothesis-profile may name another afterwards."""
    # How long an example takes says nothing on a machine that others use.
    own: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("suite", print_blob=True, max_examples=SUITE, **own)
    suite = settings.get_profile("suite")
    settings.register_profile("fast", suite, max_examples=FAST)
    settings.register_profile("torture", suite, max_examples=TORTURE)
    settings.load_profile("suite")


def examples(number: int, **more: Any) -> settings:
    """Settings for `number` examples per hundred of the profile's; `more` are hypothesis' own."""
    return settings(max_examples=-(-number * settings.default.max_examples // EXAMPLES), **more)
