"""Coding sessions as requests that leave window states: when each begins and ends, what it keeps.

Two rules say what is kept. `LAST_PROMPT` is the one that the published figures were made with: one
state a request, at the last border inside its prompt, there from the request's end on. `ENGINE` is
what engines do: that state at the end of prefill (which takes no time here), and at the request's
end another one, at the last border inside prompt and output.
"""

from __future__ import annotations

import enum
import heapq
import random
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from kvstore.policy import plan_hit, window_anchor_after_prefill

from .requests import BLOCK_TOKENS, claude_sessions
from .window_fleet import Fleet

DAY_S = 86_400.0
SHORTEST_S = 0.001
"""For requests of which the trace does not say how long they took: 9 of 100."""
FOLLOWERS = 4
"""So many requests further on the one is looked for that goes on from a request."""


class Rule(enum.Enum):
    LAST_PROMPT = enum.auto()
    ENGINE = enum.auto()


@dataclass(slots=True)
class WindowRequest:
    """One request. `blocks` are ids of whole prefixes within the session; `is_later`: it is not
    the first of its session.

    `continued`: the blocks of a later request which goes on from this one and is long enough to
    hold the output unchanged; None if there is none.
    """

    session: int
    at_s: float
    ended_at_s: float
    blocks: array[int]
    input_tokens: int
    output_tokens: int
    is_later: bool
    continued: array[int] | None = None


@dataclass(slots=True)
class WindowHits:
    """Of the later requests: those for which a state was ever kept that fits, and those found.

    `expected`: found by an exact TTL, a dict of when each state was kept; `if_renewed`: those that
    would be found if each use began the TTL anew."""

    requests: int = 0
    fitting: int = 0
    expected: int = 0
    if_renewed: int = 0
    found: int = 0

    @property
    def found_percent(self) -> float:
        return 100.0 * self.found / self.requests

    @property
    def fitting_percent(self) -> float:
        return 100.0 * self.fitting / self.requests

    @property
    def found_of_fitting_percent(self) -> float:
        return 100.0 * self.found / self.fitting


@cache
def coding_requests(*, every: int = 1, span_s: float = DAY_S, seed: int = 1) -> list[WindowRequest]:
    """Every so many-th session; they start at random within `span_s`.

    In the order of the trace, not of time. All of them take 200 MB.
    """
    starts = random.Random(seed)
    requests: list[WindowRequest] = []
    for number, session in enumerate(claude_sessions(None)):
        begin_s = starts.uniform(0.0, span_s)
        if number % every:
            continue
        own: list[WindowRequest] = []
        for at_s, ids, entry in session:
            at_s += begin_s
            own.append(
                WindowRequest(
                    session=number,
                    at_s=at_s,
                    ended_at_s=at_s + max(SHORTEST_S, entry.get("api_time") or 0.0),
                    blocks=array("I", ids[1::2]),
                    input_tokens=entry["in"],
                    output_tokens=entry["out"],
                    is_later=bool(own),
                )
            )
        for place, request in enumerate(own):
            request.continued = _find_continued(request, own[place + 1 : place + 1 + FOLLOWERS])
        requests += own
    return requests


def _find_continued(
    request: WindowRequest, following: Sequence[WindowRequest]
) -> array[int] | None:
    depth = len(request.blocks)
    for other in following:
        goes_on = other.blocks[depth - 1 : depth] == request.blocks[-1:]
        if depth and goes_on and other.at_s >= request.ended_at_s - 1.0:
            is_long = other.input_tokens >= request.input_tokens + request.output_tokens
            return other.blocks if is_long else None
    return None


class Replay:
    """Requests against a fleet. `is_output_kept`: outputs come back unchanged in the next prompt
    wherever they may have, and their blocks are stored too; else none of them does.

    `crossings`: how many of the borders that decode crossed last have their state kept.
    """

    def __init__(
        self, fleet: Fleet, rule: Rule, *, is_output_kept: bool = False, crossings: int = 1
    ) -> None:
        self.hits = WindowHits()
        self._fleet = fleet
        self._rule = rule
        self._is_output_kept = is_output_kept
        self._crossings = crossings
        self._stored: dict[int, set[int]] = defaultdict(set)
        """Blocks by session."""
        self._kept_at_s: dict[bytes, float] = {}
        self._used_at_s: dict[bytes, float] = {}

    def run(self, requests: Sequence[WindowRequest]) -> WindowHits:
        """All of it; returns the hits."""
        for _ in self.steps(requests):
            pass
        return self.hits

    def steps(self, requests: Sequence[WindowRequest]) -> Iterator[float]:
        """The same a step at a time: yields the time before something happens."""
        begins = [(request.at_s, 1, number) for number, request in enumerate(requests)]
        ends = [(request.ended_at_s, 0, number) for number, request in enumerate(requests)]
        hosts = [self._fleet.choose_host() for _ in requests]
        for now_s, is_begin, number in heapq.merge(sorted(begins), sorted(ends)):
            yield now_s
            self._fleet.go_to(now_s)
            if is_begin:
                self._begin(requests[number], hosts[number])
            else:
                self._end(requests[number], hosts[number])

    def _begin(self, request: WindowRequest, host: int) -> None:
        matched = self._match(request)
        if request.is_later:
            self.hits.requests += 1
            plan_hit(request.input_tokens, matched, _Anchors(self, request, host))
        self._stored[request.session].update(request.blocks[matched:])
        if self._rule is Rule.ENGINE:
            self._keep_prompt(request, host)

    def _end(self, request: WindowRequest, host: int) -> None:
        if self._rule is Rule.LAST_PROMPT:
            self._keep_prompt(request, host)
            return
        tokens = request.input_tokens + request.output_tokens
        last = (window_anchor_after_prefill(tokens) or 0) // BLOCK_TOKENS
        first = (window_anchor_after_prefill(request.input_tokens) or 0) // BLOCK_TOKENS
        blocks = request.continued if self._is_output_kept else None
        if blocks is not None:
            made = blocks[len(request.blocks) : tokens // BLOCK_TOKENS]
            self._stored[request.session].update(made)
        for depth in range(max(first, last - self._crossings) + 1, last + 1):
            if blocks is not None:
                key = key_of(request.session, blocks[depth - 1])
            else:  # nobody goes on from this output, but its state needs room as well
                key = sha256(f"{request.session} {request.at_s} {depth}".encode()).digest()
            self._keep(key, host)

    def _keep_prompt(self, request: WindowRequest, host: int) -> None:
        anchor = window_anchor_after_prefill(request.input_tokens)
        if anchor is not None and anchor // BLOCK_TOKENS <= len(request.blocks):
            block = request.blocks[anchor // BLOCK_TOKENS - 1]
            self._keep(key_of(request.session, block), host)

    def _keep(self, key: bytes, host: int) -> None:
        self._kept_at_s[key] = self._used_at_s[key] = self._fleet.now_s
        self._fleet.put(host, key)

    def _match(self, request: WindowRequest) -> int:
        """Leading blocks that are stored. Whole prefixes are, so the border can be bisected."""
        blocks, stored = request.blocks, self._stored[request.session]
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in stored:
                low = middle + 1
            else:
                high = middle
        return low

    def look(self, request: WindowRequest, border: int, host: int) -> bool:
        """Whether the state at `border` of this prompt can be had."""
        key = key_of(request.session, request.blocks[border // BLOCK_TOKENS - 1])
        is_found = self._fleet.find(host, key)
        kept_at_s = self._kept_at_s.get(key)
        if kept_at_s is not None:
            self.hits.fitting += 1
            self.hits.expected += self._fleet.now_s < kept_at_s + self._fleet.ttl_s
            if self._fleet.now_s < self._used_at_s[key] + self._fleet.ttl_s:
                self.hits.if_renewed += 1
                self._used_at_s[key] = self._fleet.now_s
        self.hits.found += is_found
        return is_found


@dataclass(slots=True)
class _Anchors:
    """The positions of one prompt at which a state can be had, as `plan_hit` asks for them."""

    replay: Replay
    request: WindowRequest
    host: int

    def __contains__(self, border: object) -> bool:
        assert isinstance(border, int)
        return self.replay.look(self.request, border, self.host)


def key_of(session: int, block: int) -> bytes:
    """A key for the id of a block."""
    return sha256((session << 32 | block).to_bytes(8, "little")).digest()
