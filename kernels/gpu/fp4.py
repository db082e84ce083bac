"""E2M1 codes in registers: the arithmetic of `kernels.reference.fp4`, eight codes to a word.

Functions here take and give expressions of a TileLang program.
"""

import tilelang.language as T

from .fp8 import Expression, Registers, as_bits, as_float, bits_of

WHOLE = 2.0**23
"""From here to 2^24 float32 numbers are the whole numbers: a sum that lies there is rounded to
nearest even, once, and its lowest bits are the number of whole steps."""

CODES_OF_WORD = 8
WORD_START = -bits_of(WHOLE) * 0x11111111 & 0xFFFFFFFF
"""What eight sums of bits start from, so that the bits of WHOLE itself cancel in every place."""


def place_bits(x: Expression, step: Expression, offset: float) -> Expression:
    """Bits of WHOLE + the place in E2M1's list of magnitudes that x step - offset rounds to.

    The magnitude is from 0 to below 7, its step and offset such that each of the three lines of the
    reference (`encode_e2m1`) is one fused multiply-add, whose only rounding is that to whole steps.
    """
    lines = [
        as_bits(T.ieee_fmaf(x, step * slope, T.float32(WHOLE + first - offset * slope)))
        for slope, first in ((2.0, 0), (1.0, 2), (0.5, 4))
    ]
    return T.min(T.min(lines[0], lines[1]), lines[2])


def e2m1_value(nibble: Expression) -> Expression:
    """The float32 number of the code in the four low bits; others are ignored.

    Its exponent and its mantissa go where float32 has its own; 0.5 becomes a subnormal number. What
    is left is the difference of the biases, a power of two: an exact product.
    """
    sign = (nibble & T.uint32(8)) << T.uint32(28)
    magnitude = (nibble & T.uint32(7)) << T.uint32(22)
    return T.ieee_mul(as_float(magnitude | sign), T.float32(2.0**126))


@T.macro
def encode_e2m1(
    words: Registers,
    numbers: Registers,
    step: Expression,
    offset: float,
    is_bad: Expression,
    codes: Registers,
    is_short: bool,
) -> None:
    """The codes of a lane, two to a byte, of `numbers` (see `place_bits`) and the signs of `words`.

    `is_bad`: whether all of them are to be 0.
    """
    for word in T.unroll(codes.shape[0] // 4):
        packed = T.alloc_var("uint32")
        packed = T.uint32(WORD_START)
        for place in T.unroll(CODES_OF_WORD):
            bits = place_bits(numbers[word * CODES_OF_WORD + place], step, offset)
            packed = packed + (bits << T.cast(4 * place, "uint32"))
        packed = packed | signs_of_word(words, word, is_short)
        packed = T.Select(is_bad, T.uint32(0), packed)
        for byte in T.unroll(4):
            codes[word * 4 + byte] = T.cast(packed >> T.cast(8 * byte, "uint32"), "uint8")


def signs_of_word(words: Registers, word: Expression, is_short: bool) -> Expression:
    """Bit 3 of each code of a word: the signs of eight numbers."""
    if is_short:
        four = [words[word * 4 + at] for at in range(4)]
        even, odd = gather_bytes(four, 1), gather_bytes(four, 3)
    else:
        eight = [words[word * CODES_OF_WORD + at] for at in range(CODES_OF_WORD)]
        even, odd = gather_bytes(eight[0::2], 3), gather_bytes(eight[1::2], 3)
    return ((even >> T.uint32(4)) & T.uint32(0x08080808)) | (odd & T.uint32(0x80808080))


def gather_bytes(words: list[Expression], byte: int) -> Expression:
    """A word of one byte, 0 to 3, of each of four words, by the instruction that picks bytes."""
    two = T.uint32(byte | (4 + byte) << 4)
    low = T.call_extern("uint32", "__byte_perm", words[0], words[1], two)
    high = T.call_extern("uint32", "__byte_perm", words[2], words[3], two)
    return T.call_extern("uint32", "__byte_perm", low, high, T.uint32(0x5410))


@T.macro
def decode_e2m1(codes: Registers, numbers: Registers) -> None:
    """The float32 numbers of two codes to a byte."""
    for at in T.unroll(codes.shape[0]):
        byte = T.cast(codes[at], "uint32")
        numbers[2 * at] = e2m1_value(byte)
        numbers[2 * at + 1] = e2m1_value(byte >> T.uint32(4))
