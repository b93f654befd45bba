"""The registry: series over several processes, takeover, bounds, and sections nobody should trust."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fastserve.metrics import Metric, names, registry
from tests.effort import examples
from tests.metrics.series import NamedRegistry
from tests.oracles.shared_metrics import PlainRegistry


def scrape(found: NamedRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample as {(name, sorted labels): value}, read by prometheus_client's own parser."""
    families = text_string_to_metric_families(found.expose().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(found: NamedRegistry, name: str, **labels: str) -> float:
    return scrape(found)[name, tuple(sorted(labels.items()))]


@pytest.fixture
def fronts() -> Iterator[list[NamedRegistry]]:
    first = NamedRegistry(sections=3, section=0)
    all_three = [first, NamedRegistry(3, 1, first.fd), NamedRegistry(3, 2, first.fd)]
    yield all_three
    for front in all_three:
        front.close()


def test_counters_and_histograms_add_up_over_sections(fronts: list[NamedRegistry]) -> None:
    for n, front in enumerate(fronts, start=1):
        front.counter("c_total", "Help.", model="m").add(n)
        front.histogram("h", "Help.", (1.0, 2.0), model="m").observe(n)
    for front in fronts:
        seen = scrape(front)
        assert seen["c_total", (("model", "m"),)] == 6
        assert seen["h_bucket", (("le", "1.0"), ("model", "m"))] == 1
        assert seen["h_bucket", (("le", "2.0"), ("model", "m"))] == 2
        assert seen["h_bucket", (("le", "+Inf"), ("model", "m"))] == 3
        assert seen["h_count", (("model", "m"),)] == 3
        assert seen["h_sum", (("model", "m"),)] == 6.0


def test_gauges_add_up_or_show_the_last(fronts: list[NamedRegistry]) -> None:
    for n, front in enumerate(fronts, start=1):
        front.gauge("level", "Help.").set(n)
        front.gauge("fact", "Help.", combine="last").set(10 * n)
    assert value(fronts[0], "level") == 6
    assert value(fronts[0], "fact") == 30
    fronts[0].gauge("fact", "Help.", combine="last").set(5)
    assert value(fronts[2], "fact") == 5


def test_a_dead_front_keeps_its_counters_and_loses_its_levels(fronts: list[NamedRegistry]) -> None:
    dying = fronts[1]
    dying.counter("c_total", "Help.").add(7)
    dying.gauge("level", "Help.").set(50)
    dying.gauge("fact", "Help.", combine="last").set(3)
    fronts[0].bury(1)
    assert value(fronts[0], "c_total") == 7
    assert value(fronts[0], "level") == 0
    assert value(fronts[0], "fact") == 3


def test_a_replacement_takes_the_section_over(fronts: list[NamedRegistry]) -> None:
    fronts[1].counter("c_total", "Help.", model="m").add(7)
    fronts[1].gauge("level", "Help.").set(50)
    after = NamedRegistry(3, 1, fronts[0].fd)
    counter = after.counter("c_total", "Help.", model="m")
    counter.add()
    after.counter("c_total", "Help.", model="n").add()
    assert counter.value == 8
    assert value(fronts[0], "c_total", model="m") == 8
    assert value(fronts[0], "level") == 0
    assert value(fronts[0], "fastserve_metrics_series") == 3
    after.close()


def test_another_process_counts_in_the_same_file(fronts: list[NamedRegistry]) -> None:
    code = (
        "import sys; from tests.metrics.series import NamedRegistry;"
        "r = NamedRegistry(3, 2, int(sys.argv[1])); r.counter('c_total', 'Help.').add(5);"
        "assert 'numpy' not in sys.modules and 'prometheus_client' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(fronts[0].fd)], pass_fds=[fronts[0].fd], check=True)
    fronts[0].counter("c_total", "Help.").add(1)
    assert value(fronts[0], "c_total") == 6


def test_label_values_are_escaped_cut_and_encodable(fronts: list[NamedRegistry]) -> None:
    for nasty in ('a"b\\c\nd', "\ud800", "x" * 1000, "模型"):
        fronts[0].counter("c_total", "Help.", model=nasty).add()
    labels = {dict(key[1])["model"] for key in scrape(fronts[0]) if key[0] == "c_total"}
    assert labels == {'a"b\\c\nd', "\\ud800", "x" * 128, "模型"}


def test_series_are_bounded_against_random_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILY_SERIES_MAX", 50)
    found = NamedRegistry()
    family = found.counters(names.REJECTS)
    for i in range(100_000):
        family.of(f"model{i}", "1", "queue_rows").add()
    found.counter("other_total", "Help.").add()
    seen = scrape(found)
    assert sum(key[0] == "fastserve_rejects_total" for key in seen) == 50
    assert seen["fastserve_metrics_series_overflow_total", ()] == 99_950
    assert seen["other_total", ()] == 1
    assert len(family._instruments) == 50
    found.close()


def test_a_full_section_loses_series_not_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SERIES_MAX", 3)
    found = NamedRegistry()
    for i in range(5):
        found.counter("c_total", "Help.", i=i).add()
    assert value(found, "fastserve_metrics_series") == 3
    assert value(found, "fastserve_metrics_series_overflow_total") == 2
    found.close()


@pytest.mark.parametrize(
    "metric",
    [
        Metric("bad name", "h", "counter"),
        Metric("", "h", "counter"),
        Metric("c\n", "h", "counter"),
        Metric("c", "h", "counter", ("le",)),
        Metric("c", "h", "counter", ("__x",)),
        Metric("c", "h", "counter", ("a", "a")),
        Metric("c", "h", "counter", buckets=(1.0,)),
        Metric("h", "h", "histogram"),
        Metric("h", "h", "histogram", buckets=(2.0, 1.0)),
        Metric("h", "h", "histogram", buckets=(float("inf"),)),
    ],
)
def test_metrics_that_cannot_be(metric: Metric) -> None:
    found = NamedRegistry()
    with pytest.raises(ValueError, match=r"metric|bounds"):
        found.family(metric)
    found.close()


def test_one_name_one_metric() -> None:
    found = NamedRegistry()
    found.counter("c_total", "Help.", model="m")
    with pytest.raises(ValueError, match="exists with another"):
        found.gauge("c_total", "Help.", model="m")
    with pytest.raises(ValueError, match="has the labels"):
        found.counters(Metric("c_total", "Help.", "counter", ("model",))).of("a", "b")
    found.close()


def test_fronts_that_disagree_show_the_first_and_say_so(fronts: list[NamedRegistry]) -> None:
    fronts[0].counter("c_total", "Help.").add(1)
    fronts[1].counter("c_total", "Other help.").add(1)
    seen = scrape(fronts[2])
    assert seen["c_total", ()] == 1
    assert seen["fastserve_metrics_series_unreadable", ()] == 1


def test_only_a_sealed_file_of_meters_is_taken() -> None:
    plain = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 4096)
    with pytest.raises(ValueError, match="sealed"):
        NamedRegistry(1, 0, plain)
    read_end, write_end = os.pipe()
    with pytest.raises(ValueError, match="sealed"):
        NamedRegistry(1, 0, read_end)
    for fd in (plain, read_end, write_end):
        os.close(fd)


def test_nobody_can_shrink_the_file() -> None:
    found = NamedRegistry()
    with pytest.raises(PermissionError):
        os.ftruncate(found.fd, 4096)
    found.close()


step = st.tuples(
    st.integers(0, 2), st.sampled_from(["add", "set", "bury"]), st.sampled_from("ab"), st.integers(0, 9)
)


@examples(50)
@given(st.lists(step, max_size=30))
def test_any_history_is_its_oracle(steps: list[tuple[int, str, str, int]]) -> None:
    first = NamedRegistry(3, 0)
    found = [first, NamedRegistry(3, 1, first.fd), NamedRegistry(3, 2, first.fd)]
    plain = PlainRegistry(3)
    for section, verb, label, n in steps:
        if verb == "add":
            found[section].counter("c_total", "H.", x=label).add(n)
            plain.add(section, "c_total", label, n)
        elif verb == "set":
            found[section].gauge("g", "H.", x=label).set(n)
            plain.set(section, "g", label, n)
        else:
            first.bury(section)
            plain.bury(section)
    seen = scrape(found[1])
    wanted = plain.total("counter") | plain.total("gauge")
    assert {(k[0], dict(k[1])["x"]): v for k, v in seen.items() if k[1]} == wanted
    for front in found:
        front.close()


@examples(60)
@given(st.randoms(use_true_random=False))
def test_a_spoiled_section_never_stops_a_scrape(rng: random.Random) -> None:
    first = NamedRegistry(2, 0)
    other = NamedRegistry(2, 1, first.fd)
    first.counter("mine_total", "Help.").add(1)
    for i in range(5):
        other.histogram(f"h{i}", "Help.", (0.1, 1.0), model="m").observe(i)
    size = os.fstat(first.fd).st_size
    section = 64 + (size - 64) // 2
    with mmap.mmap(first.fd, size) as memory:
        spans = [(section, 300), (section + 64 + registry.SERIES_MAX * 32, 400)]
        for _ in range(rng.randrange(1, 80)):
            at, width = rng.choice(spans)
            memory[at + rng.randrange(width)] = rng.randrange(256)
    assert value(first, "mine_total") == 1
    after = NamedRegistry(2, 1, first.fd)
    after.counter("again_total", "Help.").add()
    first.expose()
    for front in (first, other, after):
        front.close()


def test_reading_some_metrics_adds_up_no_others(fronts: list[NamedRegistry]) -> None:
    wanted = Metric("fastserve_wanted_total", "What is asked for.", "counter")
    other = Metric("fastserve_other_total", "What is not.", "counter")
    for front in fronts:
        front.counters(wanted).of().add(1)
        front.counters(other).of().add(1)
    assert fronts[0].read(wanted) == [{(): (3.0,)}]
    merged, _ = fronts[0]._exposition.merge({wanted.name})
    assert list(merged) == [wanted.name]
