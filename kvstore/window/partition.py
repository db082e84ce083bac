"""Which entrypoint holds the directory entries of a key: rendezvous hashing, the same everywhere.

Pure. Every agent asks it with the names of the entrypoints that it believes alive; formula and
golden vectors: docs/formats/window.md. It says where an entry belongs, not whether it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..cluster.placement import MIX_A, MIX_B
from ..errors import InvalidArgument
from ..key import KEY_BYTES

NAME_SEED = 2
"""Another one than placement has: an entrypoint and a group of one name shall not agree."""
_WORDS_PER_KEY = KEY_BYTES // 8


def choose_entrypoints(keys: Sequence[bytes], names: Sequence[str]) -> NDArray[np.intp]:
    """For each key the index in `names` of the entrypoint that holds its entries; shape (keys,).

    The highest of h(key, name) wins, whatever the order of the names, so that a name that is added
    or taken away moves the keys which it wins or held and no other (Thaler and Ravishankar, "Using
    Name-Based Mappings to Increase Hit Rates", IEEE/ACM Transactions on Networking 6(1), 1998).
    A key is a sha256, so its first 8 bytes need no hashing; the names are hashed by xxh3-64.
    Raises InvalidArgument if there is no name, or one of them twice.
    """
    seeds, order = _seeds_of(tuple(names))
    joined = b"".join(keys)
    assert len(joined) == len(keys) * KEY_BYTES, "a key of another length"
    words = np.frombuffer(joined, "<u8")[::_WORDS_PER_KEY]
    # Shape (names, keys). argmax takes the first of equals: the name that sorts first.
    chosen: NDArray[np.intp] = order[np.argmax(_mixed(seeds[:, None] ^ words), axis=0)]
    return chosen


def choose_entrypoint(key: bytes, names: Sequence[str]) -> str:
    """The name of the one that holds the entries of `key`; see `choose_entrypoints`."""
    return names[int(choose_entrypoints([key], names)[0])]


def plan_moves(
    keys: Sequence[bytes], before: Sequence[str], after: Sequence[str]
) -> dict[tuple[str, str], list[bytes]]:
    """The keys whose entrypoint is another among `after` than among `before`, by (old, new) name;
    the old one is "" for all keys if there was none."""
    new = [after[at] for at in choose_entrypoints(keys, after).tolist()]
    old: list[str] = [""] * len(keys)
    if before:
        old = [before[at] for at in choose_entrypoints(keys, before).tolist()]
    moved: dict[tuple[str, str], list[bytes]] = {}
    for key, was, now in zip(keys, old, new, strict=True):
        if was != now:
            moved.setdefault((was, now), []).append(key)
    return moved


@lru_cache(maxsize=64)
def _seeds_of(names: tuple[str, ...]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """Hashes of the names in sorted order, and at which index of `names` each of them stands."""
    if not names or len(set(names)) != len(names):
        raise InvalidArgument(
            "names of entrypoints", given=list(names), expected="one or more, each once"
        )
    order = np.array(sorted(range(len(names)), key=names.__getitem__), np.intp)
    hashes = [xxhash.xxh3_64_intdigest(names[at].encode(), seed=NAME_SEED) for at in order]
    return np.array(hashes, np.uint64), order


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, with the constants that `placement` has."""
    x = (x ^ (x >> np.uint64(30))) * MIX_A
    x = (x ^ (x >> np.uint64(27))) * MIX_B
    return x ^ (x >> np.uint64(31))
