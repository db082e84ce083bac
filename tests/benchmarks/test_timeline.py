"""A trace becomes lanes, and lanes a picture that any reader of PNG can open."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest

from benchmarks.png import Canvas
from benchmarks.timeline import Bar, Lane, busy_us, choose_step_us, draw, read_lanes

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def event(cat: str, name: str, ts: float, dur: float, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        event("cpu_op", "aten::mm", 90.0, 500.0, 1),
        event("kernel", "gemm", 100.0, 50.0, 7, stream=7),
        event("kernel", "gemm", 150.0, 30.0, 7, stream=7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 120.0, 40.0, 20, stream=20),
        event("gpu_user_annotation", "whole", 100.0, 100.0, 7),
        event("gpu_user_annotation", "first", 100.0, 50.0, 7),
    ]
}


def decode(png: bytes) -> Pixels:
    """Pixels of a PNG as `Canvas` writes it, checksums included."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, {}
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        (checksum,) = struct.unpack_from(">I", png, at + 8 + size)
        assert checksum == zlib.crc32(kind + data), kind
        chunks[kind] = data
        at += 12 + size
    width, height, depth, colour_type, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour_type) == (8, 2)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_streams_are_lanes_and_marks_are_the_innermost() -> None:
    assert read_lanes(TRACE) == [
        Lane(
            "kernels, stream 7",
            (Bar(0.0, 50.0, "gemm", "first"), Bar(50.0, 80.0, "gemm", "whole")),
        ),
        Lane(
            "copies in, stream 20",
            (Bar(20.0, 60.0, "Memcpy HtoD (Pinned -> Device)", None),),
        ),
    ]


def test_marks_of_threads_are_lanes_where_there_was_no_device() -> None:
    trace = {"traceEvents": [event("user_annotation", "layers", 5.0, 10.0, 3)]}
    assert read_lanes(trace) == [Lane("thread 3", (Bar(0.0, 10.0, "layers", "layers"),))]


def test_trace_of_nothing_has_no_lanes_and_still_a_picture() -> None:
    assert read_lanes({"traceEvents": []}) == []
    assert decode(draw([], "nothing")).shape[1] == 1800


def test_time_of_bars_that_overlap_counts_once() -> None:
    bars = [Bar(0, 10, "a", None), Bar(5, 12, "b", None), Bar(20, 21, "c", None)]
    assert busy_us(bars) == 13


def test_bar_stands_where_its_time_is() -> None:
    half = Lane("x", (Bar(0.0, 50.0, "a", "first"), Bar(99.0, 100.0, "b", None)))
    pixels = decode(draw([half], ""))
    is_first = (pixels == (66, 110, 180)).all(-1)
    columns = is_first[2 * 45].nonzero()[0]
    label, end = 2 * 150, 2 * (900 - 12)
    assert columns[0] == label
    assert columns[-1] == pytest.approx((label + end) / 2, abs=4)


@pytest.mark.parametrize("end_us", [3.0, 999.0, 12_345.0, 4e6])
def test_axis_has_some_steps_and_not_many(end_us: float) -> None:
    assert 2 <= end_us / choose_step_us(end_us) <= 12


def test_what_lies_outside_a_canvas_is_cut_off() -> None:
    canvas = Canvas(10, 6)
    canvas.fill(-5, -5, 8, 8, (0, 0, 0))
    canvas.fill(8, 4, 50, 50, (9, 9, 9))
    canvas.write(0, 0, "ä")  # a letter that is not there is a box
    pixels = decode(canvas.encode(scale=3))
    assert pixels.shape == (18, 30, 3)
    assert tuple(pixels[-1, -1]) == (9, 9, 9)
