"""Simulate a fleet of replicas while a zone fails and while a release is rolled out: failed requests and p99.

    python -m bench.fleet.rollout                  10^3 replicas, the timings of the Helm chart's values
    python -m bench.fleet.rollout --delay 0        what the drain delay is for

A fluid model in steps of a tenth of a second. Requests are spread over the replicas that proxies know, which
they learn PROPAGATION_S after the cluster does. A replica is a queue of its own with exponential service: p99
of its stay is ln(100) / (mu - lambda). A request fails when all its TRIES go to replicas that do not accept
any more; each try picks among the known ones.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import yaml

VALUES = Path(__file__).parents[2] / "deploy/helm/fastserve/values.yaml"
STEP_S = 0.1
ZONES = 3
TRIES = 3  # nginx.conf, envoy.yaml: one try and two retries
PROBE_S, PROPAGATION_S = 2.0, 3.0  # readiness period of the chart; endpoints to every proxy, pessimistic
DETECTION_S = 2.0  # a zone that is silent: a proxy's connect timeout and its first failed check
START_S = 20.0  # from a pod's creation to its readiness: models load
MIN_READY_S = 5.0
SURGE = 0.25


@dataclass
class Outcome:
    """Figures of one scenario."""

    failed: float
    sent: float
    worst_p99_s: float
    seconds: float

    def row(self, name: str) -> str:
        share = f"{self.failed / self.sent:.1e}" if self.failed else "0"
        return f"| {name} | {share} | {self.worst_p99_s * 1e3:.0f} | {self.seconds:.0f} |"


def p99(load: float, replicas: float, mu: float) -> float:
    """Return the 99th percentile of the stay at M/M/1 replicas; infinite beyond their capacity."""
    each = load / replicas if replicas else math.inf
    return math.log(100) / (mu - each) if each < mu else math.inf


def lost(load: float, known: float, dead: float) -> float:
    """Return the rate of requests all of whose tries go to dead replicas; retries pick anew."""
    return load * (dead / known) ** TRIES if known else load


def fail_zone(replicas: int, utilisation: float, mu: float, grow_s: float) -> Outcome:
    """One of the zones goes at once; the others take its load, and new pods come `grow_s` later."""
    load, gone = replicas * utilisation * mu, replicas / ZONES
    left = replicas - gone
    found = Outcome(0.0, 0.0, 0.0, 0.0)
    for step in range(int((DETECTION_S + PROPAGATION_S + grow_s + 10) / STEP_S)):
        now = step * STEP_S
        dead = gone if now < DETECTION_S + PROPAGATION_S else 0.0
        alive = left + (gone if now >= DETECTION_S + PROPAGATION_S + grow_s else 0.0)
        found.sent += load * STEP_S
        found.failed += lost(load, alive + dead, dead) * STEP_S
        # Tries that met a dead replica are sent again: the living ones have all of the load.
        found.worst_p99_s = max(found.worst_p99_s, p99(load, alive, mu))
        found.seconds = now if alive < replicas else found.seconds
    return found


def roll_out(replicas: int, utilisation: float, mu: float, delay_s: float) -> Outcome:
    """Replace every replica, as many at a time as the surge allows; each drains for `delay_s` first."""
    load, batch = replicas * utilisation * mu, replicas * SURGE
    found, wave_s = Outcome(0.0, 0.0, 0.0, 0.0), START_S + MIN_READY_S + PROBE_S
    waves = math.ceil(1 / SURGE)
    dead_s = max(0.0, PROBE_S + PROPAGATION_S - delay_s)  # known and no longer accepting
    for _ in range(waves):
        for step in range(int(wave_s / STEP_S)):
            now = step * STEP_S
            found.sent += load * STEP_S
            dead = batch if now < dead_s else 0.0
            known = replicas + dead  # new ones stand in for those that go
            found.failed += lost(load, known, dead) * STEP_S
            found.worst_p99_s = max(found.worst_p99_s, p99(load, replicas, mu))
        found.seconds += wave_s
    return found


def main() -> None:
    values = yaml.safe_load(VALUES.read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--service-ms", type=float, default=5.0, help="mean time of a request at a replica")
    parser.add_argument("--delay", type=float, default=float(values["drain"]["delaySeconds"]))
    given = parser.parse_args()
    mu = 1e3 / given.service_ms
    print("| what happens | failed requests | worst p99, ms | seconds |\n|---|---|---|---|")
    for utilisation in (0.4, 0.6, 0.65):
        zone = fail_zone(given.replicas, utilisation, mu, START_S)
        print(zone.row(f"a zone of {ZONES} fails at {utilisation:.0%} use"))
    print(roll_out(given.replicas, 0.6, mu, given.delay).row(f"rollout, drain delay {given.delay:g} s"))
    print(roll_out(given.replicas, 0.6, mu, 0.0).row("rollout without a drain delay"))


if __name__ == "__main__":
    main()
