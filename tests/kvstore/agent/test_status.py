"""The status document: its fields are those of the page, and its figures follow what was done."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvstore import agent_messages as m
from kvstore.agent.requests import rows_of
from kvstore.client.statistics import NodeReport

from .agent_process import ROOT, AgentProcess
from .arena_runs import SectionedBlocks

PAGE = Path("docs/formats/agent-socket.md")


def test_status_says_who_and_where_the_agent_is(agent: AgentProcess) -> None:
    status = agent.status()
    for name in ("agent", "socket", "address", "pid"):
        assert status[name] == agent.ready[name]
    assert status["roles"] == ["check", "fetch", "store", "window"]
    assert status["entrypoint"] is None
    assert status["directory"] is None
    assert 0 <= status["uptime_s"] < 60
    assert status["map_epoch"] == 1
    assert len(status["fetch"]["workers"]) == 1


def test_every_field_is_explained_on_the_page(agent: AgentProcess) -> None:
    page = (ROOT / PAGE).read_text()
    section = page[page.index("## Status document") :]
    explained = set(re.findall(r"`([a-z_]+)`", section))
    status = agent.status()
    fields = set(status)
    for part in ("arena", "sessions", "fetch", "store", "match"):
        fields |= set(status[part])
    assert fields - explained == set()


def test_arena_and_sessions_are_counted(agent: AgentProcess) -> None:
    blocks = SectionedBlocks(1, seed=40)
    before = agent.status()
    with agent.engine() as engine:
        leased = engine.lease(engine.open(blocks.namespace), 10)
        status = engine.status()
        assert status["arena"]["runs"] == 1
        assert status["arena"]["runs_by_state"]["leased"] == 1
        run = engine.memory(leased, blocks.namespace.layout)
        assert status["arena"]["leased_bytes"] == run.layout.run_bytes
        assert status["sessions"]["open"] == 1
        assert status["sessions"]["accepted"] == before["sessions"]["accepted"] + 1


def test_match_fetch_and_store_are_counted(agent: AgentProcess) -> None:
    blocks = SectionedBlocks(12, seed=141)
    keys = b"".join(blocks.keys)
    with agent.engine() as engine:
        before = engine.status()
        namespace = engine.open(blocks.namespace)
        leased = engine.lease(namespace, 10)
        request = m.StoreRun(
            run=leased.run,
            keys=keys[: 10 * 32],
            first_block=0,
            ttl_class="chat",
            deadline_s=10.0,
        )
        engine.ask(request, m.StoreEnded)
        prompt = m.MatchPrompt(
            namespace=namespace, keys=keys, prompt_tokens=1_700, is_dense=False, deadline_s=5.0
        )
        engine.ask(prompt, m.PromptMatched)
        leased = engine.lease(namespace, 12)
        fetch = m.FetchRun(
            run=leased.run, keys=keys, first_block=0, is_by_layer=False, deadline_s=10.0
        )
        engine.ask(fetch, m.FetchEnded)
        after = engine.status()
    assert grown(before, after, "store") == {"stored": 10}
    counted = grown(before, after, "fetch")
    assert counted["asked_blocks"] == 12
    assert counted["blocks"] == 10
    assert counted["bytes"] == 10 * blocks.namespace.layout.block_bytes
    assert after["fetch"]["ended"]["too few shards"] == 1
    assert sum(after["fetch"]["latency"]["counts"]) == 1
    assert grown(before, after, "match") == {
        "count": 1,
        "prompts": 1,
        "prompt_tokens": 1_700,
        "matched_tokens": 10 * 128,
        "hit_tokens": 9 * 128,
        "replay_tokens": 128,
        "windows_wanted": 1,
    }
    assert sum(after["match"]["latency"]["counts"]) >= 1


def grown(before: dict[str, Any], after: dict[str, Any], part: str) -> dict[str, int]:
    """Figures of a part that are larger than they were."""
    return {
        name: value - before[part][name]
        for name, value in after[part].items()
        if isinstance(value, int) and value > before[part][name]
    }


def test_reports_of_many_nodes_fit_one_answer() -> None:
    reports = [
        NodeReport(
            node=f"n{number}",
            address="127.0.0.1:1",
            is_alive=number not in (1, 99),
            problem="gone" if number in (1, 99) else "",
            statistics={} if number in (1, 99) else {"text": "x" * 1_000},
        )
        for number in range(100)
    ]
    rows = rows_of(reports, 20_000)
    assert [row.node for row in rows] == [report.node for report in reports]
    told = [row for row in rows if row.statistics]
    assert 15 <= len(told) < 20
    assert json.loads(told[0].statistics) == {"text": "x" * 1_000}
    assert rows[1].problem == rows[99].problem == "gone"
    assert all(row.problem and row.is_alive for row in rows[len(told) + 1 : 99])
    m.pack_message(1, m.NodeReports(rows))
