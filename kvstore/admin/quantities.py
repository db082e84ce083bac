"""Sizes, codes, times, shares and counts as people write and read them. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

from ..cluster.entities import CodeShape, default_write_acks
from ..cluster.validation import SIZE_BYTES_MAX
from ..errors import InvalidArgument, shown
from ..layout import SHARDS_MAX

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE_RULE = "a size such as 4GiB, 512MiB or 1073741824 (units: KiB, MiB, GiB, TiB)"
CODE_RULE = "K+M, data and parity shards of a block, such as 10+2"
DURATION_RULE = "a time such as 3d, 36h, 90min or 259200s (units: d, h, min, s)"
RATIO_RULE = "a share such as 0.9 or 90%"
UNITS_S = {"d": 86400, "h": 3600, "min": 60, "s": 1}
DURATION_S_MAX = 10 * 365 * 86400

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s?([A-Za-z]*)")
_DURATION_PART = re.compile(r"([0-9]{1,100}(?:\.[0-9]{1,9})?)\s?([a-z]+)\s*")
_RATIO = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s?(%?)")
_CODE = re.compile(r"([0-9]{1,4})\+([0-9]{1,4})")


def parse_size_bytes(what: str, text: str) -> int:
    """Bytes that a text such as "4GiB" or "1.5 TiB" means; `what` names it in InvalidArgument."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(what, given=shown(text), expected=SIZE_RULE)
    number, unit = found.groups()
    factor = {name.lower(): size for name, size in UNITS.items()}.get(unit.lower())
    if factor is None:
        # Powers of 1000 are what disks are sold in; guessing which was meant would be 7 % off.
        meant = f"; {unit[0].upper()}iB?" if unit[0].upper() in "KMGT" else ""
        raise InvalidArgument(what, given=shown(text), expected=f"{SIZE_RULE}{meant}")
    size_bytes = Fraction(number) * factor
    if size_bytes.denominator != 1:
        raise InvalidArgument(what, given=shown(text), expected="a whole number of bytes")
    if not 1 <= size_bytes <= SIZE_BYTES_MAX:
        raise InvalidArgument(what, given=shown(text), expected="1 byte to 2^60 bytes")
    return int(size_bytes)


def parse_code(what: str, text: str) -> CodeShape:
    """The code that a text such as "10+2" means; `what` names it in InvalidArgument."""
    found = _CODE.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(what, given=shown(text), expected=CODE_RULE)
    return make_code(what, int(found[1]), int(found[2]))


def make_code(what: str, k: int, m: int) -> CodeShape:
    """A code of k data and m parity shards with the usual write_acks. Raises InvalidArgument."""
    given = f"{k}+{m}"
    if k < 1:
        raise InvalidArgument(what, given=given, expected="at least 1 data shard, such as 1+0")
    if m < 0:
        raise InvalidArgument(what, given=given, expected="0 or more parity shards")
    if k + m > SHARDS_MAX:
        raise InvalidArgument(what, given=given, expected=f"at most {SHARDS_MAX} shards in all")
    return CodeShape(k=k, m=m, write_acks=default_write_acks(k, m))


def parse_duration_s(what: str, text: str) -> int:
    """Seconds that a text such as "3d" or "1d 12h" means; `what` names it in InvalidArgument.

    A number without a unit is refused: seconds, hours and days are all usual here.
    """
    rest, total_s = text.strip().lower(), Fraction(0)
    if not rest:
        raise InvalidArgument(what, given=shown(text), expected=DURATION_RULE)
    while rest:
        found = _DURATION_PART.match(rest)
        if found is None or found[2] not in UNITS_S:
            raise InvalidArgument(what, given=shown(text), expected=DURATION_RULE)
        total_s += Fraction(found[1]) * UNITS_S[found[2]]
        rest = rest[found.end() :]
    if total_s.denominator != 1:
        raise InvalidArgument(what, given=shown(text), expected="a whole number of seconds")
    if total_s > DURATION_S_MAX:
        raise InvalidArgument(what, given=shown(text), expected="at most 10 years (3650d)")
    return int(total_s)


def parse_ratio(what: str, text: str) -> float:
    """0.0 to 1.0 for a text such as "0.9" or "90%"; `what` names it in InvalidArgument."""
    found = _RATIO.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(what, given=shown(text), expected=RATIO_RULE)
    ratio = Fraction(found[1]) / (100 if found[2] else 1)
    if ratio > 1:
        # "90" may be meant as a percentage, and "1.5" as a typing error: nothing is guessed.
        meant = f"; {found[1]}%?" if not found[2] and ratio <= 100 else ""
        expected = f"{RATIO_RULE}, at most 1 or 100%{meant}"
        raise InvalidArgument(what, given=shown(text), expected=expected)
    return float(ratio)


def format_ratio(ratio: float) -> str:
    """A share as a percentage, such as "90 %" or "12.5 %"."""
    return f"{round(ratio * 100, 1):g} %"


def count_of(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun, such as "1 node" or "1,024 blocks"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_size(size_bytes: int) -> str:
    """A size with the largest unit that leaves at least 1, such as "4.0 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.1f} {unit}"
    return f"{size_bytes} B"


def format_duration(duration_s: float) -> str:
    """A time with its two largest units, such as "3 d 4 h" or "12 s"."""
    rest_s = int(duration_s)
    parts = []
    for unit, unit_s in UNITS_S.items():
        count, rest_s = divmod(rest_s, unit_s)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"
