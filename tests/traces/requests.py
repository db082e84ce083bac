"""Request traces as lists of block ids: from real traces where they are, and made up ones.

An id stands for a whole prefix up to the end of its block, so equal ids are equal prefixes. The
real traces are not part of the project: CACHALOT_TRACES_DIR names the folder that holds them, by
default `../shared/traces` beside the checkout.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TRACES = Path(
    os.environ.get("CACHALOT_TRACES_DIR") or Path(__file__).parents[2].parent / "shared" / "traces"
)
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when, its full blocks, and how many tokens it has with the rest."""

    at_s: float
    blocks: tuple[int, ...]
    input_tokens: int
    block_tokens: int


def stretch(requests: Sequence[Request], factor: float) -> list[Request]:
    """The same requests, but time goes `factor` times slower."""
    return [dataclasses.replace(request, at_s=request.at_s * factor) for request in requests]


def mooncake_conversation(count: int | None = None) -> list[Request]:
    """The first `count` requests of an hour of chat; blocks of 512 tokens."""
    path = _find("mooncake_conversation.jsonl.gz")
    requests: list[Request] = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            if len(requests) == count:
                break
            entry = json.loads(line)
            full = entry["input_length"] // 512
            blocks = tuple(entry["hash_ids"][:full])
            at_s = entry["timestamp"] / 1000
            requests.append(Request(at_s, blocks, entry["input_length"], 512))
    return requests


def claude_code(session_count: int | None = None, *, seed: int = 1) -> list[Request]:
    """Coding sessions that start at random over a day; blocks of 128 tokens, none over sessions."""
    starts = random.Random(seed)
    requests: list[Request] = []
    for number, session in enumerate(claude_sessions(session_count)):
        begin_s = starts.uniform(0.0, 86_400.0)
        for at_s, ids, entry in session:
            blocks = tuple(number << 32 | one for one in ids[1::2])
            requests.append(Request(begin_s + at_s, blocks, entry["in"], BLOCK_TOKENS))
    requests.sort(key=lambda request: request.at_s)
    return requests


def made_up_agents(
    rng: random.Random, *, agents: int, turns: int, appended_blocks: float, span_s: float
) -> list[Request]:
    """Agents whose prompt grows by some blocks each turn; they pause for seconds or minutes."""
    requests = []
    for agent in range(agents):
        at_s, blocks = rng.uniform(0.0, span_s), 0
        for _ in range(1 + int(rng.expovariate(1 / turns))):
            blocks += 1 + int(rng.expovariate(1 / appended_blocks))
            ids = tuple(agent << 32 | depth for depth in range(blocks))
            tokens = blocks * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
            requests.append(Request(at_s, ids, tokens, BLOCK_TOKENS))
            at_s += rng.paretovariate(1.1) * 5.0
    requests.sort(key=lambda request: request.at_s)
    return requests


def claude_sessions(
    session_count: int | None,
) -> Iterator[Iterator[tuple[float, list[int], dict[str, Any]]]]:
    """Each session as (start, ids of blocks of 64 tokens, entry of the file) of its requests."""
    path = _find("claude_code_sessions.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            if number == session_count:
                return
            yield _walk_session(json.loads(line))


def _walk_session(
    session: dict[str, Any],
) -> Iterator[tuple[float, list[int], dict[str, Any]]]:
    """The requests of one session, nested ones in place."""
    previous: list[int] = []

    def walk(entries: list[dict[str, Any]], begin_s: float) -> Iterator[tuple[float, Any]]:
        for entry in entries:
            if "requests" in entry:  # a conversation within this one, with times of its own
                yield from walk(entry["requests"], begin_s + entry["t"])
            else:
                yield begin_s + entry["t"], entry

    for at_s, entry in walk(session["requests"], 0.0):
        packed = entry["h"]
        ids = previous[: packed[0]]
        for first, count in zip(packed[1::2], packed[2::2], strict=True):
            ids = ids + list(range(first, first + count))
        previous = ids
        yield at_s, ids, entry


def _find(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"the trace {name} is not in {TRACES} (CACHALOT_TRACES_DIR names the folder)")
    return path
