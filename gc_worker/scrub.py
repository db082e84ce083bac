"""Scrub: reads every own slot again and again, slowly, and finds what has gone bad on the disk.

Reads the segment files beside the node, read-only. A shard that does not fit the checksum in its
header, or cannot be read, is reported to the own node, which looks for itself and takes the slot
out of use; the redundancy check completes the block again. A header that is damaged itself names no
key to report, so its slot is emptied instead.

Pages that scrub brought into memory are given back, so that it does not push out what clients use.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.cluster.entities import Target
from kvstore.errors import NodeError
from kvstore.event_log import short_key
from kvstore.node.segment import LOCATION_BITS, TargetIdentity
from kvstore.node.target_folder import IDENTITY_NAME

from .context import WorkerContext
from .pacing import TokenBucket
from .scrub_position import ScrubPosition, forget_position, load_position, save_position
from .scrub_reader import Found, SegmentReader, SlotState

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
CHUNK_SLOTS_MAX = 4096
IDLE_S = 10.0
"""How long scrub waits when it is off, or has nothing to read, or its node does not answer."""
SAVE_INTERVAL_S = 10.0
REPORT_DEADLINE_S = 5.0
BUSY_RETRY_S = 1.0
BUSY_RETRIES_MAX = 5
PASS_MIN_S = 600.0
"""A small target is not read without a break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubOptions:
    """How scrub goes about it; how fast, and whether, is policy."""

    pass_min_s: float = PASS_MIN_S
    """A pass that is done sooner is followed by a rest."""
    idle_s: float = IDLE_S


@dataclass(slots=True)
class _Tally:
    """What one pass over one target has seen."""

    slots: int = 0
    bytes: int = 0
    damaged: int = 0
    quarantined: int = 0


async def run(context: WorkerContext, options: ScrubOptions | None = None) -> None:
    """Target after target, pass after pass, until cancelled. Goes on where the last process was."""
    options = options or ScrubOptions()
    while True:
        begun_s = context.clock.monotonic_s()
        for target in context.own_targets():
            try:
                await scrub_target(context, target, options)
            except (NodeError, OSError) as error:
                context.counters.node_errors += 1
                log.warning("scrub stopped target=%s: %s", target.name, error)
                await context.sleep(options.idle_s)
        context.counters.scrub_passes += 1
        left_s = options.pass_min_s - (context.clock.monotonic_s() - begun_s)
        await context.sleep(max(left_s, options.idle_s))


async def scrub_target(
    context: WorkerContext, target: Target, options: ScrubOptions | None = None
) -> None:
    """One pass over one own target, from where the last one was left to the end.

    Raises NodeError if the own node does not answer, OSError if the target's folder is lost.
    """
    await _TargetScrub(context, target, options or ScrubOptions()).run()


class _TargetScrub:
    def __init__(self, context: WorkerContext, target: Target, options: ScrubOptions) -> None:
        self._context = context
        self._target = target
        self._options = options
        self._folder = context.folder(target)
        self._identity = TargetIdentity(context.link.map.cluster_id, target.name)
        self._chunk_slots = 64
        self._tally = _Tally()
        self._saved_at_s = context.clock.monotonic_s()
        self._bucket = TokenBucket(
            lambda: context.number("scrub_bytes_per_s") * context.traffic.rate_factor,
            clock=context.clock.monotonic_s,
            sleep=context.sleep,
        )

    async def run(self) -> None:
        self._require_folder()
        kept = load_position(self._folder) or ScrubPosition()
        position = kept.begun(self._context.now_s())
        while True:
            while not self._context.is_on("scrub_is_on"):
                await self._context.sleep(self._options.idle_s)
            head, rows = await self._context.link.scan(
                self._target.name, position.segment, position.slot, self._chunk_slots
            )
            head, rows = cut_scan(head, rows, CHUNK_BYTES)
            if len(rows):
                self._chunk_slots = max(1, min(CHUNK_BYTES // head.payload_bytes, CHUNK_SLOTS_MAX))
                await self._check_rows(head, rows)
            following = (head.next_segment, head.next_slot)
            if head.is_end or following <= (position.segment, position.slot):
                break
            position = position.moved_to(*following)
            self._publish(position)
            self._save_now_and_then(position)
        self._finish(position)

    async def _check_rows(self, head: wire.ScanHead, rows: NDArray[Any]) -> None:
        slots = np.flatnonzero(rows["status"] == 1)
        if not len(slots):
            return
        await self._bucket.take(len(slots) * head.payload_bytes)
        found = await asyncio.to_thread(
            self._read, head, (slots + head.first_slot).tolist(), rows["generation"][slots]
        )
        tally, counters = self._tally, self._context.counters
        tally.slots += len(found)
        tally.bytes += len(found) * head.payload_bytes
        counters.scrubbed_slots += len(found)
        counters.scrubbed_bytes += len(found) * head.payload_bytes
        await self._report([one for one in found if one.state is SlotState.BAD])
        await self._empty([one for one in found if one.state is SlotState.BAD_HEADER])

    def _read(
        self, head: wire.ScanHead, slots: Sequence[int], generations: NDArray[np.uint64]
    ) -> list[Found]:
        try:
            reader = SegmentReader.open(self._folder, self._identity, head.segment)
        except (OSError, ValueError) as error:
            # Removed meanwhile, or cut: the node sees that for itself.
            log.warning("scrub: segment %d cannot be opened: %s", head.segment, error)
            return []
        try:
            return reader.check(slots, generations)
        finally:
            reader.close()

    async def _report(self, found: Sequence[Found]) -> None:
        """Have the own node look at shards that seem bad."""
        for at in range(0, len(found), wire.REPORTS_PER_REQUEST_MAX):
            some = found[at : at + wire.REPORTS_PER_REQUEST_MAX]
            items = np.zeros(len(some), wire.REPORT_ITEM)
            items["key"] = np.frombuffer(b"".join(one.key for one in some), "V32")
            items["generation"] = [one.generation for one in some]
            outcomes = await self._ask_patiently(wire.Op.REPORT, items)
            quarantined = int((outcomes == wire.ReportOutcome.QUARANTINED).sum())
            # Good or absent: the slot was written again between the node's answer and our read.
            self._note_damage(quarantined, quarantined)
            for one, outcome in zip(some, outcomes.tolist(), strict=True):
                if outcome == wire.ReportOutcome.QUARANTINED:
                    log.error(
                        "scrub: damaged shard key=%s location=%d: %s",
                        short_key(one.key),
                        one.location,
                        one.problem,
                    )

    async def _empty(self, found: Sequence[Found]) -> None:
        """Take shards with damaged headers out of the index: the next start would not find them."""
        for at in range(0, len(found), wire.KEYS_PER_REQUEST_MAX):
            some = found[at : at + wire.KEYS_PER_REQUEST_MAX]
            items = np.zeros(len(some), wire.EVICT_ITEM)
            items["location"] = [one.location for one in some]
            items["generation"] = [one.generation for one in some]
            items["used_until_s"] = 0xFFFFFFFF
            items["reason"] = wire.EvictReason.ORPHANED
            outcomes = await self._ask_patiently(wire.Op.EVICT, items)
            gone = int((outcomes == wire.EvictOutcome.EVICTED).sum())
            self._note_damage(gone, 0)
            if gone:
                log.error("scrub: %d slots with damaged headers emptied", gone)

    async def _ask_patiently(self, op: wire.Op, items: NDArray[Any]) -> NDArray[np.uint8]:
        """Asks the own node, again if it has too much to check already."""
        for _ in range(BUSY_RETRIES_MAX):
            try:
                return await self._ask(op, items)
            except NodeError as error:
                log.info("scrub: %s; asking again", error)
                await self._context.sleep(BUSY_RETRY_S)
        return await self._ask(op, items)

    async def _ask(self, op: wire.Op, items: NDArray[Any]) -> NDArray[np.uint8]:
        return await self._context.link.ask_records(
            self._target.name,
            op,
            np.dtype("u1"),
            body=items.tobytes(),
            count=len(items),
            deadline_s=REPORT_DEADLINE_S,
        )

    def _note_damage(self, damaged: int, quarantined: int) -> None:
        self._tally.damaged += damaged
        self._tally.quarantined += quarantined
        self._context.counters.damaged_found += damaged
        self._context.counters.quarantined += quarantined
        if damaged:
            self._context.events.add(
                self._context.now_s(), "damage", target=self._target.name, shards=damaged
            )

    def _publish(self, position: ScrubPosition) -> None:
        """Put what this target says now into the report of all."""
        before = self._context.reports.get("scrub", {}).get("targets", {})
        self._context.reports["scrub"] = describe_scrub(
            {**before, self._target.name: self._values(position)}
        )

    def _values(self, position: ScrubPosition) -> dict[str, Any]:
        return {
            "finished_at_s": position.finished_at_s or None,
            "location": (position.segment << LOCATION_BITS) + position.slot,
            "passes": position.passes,
            "started_at_s": position.started_at_s,
            "last_pass_s": position.last_pass_s,
            "slots": self._tally.slots,
            "bytes": self._tally.bytes,
            "damaged": self._tally.damaged,
            "quarantined": self._tally.quarantined,
        }

    def _require_folder(self) -> None:
        """OSError if the folder is lost: its node answers as an empty one then, and what would be
        written there would lie in somebody else's place."""
        if not (self._folder / IDENTITY_NAME).is_file():
            raise FileNotFoundError(errno.ENOENT, "the target's folder is lost", str(self._folder))

    def _save_now_and_then(self, position: ScrubPosition) -> None:
        now_s = self._context.clock.monotonic_s()
        if now_s - self._saved_at_s >= SAVE_INTERVAL_S:
            self._saved_at_s = now_s
            self._require_folder()
            self._save(position)

    def _save(self, position: ScrubPosition) -> bool:
        """Keep the position, if that is possible: a full disk must not keep scrub from its end."""
        try:
            save_position(self._folder, position)
        except OSError as error:
            log.warning("scrub: position not kept target=%s: %s", self._target.name, error)
            return False
        return True

    def _finish(self, position: ScrubPosition) -> None:
        self._require_folder()
        ended = position.ended(self._context.now_s())
        if not self._save(ended):
            # Or the next pass would begin where this one was when it could still be kept.
            forget_position(self._folder)
        self._publish(ended)
        log.info(
            "scrub pass done target=%s slots=%d bytes=%d damaged=%d seconds=%d",
            self._target.name,
            self._tally.slots,
            self._tally.bytes,
            self._tally.damaged,
            ended.last_pass_s,
        )


def describe_scrub(targets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The report of all targets; `at_s` is when the last of them had been read as a whole, Unix
    time, None as long as one never was."""
    finished = [values["finished_at_s"] for values in targets.values()]
    at_s = min((one for one in finished if one is not None), default=None)
    return {"at_s": None if None in finished else at_s, "targets": dict(targets)}


def cut_scan(
    head: wire.ScanHead, rows: NDArray[Any], bytes_max: int
) -> tuple[wire.ScanHead, NDArray[Any]]:
    """As many of the slots as hold `bytes_max` of payload, at least one; the rest comes next."""
    count = max(bytes_max // max(head.payload_bytes, 1), 1)
    if len(rows) <= count:
        return head, rows
    following = head._replace(
        slots=count, next_segment=head.segment, next_slot=head.first_slot + count, is_end=False
    )
    return following, rows[:count]
