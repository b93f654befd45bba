"""Measurements as rows of the table: what was measured, the reference, the ratio, what was asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bench.load.measure import Sample
from bench.workloads import Workload

if TYPE_CHECKING:  # it imports compiled modules, which --self-test does without
    from bench.load.codec import Codec

HEAD = ("workload", "reference", "fastserve", "ratio", "at least", "aim", "verdict", "note")


@dataclass(frozen=True)
class Row:
    """One line. `value`, `least` and `aim` are of the same kind: ratios, or a measured unit."""

    workload: str
    reference: str
    fastserve: str
    value: float | None = None
    least: float | None = None
    aim: float | None = None
    unit: str = "x"  # "x": higher is better; "us", "MB": lower is better
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None or self.least is None:
            return "reported"
        if not self.reaches(self.least):
            return "MISSED"
        return "aim met" if self.aim is not None and self.reaches(self.aim) else "met"

    def reaches(self, target: float) -> bool:
        assert self.value is not None
        return self.value >= target if self.unit == "x" else self.value <= target

    def figure(self, number: float | None) -> str:
        if number is None:
            return ""
        return f"{number:.2f} x" if self.unit == "x" else f"{number:.1f} {self.unit}"

    def cells(self) -> tuple[str, ...]:
        least, aim = self.figure(self.least), self.figure(self.aim)
        value = self.figure(self.value)
        return (self.workload, self.reference, self.fastserve, value, least, aim, self.verdict, self.note)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "verdict": self.verdict}


def load_row(workload: Workload, theirs: Sample, ours: Sample) -> Row:
    base = workload.bound or theirs.rate
    note = f"p50 {ours.p50_us:,.0f} us, p99 {ours.p99_us:,.0f} us"
    if workload.bound:
        note += f"; reference server {theirs.rate:,.0f}/s"
    failed = f"; FAILED {theirs.failed} + {ours.failed}" if theirs.failed or ours.failed else ""
    return Row(
        workload.name,
        f"{base:,.0f}/s" + (" (bound)" if workload.bound else ""),
        f"{ours.rate:,.0f}/s",
        ours.rate / base,
        workload.least,
        workload.aim,
        note=note + failed,
    )


def alone_row(model_us: float, theirs_us: float, ours_us: float) -> Row:
    note = f"reference server adds {theirs_us - model_us:.0f} us"
    added = ours_us - model_us
    return Row(
        "p50 added, 1 connection", f"{model_us:.1f} us", f"{ours_us:.0f} us", added, 150, 60, "us", note
    )


def codec_row(codec: Codec) -> Row:
    theirs, ours = f"{codec.theirs_s * 1e3:.2f} ms", f"{codec.ours_s * 1e3:.2f} ms"
    if codec.reads:
        note = f"{codec.gb_per_s:.2f} GB/s; the aim is 1 GB/s"
    else:
        note = f"{codec.ns_per_number:.1f} ns a number; the aim is 15"
    return Row(codec.name, theirs, ours, codec.ratio, 3.0 if codec.reads else 1.5, codec.aim, note=note)


def print_table(rows: Iterable[Row]) -> None:
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("| " + " | ".join(cells) + " |")
