"""Requests a second of conversations of several turns, with the store and without.

Starts 12 local nodes, code 10+2, and an agent. Sessions are shaped by a real trace, scaled down
(`benchmarks.session_load`). A few are open at a time; the next turn of each is asked when its last
one is answered, behind a turn of every other open session. The engine's pool has room for the turns
that run and not for what open sessions may come back to, as it is where a store is of use: without
one, what is left in the pool is all that is not computed again.

    python -m benchmarks.engine_turns [--models models/v41-mini smollm2] [--sessions 12]

Prints JSON lines, one for the load without the store and one with it: requests and prompt tokens a
second, medians and 90th percentiles of the first token, tokens that prompts had, that were found
in the store, shared in the pool and computed, and blocks saved. `ideal_hit_rate` is that of a store
that forgets nothing under the same rule, `of_without` the ratio of requests a second.
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.threads import prepare_environment, set_thread_count

prepare_environment()

from engine.engine_config import EngineConfig
from engine.request import Request
from engine.request_report import RequestReport
from kvstore.admin.machine import describe_machine
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import plan_dense_hit, plan_hit

from .local_engine import (
    LocalEngine,
    add_store_options,
    clock,
    open_local_engine,
    open_local_store,
)
from .session_load import TURNS, Turn, make_sessions

CONTEXT_TOKENS = 2_048
RUNNING = 2
"""Turns that run at one time."""
OPEN_SESSIONS = 12


@dataclass
class Session:
    """A conversation: what was said so far, and the turns to come."""

    name: str
    turns: deque[Turn]
    token_ids: list[int] = field(default_factory=list)

    def next_request(self) -> Request:
        """The next turn, with all that was said before it."""
        turn = self.turns.popleft()
        self.token_ids += turn.added_ids
        return Request(
            request_id=f"{self.name}-{len(self.token_ids)}",
            prompt_ids=list(self.token_ids),
            max_tokens=turn.answer_tokens,
        )


@dataclass
class Served:
    """What the requests of one run got."""

    reports: list[RequestReport] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    ideal_hit_tokens: int = 0
    took_s: float = 0.0


def serve(engine: LocalEngine, sessions: list[Session]) -> Served:
    """Answer all turns of all sessions."""
    served = Served()
    waiting, open_sessions = deque(sessions), deque[Session]()
    running: dict[str, Session] = {}
    is_dense = engine.runner.window_layout is None
    begun_s = clock()
    while waiting or open_sessions or running:
        while waiting and len(open_sessions) + len(running) < OPEN_SESSIONS:
            open_sessions.append(waiting.popleft())
        while open_sessions and len(running) < RUNNING:
            session = open_sessions.popleft()
            known_tokens = len(session.token_ids)
            request = session.next_request()
            served.prompts.append(len(request.prompt_ids))
            served.ideal_hit_tokens += ideal_hit(served.prompts[-1], known_tokens, is_dense)
            running[request.request_id] = session
            engine.engine.add_request(request)
        for event in engine.engine.step(wait_s=1.0):
            session = running[event.request_id]
            session.token_ids += event.token_ids
            if event.finish_reason is not None:
                assert event.report is not None
                served.reports.append(event.report)
                del running[event.request_id]
                if session.turns:
                    open_sessions.append(session)
    served.took_s = clock() - begun_s
    engine.flush()
    return served


def ideal_hit(prompt_tokens: int, known_tokens: int, is_dense: bool) -> int:
    """Tokens of a hit if everything of the conversation so far is kept, window state included."""
    blocks = known_tokens // BLOCK_TOKENS
    if is_dense:
        return plan_dense_hit(prompt_tokens, blocks).hit_tokens
    return plan_hit(prompt_tokens, blocks, range(0, known_tokens + 1, BLOCK_TOKENS)).hit_tokens


def describe(served: Served) -> dict[str, object]:
    """Figures of one run."""
    reports = served.reports
    first_token_s = [report.ttft_s for report in reports]
    prompt_tokens = sum(served.prompts)
    hit_tokens = sum(report.hit_tokens for report in reports)
    saved = [report.receipt.summary() for report in reports]
    return {
        "requests": len(reports),
        "wall_s": round(served.took_s, 2),
        "requests_per_s": round(len(reports) / served.took_s, 3),
        "prompt_tokens_per_s": round(prompt_tokens / served.took_s, 1),
        "first_token_ms": round(statistics.median(first_token_s) * 1e3, 1),
        "first_token_p90_ms": round(float(np.percentile(first_token_s, 90)) * 1e3, 1),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "shared_tokens": sum(report.shared_tokens for report in reports),
        "replay_tokens": sum(report.replay_tokens for report in reports),
        "computed_tokens": prompt_tokens - hit_tokens,
        "hit_rate": round(hit_tokens / prompt_tokens, 4),
        "ideal_hit_rate": round(served.ideal_hit_tokens / prompt_tokens, 4),
        "blocks_stored": sum(summary.stored for summary in saved),
        "blocks_not_saved": sum(s.failed + s.dropped + s.pending for s in saved),
        "preemptions": sum(report.preemptions for report in reports),
    }


def measure(model: str, socket: Path, sessions: int, scale: int) -> None:
    """Prints the lines of one model."""
    pool_blocks = (RUNNING + 1) * (CONTEXT_TOKENS // BLOCK_TOKENS + 1)
    without_per_s = None
    for agent_socket in (None, socket):
        with open_local_engine(
            model, agent_socket, pool_blocks=pool_blocks, config=EngineConfig()
        ) as engine:
            load = make_sessions(
                sessions=sessions,
                turns=TURNS,
                scale=scale,
                tokens_max=CONTEXT_TOKENS,
                token_ids=range(300, engine.runner.vocabulary - 64),
                seed=1,
            )
            served = serve(engine, [Session(f"s{n}", deque(t)) for n, t in enumerate(load)])
            name = engine.model
        figures = describe(served)
        per_s = len(served.reports) / served.took_s
        without_per_s = without_per_s or per_s
        line = {
            "benchmark": "engine_turns",
            "model": name,
            "store": agent_socket is not None,
            "sessions": sessions,
            "scale": scale,
            "pool_blocks": pool_blocks,
            **figures,
            "of_without": round(per_s / without_per_s, 3),
            **describe_machine(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["models/v41-mini", "smollm2"])
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--scale", type=int, default=16, help="lengths of the trace are divided")
    add_store_options(parser)
    options = parser.parse_args()
    set_thread_count(1)
    with open_local_store(options.k, options.m) as socket:
        for model in options.models:
            measure(model, socket, options.sessions, options.scale)


if __name__ == "__main__":
    main()
