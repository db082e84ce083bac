"""Counters of one target, since the process started. STAT shows them under the same names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TargetStatistics:
    """What a target did. Every number only grows."""

    match_keys: int = 0
    """Keys asked for by MATCH."""
    match_hits: int = 0
    """Of those, keys that were here."""
    reads: int = 0
    """READ requests begun."""
    shards_read: int = 0
    """Shards sent."""
    read_bytes: int = 0
    """Bytes of those shards."""
    misses: int = 0
    """Keys of READ requests that were answered "not here"."""
    pooled_reads: int = 0
    """Runs of slots that were not in memory and were read by a thread."""
    read_races: int = 0
    """Shards that were replaced or forgotten while they were being read; also counted as misses."""
    writes: int = 0
    """WRITE requests begun."""
    shards_written: int = 0
    """Shards stored."""
    written_bytes: int = 0
    """Bytes of those shards."""
    shards_known: int = 0
    """Shards of a WRITE that were here already."""
    shards_kept: int = 0
    """Shards of a WRITE that lost to the version that is here."""
    shards_replaced: int = 0
    """Shards that made way for another version."""
    bad_payloads: int = 0
    """Shards of a WRITE whose bytes did not fit their checksum."""
    full_refusals: int = 0
    """Shards not stored because there was no room."""
    io_errors: int = 0
    """System calls on stored bytes that failed for another reason than want of room."""
    forgotten: int = 0
    """Shards dropped by FORGET."""
    rejected_shards: int = 0
    """Stored shards found damaged, by a read or a report; each was taken out of use."""
    false_reports: int = 0
    """Reported shards that were good."""
