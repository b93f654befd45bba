"""What --metrics-config sets, as Triton spells it: which kinds of latencies the nv_* metrics show.

--metrics-config counter_latencies=false,summary_latencies=true
--metrics-config summary_latencies=true --metrics-config summary_quantiles="0.5:0.05,0.99:0.001"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

KINDS = ("counter_latencies", "histogram_latencies", "summary_latencies")
QUANTILES = "summary_quantiles"
_PAIR = re.compile(r"(?P<name>[a-z_]+)=(?P<value>.*)")
_RANK = re.compile(r"(?P<quantile>0?\.[0-9]+|0|1|1\.0*):[0-9.]+")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Kinds of latencies shown; the quantiles of summaries."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


def read_metrics_config(given: Sequence[str]) -> MetricsConfig:
    """NAME=VALUE,... of several flags. Raises ValueError naming what cannot be."""
    found = MetricsConfig()
    for text in given:
        quantiles = text.startswith(f"{QUANTILES}=")  # whose value has commas of its own
        for pair in [text] if quantiles else text.split(","):
            match = _PAIR.fullmatch(pair)
            if match and match["name"] in KINDS and match["value"] in ("true", "false"):
                found = _with_kind(found, match["name"], match["value"] == "true")
            elif quantiles and match:
                found = replace(found, summary_quantiles=_read_quantiles(match["value"], text))
            else:
                allowed = f"{', '.join(KINDS)}=true|false, {QUANTILES}=QUANTILE:ERROR,..."
                raise ValueError(f'metrics_config: given "{pair}", allowed: {allowed}')
    return found


def _with_kind(config: MetricsConfig, kind: str, shown: bool) -> MetricsConfig:
    kinds: dict[str, Any] = {kind: shown}
    return replace(config, **kinds)


def _read_quantiles(value: str, text: str) -> tuple[float, ...]:
    matches = [_RANK.fullmatch(rank.strip()) for rank in value.split(",")]
    if not all(matches):
        raise ValueError(f'metrics_config: given "{text}", allowed: {QUANTILES}=QUANTILE:ERROR,... of 0 to 1')
    return tuple(sorted(float(match["quantile"]) for match in matches if match))
