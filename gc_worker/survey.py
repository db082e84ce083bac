"""Asks the nodes of a code group what they have of some blocks of the own node.

Of a block that all twelve nodes hold, the eleven with a higher shard ask one question each and are
done, and the twelfth, which is responsible, asks all others. What is to be done about the answers
is decided in `redundancy`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.errors import NodeError

from .cluster_link import ClusterLink
from .own_blocks import OwnBlocks
from .redundancy import Sightings

LOCATE_DEADLINE_S = 5.0
SILENT_RETRY_S = 30.0
"""A node that starts anew misses no more than this of a pass that may take hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Blocks with what all targets of their group say of them.

    `places`: int64 (n, width), the number in the map of the target that each shard belongs on.
    """

    blocks: OwnBlocks
    places: NDArray[np.int64]
    sightings: Sightings

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def own_shard(self) -> NDArray[np.int64]:
        return self.blocks.headers["shard"].astype(np.int64)

    def take(self, rows: NDArray[np.intp]) -> Survey:
        """The same of some of the blocks."""
        return Survey(
            blocks=self.blocks.take(rows),
            places=self.places[rows],
            sightings=self.sightings.take(rows),
        )


class Surveyor:
    """Asks about blocks of one map. `silent`: targets that are never asked, by name, because their
    node is down or their folder is lost; the answer of a lost one would look like an empty one.

    A target that falls silent meanwhile is left alone for a while. When the map is replaced
    meanwhile, all targets fall silent; make another one then.
    """

    def __init__(
        self,
        link: ClusterLink,
        silent: AbstractSet[str] = frozenset(),
        *,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._map = link.map
        self._clock = clock
        self._silent_until_s = {self._map.target_number_by_name[name]: math.inf for name in silent}

    @property
    def silent(self) -> frozenset[str]:
        """Targets that were silent from the beginning, or at any time since."""
        return frozenset(self._map.targets[number].name for number in self._silent_until_s)

    def begin(self, blocks: OwnBlocks) -> tuple[Survey, int]:
        """The blocks whose shard lies where it belongs, with what their own target knows, and the
        number of the others: the map has changed since they were written, and nobody finds them."""
        width = self._map.width
        own = self._map.target_number_by_name[blocks.target]
        places = np.array(
            [self._place(anchor) for anchor in blocks.headers["anchor"].tolist()], np.int64
        ).reshape(len(blocks), width)
        shard = blocks.headers["shard"].astype(np.int64)
        is_right = (shard < width) & (places[np.arange(len(blocks)), shard % width] == own)
        is_right &= (blocks.headers["k"] == self._map.code.k) & (
            blocks.headers["m"] == self._map.code.m
        )
        rows = np.flatnonzero(is_right)
        kept = blocks.take(rows)
        survey = Survey(
            blocks=kept, places=places[rows], sightings=Sightings.unknown(len(rows), width)
        )
        _fill_own(survey)
        return survey, len(blocks) - len(rows)

    async def ask_lower(self, survey: Survey) -> NDArray[np.intp]:
        """Asks for lower shards until one is found; the rows that no lower node looks after."""
        own_shard, sightings = survey.own_shard, survey.sightings
        everyone = np.arange(len(survey))
        own_version = sightings.versions[everyone, own_shard]
        is_mine = np.ones(len(survey), np.bool_)
        for shard in range(int(own_shard.max(initial=0))):
            rows = np.flatnonzero(is_mine & (own_shard > shard))
            await self._ask(survey, rows, np.full(len(rows), shard))
            is_mine[rows] = sightings.versions[rows, shard] != own_version[rows]
        return np.flatnonzero(is_mine)

    async def ask_rest(self, survey: Survey) -> None:
        """Asks every target that has not answered for a block yet."""
        rows, shards = np.nonzero(~survey.sightings.has_answered)
        await self._ask(survey, rows, shards)

    def _place(self, anchor: bytes) -> list[int]:
        numbers = self._map.target_number_by_name
        return [numbers[name] for name in self._link.place(anchor).targets_by_shard()]

    async def _ask(
        self, survey: Survey, rows: NDArray[np.intp], shards: NDArray[np.integer[Any]]
    ) -> None:
        """Asks, for each pair, the target for that shard about that block; fills `sightings`."""
        asked = survey.places[rows, shards]
        async with asyncio.TaskGroup() as group:
            for number in np.unique(asked).tolist():
                if self._silent_until_s.get(number, 0.0) <= self._clock():
                    chosen = asked == number
                    group.create_task(
                        self._ask_target(survey, number, rows[chosen], shards[chosen])
                    )

    async def _ask_target(
        self, survey: Survey, number: int, rows: NDArray[np.intp], shards: NDArray[Any]
    ) -> None:
        keys = survey.blocks.headers["key"]
        for at in range(0, len(rows), wire.KEYS_PER_REQUEST_MAX):
            some = slice(at, at + wire.KEYS_PER_REQUEST_MAX)
            if self._link.map is not self._map:
                self._silent_until_s[number] = math.inf
                return
            try:
                found = await self._link.ask_records(
                    self._map.targets[number].name,
                    wire.Op.LOCATE,
                    wire.LOCATION,
                    body=keys[rows[some]].tobytes(),
                    count=len(rows[some]),
                    deadline_s=LOCATE_DEADLINE_S,
                )
            except NodeError:
                self._silent_until_s[number] = self._clock() + SILENT_RETRY_S
                return
            _fill(survey.sightings, rows[some], shards[some], found)


def _fill_own(survey: Survey) -> None:
    rows, shards = np.arange(len(survey)), survey.own_shard
    headers, sightings = survey.blocks.headers, survey.sightings
    sightings.versions[rows, shards] = headers["block_xxh3"]
    sightings.generations[rows, shards] = headers["generation"]
    sightings.last_used_s[rows, shards] = survey.blocks.last_used_s
    sightings.has_answered[rows, shards] = True


def _fill(
    sightings: Sightings, rows: NDArray[np.intp], shards: NDArray[Any], found: NDArray[Any]
) -> None:
    is_right = (found["status"] == 1) & (found["shard"] == shards)
    for name, column in (
        ("block_xxh3", sightings.versions),
        ("generation", sightings.generations),
        ("last_used_s", sightings.last_used_s),
    ):
        column[rows, shards] = np.where(is_right, found[name], 0)
    sightings.has_answered[rows, shards] = True
