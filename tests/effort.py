"""How many examples a property is tried on, as the profile has it.

    @examples(300)      300 in the suite, 60 in `make test-fast`, 3000 in `make torture`
    @given(...)

Every run tries new ones: a number says what the suite may spend on a test each time it runs, not what is ever
tried. A test without a number has hypothesis' own, 100.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

SUITE_EXAMPLES = 100


def load_profile() -> None:
    """The suite's, unless --hypothesis-profile names another afterwards."""
    # How long an example takes says nothing on a machine that others use.
    own: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("suite", print_blob=True, max_examples=SUITE_EXAMPLES, **own)
    suite = settings.get_profile("suite")
    settings.register_profile("fast", suite, max_examples=SUITE_EXAMPLES // 5)
    settings.register_profile("torture", suite, max_examples=SUITE_EXAMPLES * 10)
    settings.load_profile("suite")


def examples(number: int, **more: Any) -> settings:
    """The settings of a test that is tried on `number` examples in the suite; `more` are hypothesis' own."""
    return settings(max_examples=-(-number * settings.default.max_examples // SUITE_EXAMPLES), **more)
