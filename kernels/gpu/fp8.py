"""Scales and E4M3 codes in registers: the arithmetic of `kernels.reference.fp8` on float32 bits.

Functions here take and give expressions of a TileLang program. Bits are uint32 expressions. Every
operation of float32 is spelled as the one that rounds once (`T.ieee_*`), which no flag of a
compiler replaces by another. What has whole bits as its result is computed with integers: the bits
of positive float32 numbers are ordered as the numbers are, infinity is above all of them and NaN is
above infinity, so the largest of the bits of a group tells its amax and whether it has one.
"""

import struct
from typing import Any

import tilelang.language as T

from ..reference.fp8 import FLOAT32_MANTISSA_BITS, UE8M0_BIAS, UE8M0_NAN

Expression = Any
"""What stands for a value in a TileLang program, such as `T.uint32(1) << T.uint32(4)`."""

Registers = Any
"""A local buffer of a TileLang program: what one thread holds."""

INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000
E4M3_NAN = 0x7F
E4M3_MANTISSA_BITS = 3
E4M3_EXPONENT_MIN = -6
"""The least exponent of a normal number; below, steps are as large as there."""


def bits_of(x: float) -> int:
    """The bits of the float32 number next to x."""
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits


def as_float(bits: Expression) -> Expression:
    return T.reinterpret(bits, "float32")


def as_bits(x: Expression) -> Expression:
    return T.reinterpret(x, "uint32")


def has_no_amax(top: Expression) -> Expression:
    """Whether the largest of a group's bits, without signs, is that of infinity or NaN."""
    return top >= T.uint32(INFINITY_BITS)


def ue8m0_code(top: Expression, amax_min: float, largest: float) -> Expression:
    """The code of the least power of two with amax <= largest x 2^e; anything without an amax."""
    amax_bits = T.max(top, T.uint32(bits_of(amax_min)))
    bias = (UE8M0_BIAS + 1 << FLOAT32_MANTISSA_BITS) - 1 - bits_of(largest)
    return (amax_bits + T.uint32(bias & 0xFFFFFFFF)) >> T.uint32(FLOAT32_MANTISSA_BITS)


def ue8m0_inverse(code: Expression) -> Expression:
    """1 / scale of a code from 1 to 253. Times this is divided by the scale, to the same bits."""
    return as_float((T.uint32(2 * UE8M0_BIAS) - code) << T.uint32(FLOAT32_MANTISSA_BITS))


def ue8m0_value(code: Expression) -> Expression:
    """The float32 number of any code: 2^-127 is subnormal, and NaN has a bit beside infinity's."""
    is_special = (code == T.uint32(0)) | (code == T.uint32(UE8M0_NAN))
    half = T.Select(is_special, T.uint32(NAN_BITS - INFINITY_BITS), T.uint32(0))
    return as_float((code << T.uint32(FLOAT32_MANTISSA_BITS)) | half)


def divide(x: Expression, divisor: Expression, inverse: Expression) -> Expression:
    """x / divisor, but for some 2^-45 of it before it is rounded; `inverse`: 1 / divisor, rounded.

    With y = x inverse, rounded, the remainder x - y divisor is a float32 number. Where x is 0 or so
    small that it is not, the quotient is below 2^-100, and so is what is found.
    """
    near = T.ieee_mul(x, inverse)
    rest = T.ieee_fmaf(-near, divisor, x)
    return T.ieee_fmaf(rest, inverse, near)


def e4m3_step_bits(x: Expression) -> Expression:
    """Bits of the power of two whose sum with x, 0 <= x <= 448, is x rounded to E4M3's steps.

    The step of that sum's float32 numbers is the step of the E4M3 numbers around x, and an addition
    rounds to nearest even. So sum - power is the rounded number, and the difference of their bits
    counts its steps.
    """
    shift = FLOAT32_MANTISSA_BITS - E4M3_MANTISSA_BITS << FLOAT32_MANTISSA_BITS
    exponent_bits = as_bits(x) & T.uint32(INFINITY_BITS)
    return T.max(exponent_bits, T.uint32(bits_of(2.0**E4M3_EXPONENT_MIN))) + T.uint32(shift)


def e4m3_code(sum_bits: Expression, step_bits: Expression) -> Expression:
    """The code of a rounded number: its steps, and 8 codes for each exponent above the least."""
    mantissa = T.uint32(FLOAT32_MANTISSA_BITS - E4M3_MANTISSA_BITS)
    least = FLOAT32_MANTISSA_BITS - E4M3_MANTISSA_BITS + E4M3_EXPONENT_MIN + UE8M0_BIAS
    exponents = (step_bits >> mantissa) - T.uint32(least << E4M3_MANTISSA_BITS)
    return sum_bits - step_bits + exponents


def e4m3_value(code: Expression) -> Expression:
    """The float32 number of any code.

    Exponent and mantissa go where float32 has its own; subnormal codes become subnormal numbers.
    What is left is the difference of the biases, a power of two: an exact product.
    """
    magnitude = code & T.uint32(0x7F)
    scaled = T.ieee_mul(
        as_float(magnitude << T.uint32(FLOAT32_MANTISSA_BITS - E4M3_MANTISSA_BITS)),
        T.float32(2.0 ** (UE8M0_BIAS - 7)),
    )
    bits = T.Select(magnitude == T.uint32(E4M3_NAN), T.uint32(NAN_BITS), as_bits(scaled))
    return as_float(bits | ((code & T.uint32(0x80)) << T.uint32(24)))
