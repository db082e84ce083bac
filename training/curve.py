"""The curve of a training run as one SVG file.

    python -m training.curve --log OUT/log.jsonl --svg FILE

Three panels over the minutes of the run: loss of the model proper, its bits a byte on held-out
text, and the share of draft guesses that the target would refuse.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .training_log import Record, read_log

WIDTH, PANEL_HEIGHT, MARGIN_LEFT, MARGIN = 720, 220, 64, 36
GRID_LINES = 5
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
    records = list(records)

    def line(part: str, kind: str, value: str, label: str, colour: str) -> Series:
        points = [
            (record["elapsed_s"] / 60, record[value])
            for record in records
            if record["part"] == part and record["kind"] == kind
        ]
        return Series(label, colour, points)

    panels = [
        Panel(
            "Model: loss in nats a token",
            [
                line("target", "step", "loss", "training", "#4477aa"),
                line("target", "step", "index_loss", "indexers (KL)", "#ccbb44"),
            ],
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


@dataclass(frozen=True, slots=True)
class _Axes:
    """Minutes and values to places in a panel."""

    minutes_max: float
    low: float
    high: float

    def x(self, minutes: float) -> float:
        return MARGIN_LEFT + minutes / self.minutes_max * (WIDTH - MARGIN_LEFT - MARGIN)

    def y(self, value: float) -> float:
        return MARGIN + (self.high - value) / (self.high - self.low) * PANEL_HEIGHT


def _draw_panel(panel: Panel) -> list[str]:
    values = [value for _, value in panel.points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or 0.5
    axes = _Axes(max(max(m for m, _ in panel.points), 1e-3), low - margin, high + margin)
    parts = [f'<text x="{MARGIN_LEFT}" y="20" font-weight="bold">{escape(panel.title)}</text>']
    for line in range(GRID_LINES + 1):
        share = line / GRID_LINES
        value = axes.low + share * (axes.high - axes.low)
        minutes = share * axes.minutes_max
        y, x = axes.y(value), axes.x(minutes)
        parts.append(
            f'<line x1="{MARGIN_LEFT}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#dddddd"/>'
        )
        parts.append(
            f'<text x="{MARGIN_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
        bottom = MARGIN + PANEL_HEIGHT + 16
        parts.append(
            f'<text x="{x:.1f}" y="{bottom}" text-anchor="middle">{minutes:.1f} min</text>'
        )
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the curve of a training run.")
    parser.add_argument("--log", type=Path, required=True, help="log.jsonl of the run")
    parser.add_argument("--svg", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    panels = plan_panels(read_log(arguments.log))
    arguments.svg.write_text(draw(panels), encoding="utf-8")
    print(f"{arguments.svg}: {len(panels)} panels")


if __name__ == "__main__":
    main()
