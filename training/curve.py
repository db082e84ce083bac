"""The curve of a training run as one SVG file.

    python -m training.curve --log OUT/log.jsonl --svg FILE

Four panels over the minutes of each part: loss of the model proper, that of its indexers, its bits
a byte on held-out text, and the share of draft guesses that the target would refuse.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .command import InvalidInput, ending_in_one_line
from .training_log import Record, drop_superseded, is_number, read_log

WIDTH, PANEL_HEIGHT, MARGIN_LEFT, MARGIN = 720, 220, 64, 36
TICKS_MAX = 7
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `points` are (minutes, value)."""

    label: str
    colour: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    series: Sequence[Series]

    @property
    def points(self) -> list[Point]:
        return [point for series in self.series for point in series.points]


def plan_panels(records: Iterable[Record]) -> list[Panel]:
    """The panels that the records have points for."""
    records = drop_superseded(records)

    def line(part: str, kind: str, value: str, label: str, colour: str) -> Series:
        points = [
            (record["elapsed_s"] / 60, record[value])
            for record in records
            if (record["part"], record["kind"]) == (part, kind)
            and "step" in record
            and is_number(record.get(value))
        ]
        return Series(label, colour, points)

    panels = [
        Panel(
            "Model: loss in nats a token",
            [line("target", "step", "loss", "training", "#4477aa")],
        ),
        Panel(
            "Indexers: divergence from attention's mass, in nats",
            [line("target", "step", "index_loss", "training", "#4477aa")],
        ),
        Panel(
            "Model: bits a byte, held-out text",
            [line("target", "validation", "bits_per_byte", "held out", "#ee6677")],
        ),
        Panel(
            "Draft stages: share of guesses refused",
            [
                line("draft", "step", "variation", "training", "#4477aa"),
                line("draft", "validation", "variation", "held out", "#ee6677"),
            ],
        ),
    ]
    return [panel for panel in panels if panel.points]


def draw(panels: Sequence[Panel]) -> str:
    """The SVG document."""
    height = len(panels) * (PANEL_HEIGHT + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        top = number * (PANEL_HEIGHT + 2 * MARGIN)
        parts.append(f'<g transform="translate(0 {top})">')
        parts += _draw_panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def choose_ticks(low: float, high: float) -> list[float]:
    """Round numbers, 2 to TICKS_MAX, at even distances: the first at or below `low`, the last at or
    above `high`."""
    span = max(high - low, abs(high) * 1e-3, 1e-6)
    power = 10.0 ** math.floor(math.log10(span / TICKS_MAX))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * power
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < TICKS_MAX:
            break
    return [number * step for number in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True, slots=True)
class _Axes:
    """Minutes and values to places in a panel."""

    minutes: Sequence[float]
    values: Sequence[float]

    def x(self, minutes: float) -> float:
        return MARGIN_LEFT + minutes / self.minutes[-1] * (WIDTH - MARGIN_LEFT - MARGIN)

    def y(self, value: float) -> float:
        low, high = self.values[0], self.values[-1]
        return MARGIN + (high - value) / (high - low) * PANEL_HEIGHT


def _draw_panel(panel: Panel) -> list[str]:
    values = [value for _, value in panel.points]
    axes = _Axes(
        choose_ticks(0.0, max(minutes for minutes, _ in panel.points)),
        choose_ticks(min(values), max(values)),
    )
    parts = [f'<text x="{MARGIN_LEFT}" y="20" font-weight="bold">{escape(panel.title)}</text>']
    for value in axes.values:
        y = axes.y(value)
        parts.append(
            f'<line x1="{MARGIN_LEFT}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#dddddd"/>'
        )
        parts.append(
            f'<text x="{MARGIN_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    bottom = MARGIN + PANEL_HEIGHT + 16
    parts += [
        f'<text x="{axes.x(minutes):.1f}" y="{bottom}" text-anchor="middle">'
        f"{minutes:.4g} min</text>"
        for minutes in axes.minutes
    ]
    for number, series in enumerate(s for s in panel.series if s.points):
        parts += _draw_series(series, axes, number)
    return parts


def _draw_series(series: Series, axes: _Axes, number: int) -> list[str]:
    points = " ".join(f"{axes.x(m):.1f},{axes.y(v):.1f}" for m, v in series.points)
    x = WIDTH - MARGIN - 120
    return [
        f'<polyline points="{points}" fill="none" stroke="{series.colour}" stroke-width="1.5"/>',
        f'<text x="{x}" y="{MARGIN + 14 + 16 * number}" fill="{series.colour}">'
        f"{escape(series.label)}</text>",
    ]


@ending_in_one_line()
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the curve of a training run.")
    parser.add_argument("--log", type=Path, required=True, help="log.jsonl of the run")
    parser.add_argument("--svg", type=Path, required=True, help="file to write")
    arguments = parser.parse_args(given)
    records = list(read_log(arguments.log))
    panels = plan_panels(records)
    if not panels:
        found = f"{len(records)} records, none of them measured" if records else "no records"
        raise InvalidInput(f"log {arguments.log}", given=found, expected="those of a run's steps")
    arguments.svg.write_text(draw(panels), encoding="utf-8")
    print(f"{arguments.svg}: {len(panels)} panels")


if __name__ == "__main__":
    main()
