"""The choice of requests that are traced."""

from __future__ import annotations

from fastserve.net.traced_endpoints import TraceSampler
from fastserve.util.tracing import TraceContext


def test_a_sampler_traces_its_share_at_random() -> None:
    sampler, gaps = TraceSampler(0.1), []
    for _ in range(4000):
        gaps.append(sampler.left)
        context = sampler.take()
        assert context is not None
        # Others who sample by the id with the same ratio come to the same end.
        assert int(context.trace_id[16:], 16) < 0.1 * 2**64
    assert 9 < sum(gaps) / len(gaps) < 11  # five standard errors are 0.75
    assert len({gap for gap in gaps if gap < 20}) == 19
    assert sum(gap == 1 for gap in gaps) > 250  # of 400: a geometric distribution, no fixed distance


def test_all_or_none_are_traced() -> None:
    every, none = TraceSampler(1.0), TraceSampler(0.0)
    for _ in range(100):
        assert every.left == 1
        assert every.take() is not None
    assert none.left > 1 << 29
    assert none.take() is None
    assert none.left > 1 << 29


def test_the_parent_decides_unless_it_may_not() -> None:
    low = TraceContext("0" * 15 + "1" + "0" * 15 + "1", "a" * 16, sampled=False)
    high = TraceContext("0" * 15 + "1" + "f" * 16, "a" * 16, sampled=True, state="a=b")
    by_parent, by_ratio = TraceSampler(0.5), TraceSampler(0.5, parent_based=False)
    assert by_parent.follow(low) is None
    assert by_ratio.follow(high) is None
    for sampler, parent in ((by_parent, high), (by_ratio, low)):
        context = sampler.follow(parent)
        assert context is not None
        assert (context.trace_id, context.state, context.sampled) == (parent.trace_id, parent.state, True)
        assert context.span_id != parent.span_id
