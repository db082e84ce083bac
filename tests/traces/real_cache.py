"""A real target under a trace, in virtual time: real index, slots, operations and victims.

Only the sockets and the clock are missing: each request matches, reads what it hits and writes what
it misses through the operations of the node, and the worker's pass is SCAN, `plan_eviction` and
EVICT as it runs beside a node. Slots are small, because what is stored does not matter here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gc_worker.columns import TargetColumns, scan_columns
from gc_worker.plan import (
    EvictionRules,
    Room,
    choose_bucket_s,
    find_next_expiry_s,
    plan_eviction,
)
from kvstore import wire
from kvstore.node.slot import SlotGeometry
from tests.kvstore.node.driven_node import DrivenNode, SetClock
from tests.kvstore.node.raw_client import Shard

from .oracle import HitCount
from .requests import Request

SHARD_BYTES = 64
HIGH, LOW = 0.90, 0.89
START_UNIX_S = 1_800_000_000
PAYLOAD = bytes(SHARD_BYTES)
T = TypeVar("T")


class RealCache:
    """One target with room for `slots`, kept between the watermarks by the worker's pass."""

    def __init__(self, folder: Path, *, slots: int, ttl_s: int) -> None:
        slot_bytes = SlotGeometry(SHARD_BYTES).slot_bytes
        self._clock = SetClock(unix_s=START_UNIX_S)
        self._slots = slots
        self._rules = EvictionRules(ttl_s={}, ttl_s_else=ttl_s)
        self._node = DrivenNode(
            folder,
            clock=self._clock,
            # Each segment has a page before its headers and payloads begin on a page of their own.
            capacity_bytes=(slots + 64) * slot_bytes + 9 * 8192,
            segment_bytes=max(slots // 8, 16) * slot_bytes,
            slots_max=slots,
            memory_bytes=4 << 20,
        )
        self._next_expiry_s = START_UNIX_S
        self.evicted = 0

    def close(self) -> None:
        self._node.close()

    def request(self, blocks: tuple[int, ...], at_s: float) -> int:
        """Hit what is here of the leading blocks, then save the others. Returns blocks hit."""
        self._clock.advance(START_UNIX_S + at_s - self._clock.unix_s)
        self._run_worker()
        keys = [_key(block) for block in blocks]
        hits = self._match(keys)
        for at in range(0, hits, wire.KEYS_PER_REQUEST_MAX):
            found = self._node.ask_read(keys[at : min(at + 1024, hits)], SHARD_BYTES)
            assert len(b"".join(found.payloads)) == min(1024, hits - at) * SHARD_BYTES
        for at in range(hits, len(keys), wire.KEYS_PER_REQUEST_MAX):
            shards = [
                Shard(key, PAYLOAD, block_index=at + index, payload_xxh3=_CHECKSUM)
                for index, key in enumerate(keys[at : at + 1024])
            ]
            self._node.write(shards)
            # A long prompt fills what the watermark leaves: the worker looks while it is saved.
            self._run_worker()
        return hits

    def _match(self, keys: Sequence[bytes]) -> int:
        for at in range(0, len(keys), wire.KEYS_PER_REQUEST_MAX):
            is_here = self._node.match(keys[at : at + wire.KEYS_PER_REQUEST_MAX])
            if not all(is_here):
                return at + is_here.index(False)
        return len(keys)

    def _run_worker(self) -> None:
        """What the worker does when it looks: nothing expired stays, nor more than HIGH."""
        now_s = int(self._clock.unix_s)
        used = len(self._node.target.index)
        if used <= HIGH * self._slots and now_s <= self._next_expiry_s:
            return
        columns = _run(scan_columns(self._scan, tuple(self._node.target.ttl_class_names)))
        excess = used - int(LOW * self._slots) if used > HIGH * self._slots else 0
        bucket_s = choose_bucket_s(columns, self._rules, now_s=now_s)
        rules = dataclasses.replace(self._rules, bucket_s=bucket_s)
        plan = plan_eviction(columns, rules, now_s=now_s, room=Room(slots=excess))
        self._evict(columns.take(plan.rows), plan.reasons)
        self.evicted += len(plan)
        # Uses until then only make it later.
        next_expiry_s = find_next_expiry_s(columns, rules, now_s=now_s)
        self._next_expiry_s = next_expiry_s if next_expiry_s is not None else now_s
        self._next_expiry_s = max(self._next_expiry_s, now_s)

    async def _scan(
        self, segment: int, first_slot: int, slots_max: int
    ) -> tuple[wire.ScanHead, NDArray[Any]]:
        body = wire.pack_scan(segment, first_slot, slots_max)
        answer = self._node.run(self._node.begin(wire.Op.SCAN, body=body))
        rows = np.frombuffer(b"".join(answer.payloads), wire.SCAN_ROW)
        return wire.parse_scan_head(answer.body), rows

    def _evict(self, victims: TargetColumns, reasons: NDArray[np.uint8]) -> None:
        items = np.zeros(len(victims), wire.EVICT_ITEM)
        items["location"] = victims.location
        items["generation"] = victims.generation
        items["used_until_s"] = victims.last_used_s
        items["reason"] = reasons
        for at in range(0, len(items), wire.KEYS_PER_REQUEST_MAX):
            piece = items[at : at + wire.KEYS_PER_REQUEST_MAX]
            operation = self._node.begin(wire.Op.EVICT, body=piece.tobytes(), count=len(piece))
            outcomes = self._node.run(operation).body
            assert outcomes == bytes([wire.EvictOutcome.EVICTED]) * len(piece)


def replay_for_real(requests: Iterable[Request], real: RealCache) -> HitCount:
    """Ask the cache for all requests in order."""
    hit_tokens = input_tokens = accesses = 0
    for request in requests:
        hits = real.request(request.blocks, request.at_s)
        hit_tokens += hits * request.block_tokens
        input_tokens += request.input_tokens
        accesses += len(request.blocks)
    return HitCount(hit_tokens, input_tokens, accesses)


_CHECKSUM = Shard(b"", PAYLOAD).checksum


@cache
def _key(block: int) -> bytes:
    return hashlib.sha256(block.to_bytes(8, "little")).digest()


def _run(coroutine: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.__await__().send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits")
