"""Verify: reads some blocks from every node that holds them, and checks every byte.

    random own blocks -> who holds what -> all shards of all holders -> do they fit their checksums?
    -> the block is decoded -> is each shard the one that belongs to this block?

Stronger than scrub, which only sees the own disk, and dearer: for a sample, on demand. Nothing is
renewed; damaged shards are reported to their nodes, which look for themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.entities import Target

from .context import WorkerContext
from .headers import HeaderReader
from .hottest import Band, rows_of_scan, walk_slots
from .own_blocks import find_silent_targets, read_blocks
from .rebuild import Rebuild, RebuildJob
from .redundancy import count_redundancy
from .survey import Survey, Surveyor

SAMPLE_MAX = 100_000
PROBLEMS_LISTED_MAX = 100
KEY_BYTES_TOLD = 8
"""Of each verified key: enough to tell blocks apart, and of a whole sample less than 2 MB."""
READ_DEADLINE_S = 5.0
SURVEY_BLOCKS = 256

GOOD = "good"
ABSENT = "absent"
SILENT = "silent"
OTHER_VERSION = "other version"
DAMAGED = "damaged"
WRONG = "wrong"
"""It fits its own checksum and is not the shard of this block."""


@dataclass(slots=True)
class VerifyReport:
    """What was found. `shards` counts the shards of all blocks by what they are."""

    asked: int
    verified: int = 0
    """Blocks of which every byte was read, or was found missing."""
    good: int = 0
    """Of those, blocks that can be read to the bit, whatever else is wrong with them."""
    whole: int = 0
    """Of those, blocks with all shards good."""
    bytes: int = 0
    shards: Counter[str] = field(default_factory=Counter)
    problems: list[dict[str, Any]] = field(default_factory=list)
    """The first PROBLEMS_LISTED_MAX: key, shard, node, what."""
    keys: list[str] = field(default_factory=list)
    """How the keys of the verified blocks begin, in hex; several nodes may draw the same block."""
    is_complete: bool = True
    """False if time ran out before the whole sample was read."""
    duration_s: float = 0.0

    def to_values(self) -> dict[str, Any]:
        """As JSON will show it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "shards": dict(self.shards)}


class Sampler:
    """Draws `count` of the rows it is shown, each with equal chance, in bounded memory."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._rng = np.random.default_rng(seed)
        self._kept: list[tuple[NDArray[np.float64], Band]] = []

    def add(self, rows: Band) -> None:
        """Show it rows."""
        self._kept.append((self._rng.random(len(rows)), rows))
        self._kept = [self._cut()]

    def build(self) -> Band:
        """The rows that were drawn, by location."""
        _, rows = self._cut()
        return rows.take(np.argsort(rows.location))

    def _cut(self) -> tuple[NDArray[np.float64], Band]:
        if not self._kept:
            return np.zeros(0), Band(
                np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.uint32)
            )
        lots = np.concatenate([lot for lot, _ in self._kept])
        names = ("location", "generation", "last_used_s")
        rows = Band(
            *(np.concatenate([getattr(band, name) for _, band in self._kept]) for name in names)
        )
        if len(lots) <= self._count:
            return lots, rows
        chosen = np.argpartition(lots, self._count)[: self._count]
        return lots[chosen], rows.take(chosen)


async def verify_sample(context: WorkerContext, sample: int, *, deadline_s: float) -> VerifyReport:
    """Checks `sample` random blocks of the own node, fewer if it has fewer or time runs out.

    Raises NodeError if the own node does not answer, or the cluster map changes meanwhile.
    """
    begun_s = context.clock.monotonic_s()
    report = VerifyReport(asked=sample)
    silent = await find_silent_targets(context)
    surveyor = Surveyor(context.link, silent, clock=context.clock.monotonic_s)
    end_s = begun_s + deadline_s
    for name, rows in await _draw(context, min(sample, SAMPLE_MAX)):
        await _verify_target(context, surveyor, name, rows, report, end_s=end_s)
        if not report.is_complete:
            break
    report.duration_s = round(context.clock.monotonic_s() - begun_s, 3)
    return report


async def _verify_target(
    context: WorkerContext,
    surveyor: Surveyor,
    name: str,
    rows: Band,
    report: VerifyReport,
    *,
    end_s: float,
) -> None:
    """Check the blocks in `rows` of one own target until time is up."""
    surveyor.require_map(name)
    reader = HeaderReader(context.folder(context.link.map.target_by_name[name]))
    try:
        for at in range(0, len(rows), SURVEY_BLOCKS):
            if context.clock.monotonic_s() > end_s:
                report.is_complete = False
                return
            blocks = await read_blocks(reader, name, rows.take(slice(at, at + SURVEY_BLOCKS)))
            survey, _ = surveyor.begin(blocks)
            await surveyor.ask_rest(survey)
            for row in range(len(survey)):
                if context.clock.monotonic_s() > end_s:
                    report.is_complete = False
                    return
                surveyor.require_map(name)
                await _verify_block(context, survey, row, report)
    finally:
        reader.close()


async def _draw(context: WorkerContext, sample: int) -> list[tuple[str, Band]]:
    """Random rows of the own targets, target by target; as many of each as fall to it."""
    per_target: list[tuple[str, Band]] = []
    targets = context.own_targets()
    left = sample
    for i, target in enumerate(targets):
        sampler = Sampler(-(-left // (len(targets) - i)), context.rng.getrandbits(63))
        scan = partial(context.link.scan, target.name)
        async for head, rows in walk_slots(scan):
            sampler.add(rows_of_scan(head, rows))
        drawn = sampler.build()
        left -= len(drawn)
        per_target.append((target.name, drawn))
    return per_target


async def _verify_block(
    context: WorkerContext, survey: Survey, row: int, report: VerifyReport
) -> None:
    """Read all shards of one block, compare them with what they should be, and note it."""
    one = survey.take(np.array([row], np.intp))
    version = int(count_redundancy(one.sightings).version[0])
    header, cluster_map = one.blocks.headers[0], context.link.map
    names = [cluster_map.targets[place].name for place in one.places[0].tolist()]
    is_holder = one.sightings.versions[0] == version
    rebuild = Rebuild(
        RebuildJob(
            keys=[header["key"].tobytes()],
            versions=[version],
            shard_bytes=int(header["payload_bytes"]),
            channels=[context.link.channel(name) for name in names],
            holders=np.flatnonzero(is_holder).tolist(),
        ),
        context.link.router.code,
        context.link.loop,
    )
    await rebuild.read(np.flatnonzero(is_holder).tolist(), READ_DEADLINE_S)
    # A bad sector of another shard may have ended the connection on which these were to come.
    unheard = np.flatnonzero(is_holder & ~rebuild.has_answered[0]).tolist()
    if unheard:
        await rebuild.read(unheard, READ_DEADLINE_S)
    received = rebuild.area[0].copy()
    rebuild.solve()
    rebuild.encode()
    states = judge_shards(one, is_holder, rebuild, received)
    report.verified += 1
    report.good += bool(rebuild.is_good[0])
    report.whole += states.count(GOOD) == len(states)
    report.bytes += rebuild.bytes_read
    report.keys.append(header["key"].tobytes()[:KEY_BYTES_TOLD].hex())
    report.shards.update(states)
    targets = [cluster_map.target_by_name[name] for name in names]
    _list_problems(report, header["key"].tobytes(), targets, states)


def _list_problems(
    report: VerifyReport, key: bytes, targets: Sequence[Target], states: Sequence[str]
) -> None:
    for shard, state in enumerate(states):
        if state != GOOD and len(report.problems) < PROBLEMS_LISTED_MAX:
            report.problems.append(
                {
                    "key": key.hex(),
                    "shard": shard,
                    "node": targets[shard].node,
                    "target": targets[shard].name,
                    "what": state,
                }
            )


def judge_shards(
    one: Survey, is_holder: NDArray[np.bool_], rebuild: Rebuild, received: NDArray[np.uint8]
) -> list[str]:
    """What each shard of one block is; `received`: uint8 (width, shard_bytes), as they came.

    Pure. If the block could not be made, no shard that fits its own checksum can be told from a
    wrong one; all count as wrong then.
    """
    states = []
    sightings = one.sightings
    for shard in range(len(is_holder)):
        if not sightings.has_answered[0, shard]:
            state = SILENT
        elif not is_holder[shard]:
            state = OTHER_VERSION if sightings.versions[0, shard] else ABSENT
        elif rebuild.is_damaged[0, shard]:
            state = DAMAGED
        elif not rebuild.has_answered[0, shard]:
            state = SILENT
        elif not rebuild.has_arrived[0, shard]:
            # It had the shard a moment ago: taken out of use since, or evicted, or replaced.
            state = ABSENT
        elif rebuild.is_good[0] and np.array_equal(received[shard], rebuild.area[0, shard]):
            state = GOOD
        else:
            state = WRONG
        states.append(state)
    return states
