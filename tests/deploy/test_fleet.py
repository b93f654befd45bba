"""The simulation of many replicas: it follows the chart's timings, and says what docs/production.md says."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fleet import rollout

PAGE = Path(__file__).resolve().parents[2] / "docs/production.md"


def test_the_docs_show_what_it_prints() -> None:
    command = [sys.executable, "-m", "bench.fleet.rollout"]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert len(rows) == 7
    assert "\n".join(rows) in PAGE.read_text()


def test_the_charts_delay_covers_probe_and_propagation() -> None:
    assert rollout.roll_out(1000, 0.6, 200.0, rollout.PROBE_S + rollout.PROPAGATION_S).failed == 0
    without = rollout.roll_out(1000, 0.6, 200.0, 0.0)
    some = rollout.roll_out(1000, 0.6, 200.0, 2.0)
    assert 0 < some.failed < without.failed


def test_figures_of_a_queue() -> None:
    assert rollout.p99(100.0, 1, 200.0) == pytest.approx(math.log(100) / 100)
    assert rollout.p99(300.0, 1, 200.0) == math.inf
    assert rollout.lost(1000.0, 2.0, 1.0) == pytest.approx(125.0)
    zone = rollout.fail_zone(999, 0.7, 200.0, 20.0)
    assert zone.worst_p99_s == math.inf  # two thirds cannot carry it
    assert zone.failed > 0


def test_propagation_is_as_probes_are() -> None:
    text = (PAGE.parents[1] / "deploy/helm/fastserve/templates/deployment.yaml").read_text()
    (period,) = re.findall(r"readinessProbe:\n.*\n\s+periodSeconds: (\d+)", text)
    assert float(period) == rollout.PROBE_S
    (ready,) = re.findall(r"minReadySeconds: (\d+)", text)
    assert float(ready) == rollout.MIN_READY_S
