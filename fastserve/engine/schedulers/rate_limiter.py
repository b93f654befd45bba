"""The rate limiter: batches of different models share resources that are not memory or processes.

A batch runs only while the resources of its instance group are free. A pool is as large as the settings say,
or as the largest demand on it. When several models wait, the one with the least executions x priority goes
first, so that priority 1 runs twice as often as 2 (spec/triton_v2 section 4). One limiter per server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastserve.errors import invalid
from fastserve.settings.model_options import Needs

Resources = Mapping[str, int]


class RateLimiter:
    """Pools of resources, and the gates that wait for them."""

    def __init__(self, pools: Mapping[str, int]) -> None:
        self._fixed = dict(pools)
        self._gates: list[RateGate] = []
        self._used: dict[str, int] = {}

    def open_gate(self, needs: Needs) -> RateGate:
        """Return a gate for one version. Raises ServeError INVALID_ARGUMENT when it could never pass."""
        for name, count in needs.resources.items():
            if count > self._fixed.get(name, count):
                raise invalid(
                    f"rate_limiter resource '{name}': given {count}, allowed: up to {self._fixed[name]} "
                    "(rate_limit_resources)"
                )
        gate = RateGate(self, needs)
        self._gates.append(gate)
        return gate

    def close_gate(self, gate: RateGate) -> None:
        """Remove the gate of a version that is gone, and free its resources."""
        self._gates.remove(gate)
        for _ in range(gate.held):
            self.give_back(gate.needs)
        gate.held = 0
        self.hand_out()

    def fits(self, needs: Resources) -> bool:
        """True when all of it is free."""
        return all(self._used.get(name, 0) + count <= self._size(name) for name, count in needs.items())

    def take(self, needs: Resources) -> None:
        for name, count in needs.items():
            self._used[name] = self._used.get(name, 0) + count

    def give_back(self, needs: Resources) -> None:
        for name, count in needs.items():
            self._used[name] -= count

    def hand_out(self) -> None:
        """Grant free resources to the gates that wait, in their order."""
        waiting = [gate for gate in self._gates if gate.again is not None]
        for gate in sorted(waiting, key=lambda gate: gate.runs * gate.priority):
            if self.fits(gate.needs):
                gate.grant()

    def _size(self, name: str) -> int:
        largest = max((gate.needs.get(name, 0) for gate in self._gates), default=0)
        return self._fixed.get(name, largest)


class RateGate:
    """One version's way past the limiter. A batch of the queued scheduler enters it before it runs."""

    def __init__(self, limiter: RateLimiter, needs: Needs) -> None:
        self.needs, self.priority = needs.resources, needs.priority
        self.runs = self.held = 0  # batches so far, and now running or about to
        self.again: Callable[[], None] | None = None
        self._limiter = limiter
        self._granted = False

    def enter(self, again: Callable[[], None]) -> bool:
        """Return True when a batch may run now; otherwise `again` is called when it is worth asking again."""
        if not self._granted:
            self.again = _nobody
            self._limiter.hand_out()
        if not self._granted:
            self.again = again
            return False
        self._granted = False
        self.runs += 1
        return True

    def leave(self) -> None:
        """Only gives back: who left says by `enter` or `decline` what comes next, and takes its turn."""
        if self.held:  # else the gate was closed under a running batch
            self.held -= 1
            self._limiter.give_back(self.needs)

    def decline(self) -> None:
        """Nothing to run now: whatever is free, or was set aside for it, goes to others."""
        self.again = None
        if self._granted:
            self._granted = False
            self.leave()
        self._limiter.hand_out()

    def close(self) -> None:
        """The version is gone."""
        self.again = None
        self._limiter.close_gate(self)

    def grant(self) -> None:
        """Reserve the resources the gate waits for, and notify it."""
        again, self.again = self.again, None
        self._limiter.take(self.needs)
        self.held += 1
        self._granted = True
        if again is not None:
            again()


def _nobody() -> None:
    """No notification is needed."""


def needs_of(groups: Sequence[Needs]) -> Needs:
    """Return the resources that a batch of a model needs. Its instance groups must agree.
    Raises ServeError INVALID_ARGUMENT."""
    if any(one != groups[0] for one in groups):
        raise invalid(
            "instance_group.rate_limiter: given different ones, allowed: the same in every group of a model"
        )
    return groups[0] if groups else Needs()


def read_pools(written: Sequence[str]) -> dict[str, int]:
    """Pools of NAME:COUNT settings. Raises ValueError naming the one that is not such."""
    pools = {}
    for text in written:
        name, _, count = text.partition(":")
        if not name or not count.isdecimal() or int(count) < 1:
            raise ValueError(f'rate_limit_resources: given "{text}", allowed: NAME:COUNT')
        pools[name] = int(count)
    return pools
