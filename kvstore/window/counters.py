"""What a host counts of window records, for its status document. It only counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WindowCounters:
    """What happened since the start. `remote_*`: fetches from other hosts, by their end; `skipped`:
    not tried because the host has just failed, or too much waits for it; `withdrawn`: entries that
    were found to be wrong. `lookups`: keys asked for, of which `found_here` and `found_elsewhere`.
    """

    lookups: int = 0
    found_here: int = 0
    found_elsewhere: int = 0
    fetches: int = 0
    fetched_here: int = 0
    fetched_bytes: int = 0
    remote_found: int = 0
    remote_absent: int = 0
    remote_rejected: int = 0
    remote_unreachable: int = 0
    remote_late: int = 0
    skipped: int = 0
    withdrawn: int = 0
