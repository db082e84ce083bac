"""The hit rate of real eviction code on traces equals that of an exact LRU and TTL cache.

Victims are chosen by minutes of age where blocks are kept for days, and by seconds where a few
minutes decide. Both are replayed: an hour of chat as it is, and stretched sixty times.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from .oracle import HitCount, OracleCache, replay
from .real_cache import HIGH, LOW, RealCache, replay_for_real
from .requests import Request, claude_code, made_up_agents, mooncake_conversation, stretch

log = logging.getLogger(__name__)

STRETCH = 60
FOREVER_S = 1_000_000_000
POINTS_MAX = 0.5
CAPACITIES = (2_000, 4_000, 8_000, 16_000)
TTLS_S = (1_800, 3_600, 7_200, 18_000)
TRACE_REQUESTS = 1_500
ROOMY_SLOTS = 200_000


def in_part(cases: Sequence[object]) -> list[object]:
    """Every fourth one; the others are for `make torture`, since a comparison takes seconds."""
    marked: list[object] = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[pytest.mark.torture] if number % 4 else []))
    return marked


def compare(
    folder: Path,
    requests: Sequence[Request],
    *,
    slots: int,
    ttl_s: int = FOREVER_S,
) -> tuple[HitCount, HitCount]:
    """What the real cache and the oracle hit. The oracle's room lies between the watermarks."""
    real = RealCache(folder, slots=slots, ttl_s=ttl_s)
    try:
        found = replay_for_real(requests, real)
    finally:
        real.close()
    oracle = OracleCache(
        capacity_blocks=slots * (HIGH + LOW) / 2,
        ttl_s=math.inf if ttl_s == FOREVER_S else ttl_s,
    )
    expected = replay(requests, oracle)
    log.info("slots=%d ttl_s=%d real=%s oracle=%s", slots, ttl_s, found, expected)
    return found, expected


@pytest.fixture(scope="module")
def chat() -> list[Request]:
    return stretch(mooncake_conversation(TRACE_REQUESTS), STRETCH)


@pytest.mark.parametrize("slots", in_part(CAPACITIES))
def test_chat_hits_as_much_as_exact_lru_at_each_capacity(
    chat: list[Request], slots: int, tmp_path: Path
) -> None:
    found, expected = compare(tmp_path, chat, slots=slots)
    assert found.block_accesses > 30_000
    assert abs(found.percent - expected.percent) <= POINTS_MAX


@pytest.mark.parametrize("ttl_s", in_part(TTLS_S))
def test_chat_hits_as_much_as_an_exact_ttl(chat: list[Request], ttl_s: int, tmp_path: Path) -> None:
    found, expected = compare(tmp_path, chat, slots=ROOMY_SLOTS, ttl_s=ttl_s)
    assert abs(found.percent - expected.percent) <= POINTS_MAX


@pytest.mark.parametrize(("slots", "ttl_s"), in_part([(4_000, 1_800), (16_000, 3_600)]))
def test_chat_hits_as_much_as_exact_lru_with_a_ttl(
    chat: list[Request], slots: int, ttl_s: int, tmp_path: Path
) -> None:
    found, expected = compare(tmp_path, chat, slots=slots, ttl_s=ttl_s)
    assert abs(found.percent - expected.percent) <= POINTS_MAX


@pytest.mark.parametrize(
    ("slots", "ttl_s"),
    in_part([(16_000, 300), (2_000, FOREVER_S), (ROOMY_SLOTS, 30), (ROOMY_SLOTS, 60)]),
)
def test_chat_at_its_own_pace_hits_as_much_as_exact_lru_with_a_ttl(
    slots: int, ttl_s: int, tmp_path: Path
) -> None:
    chat = mooncake_conversation(TRACE_REQUESTS)
    found, expected = compare(tmp_path, chat, slots=slots, ttl_s=ttl_s)
    assert abs(found.percent - expected.percent) <= POINTS_MAX


AGENT_ROOMS = [
    *((slots, FOREVER_S) for slots in (600, 900, 1_200, 1_600)),
    *((6_000, ttl_s) for ttl_s in (900, 1_800, 3_600, 7_200)),
]


@pytest.fixture(scope="module")
def agents() -> list[Request]:
    """Needs no trace. Prompts grow turn by turn, so each chain's blocks are used at many times."""
    rng = random.Random(1)
    agents = made_up_agents(rng, agents=100, turns=10, appended_blocks=4, span_s=1_200.0)
    return stretch(agents, STRETCH)


@pytest.mark.parametrize(
    ("slots", "ttl_s"),
    [*in_part(AGENT_ROOMS), (1_200, 3_600)],
)
def test_made_up_agents_hit_as_much_as_in_the_oracle(
    agents: list[Request], slots: int, ttl_s: int, tmp_path: Path
) -> None:
    found, expected = compare(tmp_path, agents, slots=slots, ttl_s=ttl_s)
    assert found.block_accesses * len(AGENT_ROOMS) > 100_000
    assert abs(found.percent - expected.percent) <= POINTS_MAX


def test_rooms_of_the_made_up_agents_decide_what_is_hit(agents: list[Request]) -> None:
    """Otherwise the comparison above would say nothing."""
    all_of_it = replay(agents, OracleCache()).percent
    for slots, ttl_s in AGENT_ROOMS:
        capacity = slots * (HIGH + LOW) / 2
        found = replay(agents, OracleCache(capacity_blocks=capacity, ttl_s=ttl_s)).percent
        assert found < all_of_it - POINTS_MAX


@pytest.mark.torture
@pytest.mark.parametrize(
    ("slots", "percent"), [(1_953, 5.6), (7_813, 18.5), (15_625, 27.1), (31_250, 34.2)]
)
def test_all_of_the_chat_hits_the_published_share(
    slots: int, percent: float, tmp_path: Path
) -> None:
    """1, 4, 8 and 16 million tokens. The figures were computed elsewhere, by another program."""
    requests = stretch(mooncake_conversation(), STRETCH)
    oracle = replay(requests, OracleCache(capacity_blocks=slots))
    assert abs(oracle.percent - percent) <= 0.1
    found, expected = compare(tmp_path, requests, slots=round(slots / ((HIGH + LOW) / 2)))
    assert abs(found.percent - expected.percent) <= POINTS_MAX
    assert abs(found.percent - percent) <= POINTS_MAX


@pytest.mark.torture
@pytest.mark.parametrize(("ttl_s", "percent"), [(30, 6.0), (60, 10.5), (300, 29.3), (1_800, 37.0)])
def test_all_of_the_chat_hits_the_published_share_with_a_ttl(
    ttl_s: int, percent: float, tmp_path: Path
) -> None:
    requests = stretch(mooncake_conversation(), STRETCH)
    found, expected = compare(tmp_path, requests, slots=ROOMY_SLOTS, ttl_s=ttl_s * STRETCH)
    assert abs(found.percent - expected.percent) <= POINTS_MAX
    assert abs(found.percent - percent) <= POINTS_MAX


@pytest.mark.torture
@pytest.mark.parametrize(
    ("slots", "ttl_s"), [(12_000, FOREVER_S), (20_000, FOREVER_S), (20_000, 36_000)]
)
def test_coding_sessions_hit_as_much_as_exact_lru(slots: int, ttl_s: int, tmp_path: Path) -> None:
    """Prompts of about a thousand blocks: over a million block accesses each time."""
    found, expected = compare(tmp_path, stretch(claude_code(60), STRETCH), slots=slots, ttl_s=ttl_s)
    assert found.block_accesses > 1_500_000
    assert abs(found.percent - expected.percent) <= POINTS_MAX
