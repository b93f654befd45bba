"""Prometheus text, format 0.0.4: families of samples as lines. Nothing here counts or reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

Labels = Mapping[str, str]
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_HELP_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n"})


def write_labels(labels: Labels, **last: str) -> str:
    """`{a="1",b="2"}` in the order of names, and behind them a bucket's `le` or a `quantile`: so writes every
    exporter built on prometheus-cpp."""
    named = [*sorted(labels.items()), *last.items()]
    inner = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in named)
    return f"{{{inner}}}" if inner else ""


def write_number(value: float) -> str:
    """Whole numbers without a point."""
    if value != value:
        return "Nan"  # as prometheus-cpp writes it; parsers do not mind the case
    return str(int(value)) if value == int(value) else repr(value)


def write_head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {name} {help.translate(_HELP_ESCAPES)}", f"# TYPE {name} {kind}"]


def write_histogram(
    labels: Labels, name: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> list[str]:
    """The lines of one histogram; `counts` has one more than there are bounds."""
    sums = accumulate(counts)
    lines = [f"{name}_count{write_labels(labels)} {sum(counts)}"]
    lines.append(f"{name}_sum{write_labels(labels)} {write_number(total)}")
    for bound, count in zip([*map(write_number, bounds), "+Inf"], sums, strict=True):
        lines.append(f"{name}_bucket{write_labels(labels, le=bound)} {count}")
    return lines


def write_summary(
    labels: Labels, name: str, quantiles: Mapping[float, float], count: int, total: float
) -> list[str]:
    """The lines of one summary."""
    lines = [f"{name}_count{write_labels(labels)} {count}"]
    lines.append(f"{name}_sum{write_labels(labels)} {write_number(total)}")
    for rank, value in quantiles.items():
        lines.append(f"{name}{write_labels(labels, quantile=write_number(rank))} {write_number(value)}")
    return lines


def write_family(name: str, kind: str, help: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    """Head and a line for each (written labels, value); nothing when there is none."""
    lines = [f"{name}{labels} {write_number(value)}" for labels, value in samples]
    return [*write_head(name, kind, help), *lines] if lines else []
