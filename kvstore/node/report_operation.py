"""REPORT: a peer found a shard bad; the node looks for itself, and only then believes it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

from .. import wire
from .answers import Request, answer, refuse
from .buffers import Buffer
from .disk_work import SlotCheck, check_slots
from .effects import Effect, NeedBuffer, Operation, Send, Work
from .freeing import free_slots
from .node import Node
from .segment import ABSENT
from .target import Target


def report(node: Node, target: Target, request: Request) -> Operation:
    """Answer a REPORT: check the shards that are still those meant, and drop the bad ones."""
    items = wire.parse_records(request.body, wire.REPORT_ITEM, request.header.count).tolist()
    if len(items) > wire.REPORTS_PER_REQUEST_MAX:
        text = f"{len(items)} reports, at most {wire.REPORTS_PER_REQUEST_MAX}"
        yield from refuse(node, request, wire.Status.BAD_REQUEST, text)
        return
    checks = _plan_checks(target, items)
    if checks and not target.reports.take(len(checks)):
        yield from refuse(node, request, wire.Status.BUSY, "too many reports")
        return
    results = yield from _run_checks(node, request, list(checks.values()))
    if results is None:
        yield from refuse(node, request, wire.Status.BUSY, "no memory within the deadline")
        return
    outcomes = [int(wire.ReportOutcome.ABSENT)] * len(items)
    bad = []
    for (row, check), is_good in zip(checks.items(), results, strict=True):
        location = check.segment.shape.first_location + check.slot
        if is_good:
            target.statistics.false_reports += 1
            outcomes[row] = wire.ReportOutcome.GOOD
        elif target.drop_damaged(check.key, location, check.generation):
            bad.append(location)
            outcomes[row] = wire.ReportOutcome.QUARANTINED
    yield from free_slots(node, target, bad)
    yield Send([answer(node, request, body=bytes(outcomes), count=len(outcomes))])


def _plan_checks(target: Target, items: Sequence[tuple[bytes, int]]) -> dict[int, SlotCheck]:
    """By its row, what to check for each reported shard that is still here."""
    checks = {}
    for row, (key, generation) in enumerate(items):
        location = target.index.get(key)
        if location != ABSENT and target.generation(location) == generation:
            segment, slot = target.index.resolve(location)
            payload_xxh3 = int(segment.columns.payload_xxh3[slot])
            checks[row] = SlotCheck(segment, slot, key, generation, payload_xxh3)
    return checks


def _run_checks(
    node: Node, request: Request, checks: Sequence[SlotCheck]
) -> Generator[Effect, Any, list[bool] | None]:
    """For each check whether the shard is good; None if there was no memory to read it into."""
    if not checks:
        return []
    size_bytes = max(check.segment.payload_bytes for check in checks)
    buffer: Buffer | None = None
    if node.pool.fits(size_bytes):
        buffer = yield NeedBuffer(size_bytes, request.due_s)
    if buffer is None:
        return None
    for check in checks:
        check.segment.pins += 1
    try:
        results: list[bool] = yield Work(partial(check_slots, node.disk, checks, buffer.view))
        return results
    finally:
        for check in checks:
            check.segment.pins -= 1
        buffer.release()
