"""The quantised formats once more, in exact rational numbers and one value at a time.

Shares no code with the kernels: numbers are searched in the sorted list of what a format can say.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

# The place in the list is the code without its sign bit. E4M3's 127th code is NaN.
E4M3 = [
    (Fraction(8 + code % 8) * Fraction(2) ** (code // 8 - 10) if code >= 8 else Fraction(code, 512))
    for code in range(127)
]
E2M1 = [Fraction(m) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E4M3_SIGN, E2M1_SIGN = 0x80, 0x8

FLOAT32_MAX = Fraction(float(np.finfo(np.float32).max))


def midpoints(magnitudes: Sequence[Fraction]) -> list[Fraction]:
    return [(below + above) / 2 for below, above in pairwise(magnitudes)]


def round_to(magnitudes: Sequence[Fraction], x: Fraction) -> int:
    """The code of the nearest magnitude; between two the even code; above all the last one."""
    above = bisect_left(magnitudes, x)
    if above == len(magnitudes):
        return above - 1
    if above == 0:
        return 0
    middle = (magnitudes[above - 1] + magnitudes[above]) / 2
    if x == middle:
        return above if above % 2 == 0 else above - 1
    return above if x > middle else above - 1


def find_power_of_two(amax: Fraction, largest: Fraction) -> int:
    """The least e with amax <= largest x 2^e."""
    exponent = 0
    while largest * Fraction(2) ** exponent < amax:
        exponent += 1
    while largest * Fraction(2) ** (exponent - 1) >= amax:
        exponent -= 1
    return exponent


def encode_ue8m0_group(
    x: Sequence[float], magnitudes: Sequence[Fraction], sign: int, floor: Fraction
) -> tuple[list[int], int]:
    """Codes and scale code of one group with a power of two as its scale."""
    amax = max(floor, *(abs(Fraction(value)) for value in x))
    exponent = find_power_of_two(amax, magnitudes[-1])
    return encode_values(x, Fraction(2) ** exponent, magnitudes, sign), exponent + 127


def encode_main_group(x: Sequence[float]) -> tuple[list[int], int]:
    """Codes and scale code of one group of a main entry."""
    amax = max(Fraction(6, 512), *(abs(Fraction(value)) for value in x))
    scale_code = round_to(E4M3, amax / 6)
    return encode_values(x, E4M3[scale_code], E2M1, E2M1_SIGN), scale_code


def encode_values(
    x: Sequence[float], scale: Fraction, magnitudes: Sequence[Fraction], sign: int
) -> list[int]:
    return [
        round_to(magnitudes, abs(Fraction(value)) / scale) | (sign if np.signbit(value) else 0)
        for value in x
    ]


def encode_row(
    x: np.ndarray, group: int, encode_group: Callable[[list[float]], tuple[list[int], int]]
) -> tuple[list[int], list[int]]:
    """Codes of all channels of a row [C], and the scale code of each group."""
    parts = [encode_group(values.tolist()) for values in x.reshape(-1, group)]
    return [code for codes, _ in parts for code in codes], [scale for _, scale in parts]


def pack_pairs(codes: Sequence[int]) -> list[int]:
    return [even + 16 * odd for even, odd in zip(codes[0::2], codes[1::2], strict=True)]


def decode_values(
    codes: Sequence[int],
    scales: Sequence[Fraction],
    magnitudes: Sequence[Fraction],
    sign: int,
) -> list[float]:
    """The float32 numbers of codes; `scales` has one of a group, or so many codes share one."""
    group = len(codes) // len(scales)
    found = []
    for place, code in enumerate(codes):
        magnitude = magnitudes[code % sign] * scales[place // group]
        # A product of so few bits is a float32 number, unless there is none so large.
        value = float(magnitude) if magnitude <= FLOAT32_MAX else float("inf")
        found.append(-value if code & sign else value)
    return found


def neighbours(x: Fraction) -> Iterator[np.float32]:
    """The float32 number x, and those next to it."""
    middle = np.float32(float(x))
    yield from (np.nextafter(middle, np.float32(0)), middle)
    yield np.nextafter(middle, np.float32(np.inf))


def rows_of(channels: int, magnitudes: Sequence[Fraction]) -> st.SearchStrategy[np.ndarray]:
    """Rows of any finite float32 numbers, and rows of numbers at the format's ties."""
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    moderate = st.floats(-4096, 4096, width=32)
    rows = st.one_of(
        st.lists(finite, min_size=channels, max_size=channels),
        st.lists(moderate, min_size=channels, max_size=channels),
        _rows_at_ties(channels, magnitudes),
    )
    return rows.map(lambda values: np.array(values, np.float32))


@st.composite
def _rows_at_ties(draw: st.DrawFn, channels: int, magnitudes: Sequence[Fraction]) -> list[float]:
    scale = draw(st.sampled_from(E4M3[1:])) * Fraction(2) ** draw(st.integers(-20, 20))
    places = st.sampled_from([*midpoints(magnitudes), *magnitudes[1:]])
    row = []
    for channel in range(channels):
        place = magnitudes[-1] if channel % 16 == 0 else draw(places)
        value = list(neighbours(place * scale))[draw(st.integers(0, 2))]
        row.append(float(-value if draw(st.booleans()) else value))
    return row
