"""Readiness and heartbeat defaults: nobody is ready by accident, nobody dead before the first beat."""

from fastserve.metrics import Heartbeat, Readiness


def test_not_ready_until_told() -> None:
    assert Readiness().ready is False
    assert Readiness().reason


def test_heartbeat() -> None:
    heart = Heartbeat(stale_after_s=5.0)
    assert not heart.stale
    heart.beat()
    assert not heart.stale
    heart.beat_ns -= 6_000_000_000
    assert heart.stale
    assert heart.age_s > 6
