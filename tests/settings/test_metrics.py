"""--metrics-config: what it takes and what it names when it does not."""

from __future__ import annotations

import pytest

from fastserve.settings import Settings
from fastserve.settings.kserve_options import MetricsConfig, read_metrics_config


def test_pairs_of_one_flag_or_several() -> None:
    assert read_metrics_config(()) == MetricsConfig()
    found = read_metrics_config(
        ("summary_latencies=true,histogram_latencies=true", "counter_latencies=false")
    )
    assert found == MetricsConfig(False, True, True)
    found = read_metrics_config(("summary_quantiles=0.9:0.01,0.5:0.05", "summary_latencies=true"))
    assert (found.summary_quantiles, found.summary_latencies) == ((0.5, 0.9), True)


@pytest.mark.parametrize(
    "text", ["x=true", "summary_latencies", "summary_latencies=yes", "", "summary_quantiles=2:1"]
)
def test_what_cannot_be_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"metrics_config: given .*allowed: "):
        Settings(metrics_config=(text,))
