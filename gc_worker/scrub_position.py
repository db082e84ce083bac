"""Where scrub is in a target, kept in a small file of the target's folder.

Soft state: a file that is missing, damaged or stale costs a pass from the beginning and nothing
else, so it is written without sync.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FILE_NAME = "gc-scrub.json"
FILE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubPosition:
    """The next slot to be read, and what is known of the passes before. Times are Unix seconds."""

    segment: int = 0
    slot: int = 0
    started_at_s: int = 0
    """When this pass began."""
    passes: int = 0
    """Passes that came to the end."""
    last_pass_s: int = 0
    """How long the last of them took, over restarts."""
    finished_at_s: int = 0
    """When it ended; 0 if none ever did."""

    def begun(self, now_s: int) -> ScrubPosition:
        """The same, or if no slot of this pass was read yet, with the pass beginning now."""
        is_new = (self.segment, self.slot) == (0, 0)
        return replace(self, started_at_s=now_s) if is_new else self

    def moved_to(self, segment: int, slot: int) -> ScrubPosition:
        """Further on in the same pass."""
        return replace(self, segment=segment, slot=slot)

    def ended(self, now_s: int) -> ScrubPosition:
        """At the beginning of the next pass. A clock that was set back gives a pass of 0 s."""
        return ScrubPosition(
            started_at_s=now_s,
            passes=self.passes + 1,
            last_pass_s=max(now_s - self.started_at_s, 0),
            finished_at_s=now_s,
        )


def load_position(folder: Path) -> ScrubPosition | None:
    """What `save_position` has kept; None if there is nothing that makes sense."""
    try:
        with open(folder / FILE_NAME, "rb") as file:
            found = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    names = ScrubPosition.__slots__
    if not isinstance(found, dict) or set(found) != set(names):
        return None
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in found.values()):
        return None
    return ScrubPosition(**found)


def save_position(folder: Path, position: ScrubPosition) -> None:
    """Keep the position; readers see the old file or the new one. Raises OSError."""
    temporary = folder / f"{FILE_NAME}.tmp"
    temporary.write_text(json.dumps(asdict(position)) + "\n", encoding="utf-8")
    os.replace(temporary, folder / FILE_NAME)
