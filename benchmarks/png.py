"""Pictures as numbers: rectangles and small letters on a canvas, written as PNG.

Enough for a chart of bars in the documentation, without a library for pictures.
"""

from __future__ import annotations

import struct
import zlib
from typing import TypeAlias

import numpy as np

Colour: TypeAlias = tuple[int, int, int]

LETTER_WIDTH, LETTER_HEIGHT = 6, 8
"""With the space behind and below."""

# Five columns a letter, the lowest bit on top.
_COLUMNS = {
    " ": "0000000000", "-": "0808080808", ".": "0060600000", ":": "0036360000", "/": "2010080402",
    "(": "001c224100", ")": "0041221c00", "+": "08083e0808", "%": "2313086462", ",": "0050300000",
    "=": "1414141414", "_": "4040404040",
    "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31", "4": "1814127f10",
    "5": "2745454539", "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e",
    "a": "2054545478", "b": "7f48444438", "c": "3844444420", "d": "384444487f", "e": "3854545418",
    "f": "087e090102", "g": "0c5252523e", "h": "7f08040478", "i": "00447d4000", "j": "2040443d00",
    "k": "7f10284400", "l": "00417f4000", "m": "7c04180478", "n": "7c08040478", "o": "3844444438",
    "p": "7c14141408", "q": "081414187c", "r": "7c08040408", "s": "4854545420", "t": "043f444020",
    "u": "3c4040207c", "v": "1c2040201c", "w": "3c4030403c", "x": "4428102844", "y": "0c5050503c",
    "z": "4464544c44",
}  # fmt: skip
_NO_LETTER = "7f4141417f"


class Canvas:
    """White at first; what lies outside is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self._pixels = np.full((height, width, 3), 255, dtype=np.uint8)

    @property
    def width(self) -> int:
        return self._pixels.shape[1]

    def fill(self, left: int, top: int, width: int, height: int, colour: Colour) -> None:
        """A rectangle."""
        bottom, right = max(0, top + height), max(0, left + width)
        self._pixels[max(0, top) : bottom, max(0, left) : right] = colour

    def write(self, left: int, top: int, text: str, colour: Colour = (40, 40, 40)) -> None:
        """A line of text, in lower case."""
        for letter in text.lower():
            columns = bytes.fromhex(_COLUMNS.get(letter, _NO_LETTER))
            for x, column in enumerate(columns):
                for y in range(LETTER_HEIGHT):
                    if column >> y & 1:
                        self.fill(left + x, top + y, 1, 1, colour)
            left += LETTER_WIDTH

    def encode(self, scale: int = 1) -> bytes:
        """The picture as PNG (RFC 2083), each pixel `scale` by `scale`."""
        pixels = self._pixels.repeat(scale, 0).repeat(scale, 1)
        height, width, _ = pixels.shape
        # Before each line the number of its filter: 0, for none.
        lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)
        lines[:, 1:] = pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            _chunk(kind, data)
            for kind, data in (
                (b"IHDR", header),
                (b"IDAT", zlib.compress(lines.tobytes(), 9)),
                (b"IEND", b""),
            )
        )


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
