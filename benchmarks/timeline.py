"""A timeline of what a GPU did, from a trace of torch.profiler, as a picture.

    compute   ######### ################## ##########
    copies    ====  ====  ====
    scatter       --    --    --

One lane for each stream of the device, or, of a trace without any, for each thread that marked what
it did. Bars are coloured by the mark (`record_function`) that they lie in. Everything here is a
function of the trace.

    python -m benchmarks.timeline trace.json picture.png [--title TEXT]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .png import LETTER_HEIGHT, LETTER_WIDTH, Canvas, Colour

Event: TypeAlias = Mapping[str, Any]

DEVICE_KINDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "kernels"}
MARK_KIND = "user_annotation"
DEVICE_MARK_KIND = "gpu_user_annotation"

COLOURS: tuple[Colour, ...] = (
    (66, 110, 180),
    (221, 132, 82),
    (85, 150, 104),
    (190, 80, 80),
    (129, 114, 178),
    (147, 120, 96),
    (206, 134, 190),
)
GREY: Colour = (150, 150, 150)
LINE: Colour = (215, 215, 215)

WIDTH = 900
LABEL_WIDTH = 150
LANE_HEIGHT = 22
TOP = 40
MARGIN = 12


@dataclass(frozen=True, slots=True)
class Bar:
    """From `start_us` on, counted from the trace's first event; `mark` is what it belongs to."""

    start_us: float
    end_us: float
    name: str
    mark: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    bars: tuple[Bar, ...]


def read_lanes(trace: Mapping[str, Any]) -> list[Lane]:
    """The lanes of a trace in the format of torch.profiler's `export_chrome_trace`: busiest
    first. There is none if it has neither events of a device nor marks."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    work = [event for event in events if event.get("cat") in DEVICE_KINDS]
    marks = [event for event in events if event.get("cat") == DEVICE_MARK_KIND]
    if not work:
        work = marks = [event for event in events if event.get("cat") == MARK_KIND]
    if not work:
        return []
    first_us = min(float(event["ts"]) for event in work)
    by_lane: dict[str, list[Bar]] = {}
    for event in sorted(work, key=lambda event: float(event["ts"])):
        start_us = float(event["ts"])
        by_lane.setdefault(_lane_of(event), []).append(
            Bar(
                start_us - first_us,
                start_us - first_us + float(event["dur"]),
                str(event["name"]),
                _mark_of(event, marks),
            )
        )
    lanes = [Lane(name, tuple(bars)) for name, bars in by_lane.items()]
    return sorted(lanes, key=lambda lane: (-busy_us(lane.bars), lane.name))


def busy_us(bars: Iterable[Bar]) -> float:
    """Time with at least one bar."""
    total, covered_us = 0.0, 0.0
    for bar in sorted(bars, key=lambda bar: bar.start_us):
        total += max(0.0, bar.end_us - max(bar.start_us, covered_us))
        covered_us = max(covered_us, bar.end_us)
    return total


def _lane_of(event: Event) -> str:
    kind = event.get("cat")
    if kind == MARK_KIND:
        return f"thread {event['tid']}"
    arguments = event.get("args", {})
    what = DEVICE_KINDS[str(kind)]
    if what == "copies":
        what = _direction_of(str(event["name"]))
    return f"{what}, stream {arguments.get('stream', event['tid'])}"


def _direction_of(name: str) -> str:
    """Of a copy that is called "Memcpy HtoD (Pinned -> Device)": `copies in`."""
    for mark, what in (("HtoD", "copies in"), ("DtoH", "copies out")):
        if mark in name:
            return what
    return "copies"


def _mark_of(event: Event, marks: Sequence[Event]) -> str | None:
    """The innermost mark of the same lane of the trace that the event's middle lies in."""
    middle_us = float(event["ts"]) + float(event["dur"]) / 2
    around = [
        mark
        for mark in marks
        if mark.get("tid") == event.get("tid")
        and float(mark["ts"]) <= middle_us <= float(mark["ts"]) + float(mark["dur"])
    ]
    return str(min(around, key=lambda mark: float(mark["dur"]))["name"]) if around else None


def draw(lanes: Sequence[Lane], title: str) -> bytes:
    """The lanes as PNG, twice the size of the canvas."""
    marks = list(dict.fromkeys(bar.mark for lane in lanes for bar in lane.bars if bar.mark))
    colours = {mark: COLOURS[number % len(COLOURS)] for number, mark in enumerate(marks)}
    end_us = max((bar.end_us for lane in lanes for bar in lane.bars), default=1.0)
    legend_top = TOP + LANE_HEIGHT * len(lanes) + 2 * MARGIN
    canvas = Canvas(WIDTH, legend_top + (LETTER_HEIGHT + 4) * len(marks) + MARGIN)
    canvas.write(MARGIN, MARGIN, title)
    _draw_axis(canvas, end_us, len(lanes))
    for row, lane in enumerate(lanes):
        top = TOP + row * LANE_HEIGHT
        canvas.write(MARGIN, top + 6, lane.name[: (LABEL_WIDTH - MARGIN) // LETTER_WIDTH])
        for bar in lane.bars:
            left = _place(bar.start_us, end_us)
            width = max(1, _place(bar.end_us, end_us) - left)
            colour = GREY if bar.mark is None else colours[bar.mark]
            canvas.fill(left, top + 3, width, LANE_HEIGHT - 6, colour)
    for row, mark in enumerate(marks):
        top = legend_top + row * (LETTER_HEIGHT + 4)
        canvas.fill(LABEL_WIDTH, top, LETTER_HEIGHT, LETTER_HEIGHT, colours[mark])
        canvas.write(LABEL_WIDTH + 2 * LETTER_HEIGHT, top, mark)
    return canvas.encode(scale=2)


def _draw_axis(canvas: Canvas, end_us: float, lanes: int) -> None:
    step_us = choose_step_us(end_us)
    for number in range(int(end_us / step_us) + 1):
        left = _place(number * step_us, end_us)
        canvas.fill(left, TOP - 4, 1, lanes * LANE_HEIGHT + 8, LINE)
        label = f"{number * step_us / 1e3:g} ms"
        if left + len(label) * LETTER_WIDTH <= WIDTH:
            canvas.write(left, TOP + lanes * LANE_HEIGHT + 6, label)


def choose_step_us(end_us: float) -> float:
    """A round number of microseconds, 5 to 12 of which reach to the end."""
    step_us = 1.0
    for factor in (2, 2.5, 2) * 10:
        if end_us / step_us <= 12:
            break
        step_us *= factor
    return step_us


def _place(time_us: float, end_us: float) -> int:
    return LABEL_WIDTH + round(time_us / end_us * (WIDTH - LABEL_WIDTH - MARGIN))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    lanes = read_lanes(json.loads(options.trace.read_text()))
    options.picture.write_bytes(draw(lanes, options.title or options.trace.stem))


if __name__ == "__main__":
    main()
