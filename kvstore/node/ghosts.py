"""Remembers why keys left, so that a miss can be explained: a table of fixed size, and soft state.

Only the first 8 bytes of a key are kept, which are as good as random, because keys are hashes. Each
of them has one place; a newer key takes it from an older one. So what is said of a key is a
statistic and never a decision: "never stored" may be a key that left long ago.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..wire import EvictReason

GHOSTS_MAX = 1 << 18
_WORDS_PER_KEY = 4


class MissReason(enum.IntEnum):
    """Why a key that is asked for is not here. The first ones are those of `EvictReason`."""

    NEVER_STORED = 0
    EXPIRED = int(EvictReason.EXPIRED)
    EVICTED = int(EvictReason.LEAST_USED)
    ORPHANED = int(EvictReason.ORPHANED)
    REJECTED = 4
    """It was found damaged."""
    FORGOTTEN = 5
    """A client asked to forget it."""


REASON_NAMES = tuple(reason.name.lower() for reason in MissReason)


class Ghosts:
    """Why keys left, of at most `ghosts_max` keys (a power of two); 9 bytes of memory each."""

    def __init__(self, ghosts_max: int = GHOSTS_MAX) -> None:
        assert ghosts_max & (ghosts_max - 1) == 0
        self._mask = np.uint64(ghosts_max - 1)
        self._prints = np.zeros(ghosts_max, np.uint64)
        self._reasons = np.zeros(ghosts_max, np.uint8)

    def remember(self, keys: Sequence[bytes], reasons: NDArray[np.uint8] | MissReason) -> None:
        """`keys` have just left; `reasons`: one MissReason for all, or one each."""
        if not keys:
            return
        prints = _prints_of(b"".join(keys))
        places = prints & self._mask
        self._prints[places] = prints
        self._reasons[places] = reasons

    def count_reasons(self, keys: bytes, is_missed: NDArray[np.bool_]) -> list[int]:
        """How many of the missed among `keys` (32 bytes each, joined) left for each MissReason.

        `is_missed` has shape (keys,).
        """
        prints = _prints_of(keys)[is_missed]
        places = prints & self._mask
        reasons = np.where(self._prints[places] == prints, self._reasons[places], 0)
        counts: list[int] = np.bincount(reasons, minlength=len(MissReason)).tolist()
        return counts


class MissCounts:
    """How many keys were asked for that were not here, by MissReason."""

    __slots__ = ("_counts", "_ghosts")

    def __init__(self, ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        self._counts = [0] * len(MissReason)

    def note(self, keys: bytes, is_missed: NDArray[np.bool_]) -> None:
        """A client asked for `keys` (32 bytes each, joined); shape of `is_missed`: (keys,)."""
        if keys:
            found = self._ghosts.count_reasons(keys, is_missed)
            self._counts = [a + b for a, b in zip(self._counts, found, strict=True)]

    def describe(self) -> dict[str, int]:
        """What STAT shows as `misses_by_reason`."""
        return dict(zip(REASON_NAMES, self._counts, strict=True))


def _prints_of(keys: bytes) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = np.frombuffer(keys, np.uint64)
    return words[::_WORDS_PER_KEY]
