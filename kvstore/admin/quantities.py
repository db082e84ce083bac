"""Sizes, codes and times as people write and read them. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

from ..cluster.entities import CodeShape, default_write_acks
from ..cluster.validation import SIZE_BYTES_MAX
from ..errors import InvalidArgument
from ..layout import SHARDS_MAX

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE_RULE = "a size such as 4GiB, 512MiB or 1073741824 (units: KiB, MiB, GiB, TiB)"
CODE_RULE = "K+M, data and parity shards of a block, such as 10+2"

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s?([A-Za-z]*)")
_CODE = re.compile(r"([0-9]{1,4})\+([0-9]{1,4})")


def parse_size_bytes(what: str, text: str) -> int:
    """Bytes that a text such as "4GiB" or "1.5 TiB" means; `what` names it in InvalidArgument."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(what, given=repr(text), expected=SIZE_RULE)
    number, unit = found.groups()
    factor = {name.lower(): size for name, size in UNITS.items()}.get(unit.lower())
    if factor is None:
        # Powers of 1000 are what disks are sold in; guessing which was meant would be 7 % off.
        meant = f"; {unit[0].upper()}iB?" if unit[0].upper() in "KMGT" else ""
        raise InvalidArgument(what, given=repr(text), expected=f"{SIZE_RULE}{meant}")
    size_bytes = Fraction(number) * factor
    if size_bytes.denominator != 1:
        raise InvalidArgument(what, given=repr(text), expected="a whole number of bytes")
    if not 1 <= size_bytes <= SIZE_BYTES_MAX:
        raise InvalidArgument(what, given=repr(text), expected="1 byte to 2^60 bytes")
    return int(size_bytes)


def parse_code(what: str, text: str) -> CodeShape:
    """The code that a text such as "10+2" means; `what` names it in InvalidArgument."""
    found = _CODE.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(what, given=repr(text), expected=CODE_RULE)
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
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest_s = divmod(rest_s, unit_s)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"
