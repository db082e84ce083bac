"""What a client saw, told to a node now and then by NOTE: tokens by namespace, and latencies.

A client comes and goes and is scraped by nobody; a node adds up what its clients tell, and shows it
in STAT. Best effort: a note that does not arrive is lost, and no operation waits for one. No token
ids, no tenants: a namespace is named by its model and the first bytes of its id.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .. import wire
from ..errors import NodeError
from ..histogram import Histogram
from ..key import Namespace
from ..layout import BLOCK_TOKENS
from .inquiry import ask_node
from .results import FetchEnd, FetchResult
from .router import Router
from .shard_read import IgnoredAnswer

NOTE_INTERVAL_S = 10.0
NOTE_DEADLINE_S = 0.5
NAMESPACES_PER_NOTE_MAX = 24
"""Those that come later in one interval are counted together, so that a note fits its limit."""
OTHER_LABEL = "(other)"
MODEL_LENGTH_MAX = 40
_ID_BYTES_SHOWN = 4

_REASON_BY_END = {
    FetchEnd.TOO_FEW_SHARDS: "too_few_shards",
    FetchEnd.DEADLINE: "deadline",
}


class NoteBook:
    """Counts since the last note. Belongs to the event loop."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._label_by_id: dict[bytes, str] = {}
        self._tokens: dict[str, dict[str, int]] = {}
        self._misses: dict[str, dict[str, int]] = {}
        self._latencies: dict[str, Histogram] = {}

    @property
    def is_empty(self) -> bool:
        return not self._latencies

    def note_match(
        self, namespace: Namespace, *, asked: int, matched: int, elapsed_s: float
    ) -> None:
        """A match of `asked` blocks found `matched` leading ones."""
        label = self._label_of(namespace)
        self._add(self._tokens, label, "matched_tokens", matched)
        self._add(self._misses, label, "not_stored", asked - matched)
        self._time("match", elapsed_s)

    def note_fetch(self, namespace: Namespace, *, asked: int, result: FetchResult) -> None:
        """A fetch of `asked` blocks ended so."""
        label = self._label_of(namespace)
        self._add(self._tokens, label, "hit_tokens", result.blocks)
        if result.ended is not FetchEnd.COMPLETE:
            reason = _REASON_BY_END[result.ended]
            if result.ended is FetchEnd.TOO_FEW_SHARDS and result.rejected_shards:
                reason = "rejected"
            self._add(self._misses, label, reason, asked - result.blocks)
        self._time("fetch", result.elapsed_s)

    def note_decode(self, elapsed_s: float) -> None:
        """The shards of a batch were put together and checked."""
        self._time("decode", elapsed_s)

    def take(self) -> bytes:
        """The document of one NOTE with everything counted; counting begins anew."""
        namespaces: dict[str, dict[str, Any]] = {
            label: {**self._tokens.get(label, {}), "miss_tokens": self._misses.get(label, {})}
            for label in dict.fromkeys((*self._tokens, *self._misses))
        }
        latency = {
            stage: {"counts": one.counts, "sum_s": round(one.sum_s, 6)}
            for stage, one in self._latencies.items()
        }
        self._begin()
        note = {"namespaces": namespaces, "latency": latency}
        document = json.dumps(note, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(document) <= wire.NOTE_BYTES_MAX
        return document

    def _label_of(self, namespace: Namespace) -> str:
        label = self._label_by_id.get(namespace.namespace_id)
        if label is None:
            if len(self._label_by_id) >= NAMESPACES_PER_NOTE_MAX:
                return OTHER_LABEL
            label = self._label_by_id[namespace.namespace_id] = label_of(namespace)
        return label

    def _add(self, table: dict[str, dict[str, int]], label: str, name: str, blocks: int) -> None:
        if blocks:
            counts = table.setdefault(label, {})
            counts[name] = counts.get(name, 0) + blocks * BLOCK_TOKENS

    def _time(self, stage: str, elapsed_s: float) -> None:
        self._latencies.setdefault(stage, Histogram()).add(elapsed_s)


def label_of(namespace: Namespace) -> str:
    """A namespace in statistics: its model, and enough of its id to tell two apart."""
    model = "".join(c if c.isprintable() else "?" for c in namespace.model[:MODEL_LENGTH_MAX])
    return f"{model}#{namespace.namespace_id[:_ID_BYTES_SHOWN].hex()}"


class NoteSender:
    """Sends the book's notes: NOTE_INTERVAL_S after something was noted first, and at the end.

    `router` gives the router of now. A note goes to a node that the client talks to anyway.
    """

    def __init__(self, router: Callable[[], Router], loop: asyncio.AbstractEventLoop) -> None:
        self.book = NoteBook()
        self._router = router
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Something may have been noted."""
        if self._timer is None and not self.book.is_empty:
            self._timer = self._loop.call_later(NOTE_INTERVAL_S, self._send)

    def _send(self) -> None:
        self._timer = None
        channel = self._router().channel_in_use()
        if channel is not None:
            note = self.book.take()
            channel.submit(
                wire.Op.NOTE,
                IgnoredAnswer(),
                body=note,
                count=len(note),
                deadline_s=NOTE_DEADLINE_S,
            )
        self.wake()

    async def flush(self) -> None:
        """Send what is noted and wait for the node to have it, NOTE_DEADLINE_S at most."""
        channel = self._router().channel_in_use()
        if channel is None or self.book.is_empty:
            return
        note = self.book.take()
        with suppress(NodeError):
            await ask_node(
                channel,
                wire.Op.NOTE,
                body=note,
                count=len(note),
                deadline_s=NOTE_DEADLINE_S,
                loop=self._loop,
            )

    def close(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
