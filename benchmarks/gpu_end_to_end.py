"""From the disks of 12 nodes to the first token: fetch throughput, and time to the first token cold
and after a hit, of an engine on a GPU.

Starts 12 local nodes (code 10+2) in memory, then on disk, and an agent with 1, 2, 4 and 8 fetch
workers, one after the other. The engine runs the scaled model (`v41_shape`), whose blocks have the
bytes of V4.1-Flash. For each length of a prompt:

    cold      nothing is stored; the blocks are saved
    checked   another engine hits what the cold one left, window state too; `equal`: its first
              ANSWER_TOKENS tokens are those of an engine without a store
    replay    another engine has the blocks in the store, and no window state: 128 tokens are
              computed twice
    window    another engine has both, as in the next turn of a conversation

With NODE_DOWN_WORKERS fetch workers, and the nodes in memory, the hits of each length are measured
again with a node stopped (`node_down`): shards that it had are rebuilt, on the GPU where that was
measured to be faster (`rebuilt_by` "reader").

    python -m benchmarks.gpu_end_to_end [--device cuda] [--lengths 8192 32768 131072]
        [--workers 1 2 4 8] [--rounds 3] [--storage memory disk]

Prints JSON lines, medians of the rounds in milliseconds: `first_token`, of which `match`, `fetch`
(from the order until the last byte had come) and `waited` (passes that stood still for a section);
`fetch_gb_per_s` is the hit's bytes over `fetch`. Rounds whose hit was not what was stored are
counted in `others` and left out. Before each hit on a disk the nodes' segments are dropped from the
page cache (`page_cache` "dropped"; `cached_bytes` is what was there all the same, in the worst
round). What fails prints its error, and the rest goes on.
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine.threads import prepare_environment, set_thread_count

prepare_environment()

from engine.compute_device import choose_device
from engine.engine_config import EngineConfig
from engine.garbage import freeze_loaded_objects
from engine.kv.open_mover import open_mover
from engine.kv.rebuild_choice import find_rebuilder
from engine.request import Request
from engine.request_report import RequestReport
from engine.runners.v41_runner import V41Runner, farthest_hit
from engine.scheduler.cost import PrefillCost
from engine.sources.threaded_source import LoadLimits
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalAgentOptions
from kvstore.client import AgentClient
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import WINDOW_TOKENS

from .busy_time import total_s
from .local_engine import LocalEngine, clock, open_engine_over
from .page_cache import IN_MEMORY, drop_pages, file_system_of, resident_bytes
from .v41_shape import Size, make_runner, random_prompt

LENGTHS = (8192, 32_768, 131_072)
WORKERS = (1, 2, 4, 8)
NODES, K, M = 12, 10, 2
AGENT = "a01"
TARGET_BYTES = 512 << 20
LIMITS = LoadLimits(fetch_deadline_s=20.0, section_wait_s=20.0)
"""Slow workers are to be measured, not given up."""
CONFIG = EngineConfig(step_budget_s=2.0, cost=PrefillCost(a0_s=0.02, a1_s=5e-5, a2_s=0.0, a3_s=0.0))
"""Passes of about 40,000 tokens, which bounds what a pass holds."""
WARM_TOKENS = 1024
ANSWER_TOKENS = 4
NODE_DOWN_WORKERS = 4
NODE_DOWN = "n05"


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt and how much of it a store was given: one token more than the longest hit."""

    prompt_ids: list[int]

    @property
    def hit_tokens(self) -> int:
        return farthest_hit(len(self.prompt_ids))

    @property
    def first_turn(self) -> list[int]:
        """Behind whose complete blocks window state is kept: where the hit of the whole ends."""
        return self.prompt_ids[: self.hit_tokens + 1]


@dataclass(frozen=True, slots=True)
class Measured:
    token_ids: list[int]
    report: RequestReport
    waited_s: float
    cached_bytes: int = 0
    """Of the nodes' segments, in memory just before."""


def emit(**line: object) -> None:
    print(json.dumps({"benchmark": "gpu_end_to_end", **line}), flush=True)


def ask(engine: LocalEngine, prompt_ids: list[int]) -> Measured:
    """The first tokens of an answer; what is to be saved is saved then."""
    engine.runner.forget()
    request = Request(request_id=f"{clock()}", prompt_ids=prompt_ids, max_tokens=ANSWER_TOKENS)
    token_ids, report = engine.answer(request)
    waited_s = total_s(engine.runner.waits)
    engine.flush()
    return Measured(token_ids, report, waited_s)


def answer_alone(runner: V41Runner, prompt_ids: list[int]) -> list[int]:
    """What an engine answers that knows no store."""
    with open_engine_over(runner, "v41-shape", None, config=CONFIG) as engine:
        return ask(engine, prompt_ids).token_ids


@contextmanager
def start_cluster(folder: Path, workers: int, arena_bytes: int) -> Iterator[LocalCluster]:
    options = LocalAgentOptions(fetch_workers=workers, arena_bytes=arena_bytes)
    with LocalCluster.start(
        folder,
        nodes=NODES,
        k=K,
        m=M,
        target_size_bytes=TARGET_BYTES,
        agents=1,
        agent_options=options,
    ) as cluster:
        yield cluster


def restart_agent(cluster: LocalCluster, workers: int) -> Path:
    """The same agent, empty, with another number of fetch workers; its socket."""
    cluster.agents.stop([AGENT])
    LocalCluster.start(cluster.folder, agent_options=LocalAgentOptions(fetch_workers=workers))
    return cluster.agents.socket(AGENT)


class Storage:
    """The nodes in one kind of memory, and what an engine does with them."""

    def __init__(self, name: str, cluster: LocalCluster, runner: V41Runner) -> None:
        self._name = name
        self._facts = {
            "storage": name,
            "file_system": file_system_of(cluster.folder),
            "page_cache": "dropped" if name == "disk" else "kept",
        }
        self._cluster = cluster
        self._runner = runner

    def measure_cold(
        self, prompts: dict[int, Stored], alone: dict[int, list[int]], socket: Path
    ) -> None:
        """Compute and save every prompt, after one that warms up, and go on from it."""
        with self._open_engines(socket) as engines:
            ask(next(engines), random_prompt(WARM_TOKENS, seed=1))
            for length, stored in prompts.items():
                measured = ask(next(engines), stored.first_turn)
                saved = measured.report.receipt.summary()
                emit(
                    case="cold",
                    **self._facts,
                    prompt_tokens=length,
                    first_token_ms=round(measured.report.ttft_s * 1e3, 2),
                    saved_blocks=saved.stored,
                    not_saved_blocks=saved.failed + saved.dropped,
                )
                again = ask(next(engines), stored.prompt_ids)
                emit(
                    case="checked",
                    **self._facts,
                    prompt_tokens=length,
                    hit_tokens=again.report.hit_tokens,
                    replay_tokens=again.report.replay_tokens,
                    equal=again.token_ids == alone[length],
                )

    def measure_hits_without_a_node(
        self, prompts: dict[int, Stored], workers: int, rounds: int
    ) -> None:
        self._cluster.stop_node(NODE_DOWN)
        self._facts["node_down"] = NODE_DOWN
        try:
            self.measure_hits(prompts, workers, rounds)
        finally:
            del self._facts["node_down"]
            self._cluster.restart_node(NODE_DOWN)

    def measure_hits(self, prompts: dict[int, Stored], workers: int, rounds: int) -> None:
        socket = restart_agent(self._cluster, workers)
        with self._open_engines(socket) as engines:
            for length, stored in prompts.items():
                try:
                    self._measure_length(engines, stored, workers, rounds)
                except Exception:
                    # The other lengths are worth the machine's time.
                    self._emit_error(traceback.format_exc(), workers=workers, prompt_tokens=length)

    def _emit_error(self, error: str, **facts: object) -> None:
        emit(storage=self._name, **facts, error=error)

    def _measure_length(
        self, engines: Iterator[LocalEngine], stored: Stored, workers: int, rounds: int
    ) -> None:
        # The first one leaves window state for the second one of the same round.
        cases: dict[str, list[Measured]] = {"replay": [], "window": []}
        for _ in range(1 + rounds):
            cases["replay"].append(self._ask_cold(next(engines), stored.first_turn))
            cases["window"].append(self._ask_cold(next(engines), stored.prompt_ids))
        for case, measured in cases.items():
            self._report(case, stored, workers, measured[1:])

    def _ask_cold(self, engine: LocalEngine, prompt_ids: list[int]) -> Measured:
        """With nothing of the nodes' segments in the page cache, if they are on a disk."""
        segments = list(self._cluster.folder.rglob("*.seg"))
        if self._name == "disk":
            drop_pages(segments)
        cached_bytes = resident_bytes(segments)
        return replace(ask(engine, prompt_ids), cached_bytes=cached_bytes)

    def _report(self, case: str, stored: Stored, workers: int, measured: list[Measured]) -> None:
        tokens = stored.hit_tokens
        if case == "replay":
            tokens = farthest_hit(len(stored.first_turn)) - WINDOW_TOKENS
        own = [one for one in measured if one.report.hit_tokens == tokens]
        facts: dict[str, object] = {
            "case": case,
            **self._facts,
            "workers": workers,
            "prompt_tokens": len(stored.prompt_ids),
            "hit_tokens": tokens,
            "rounds": len(own),
            "others": [one.report.hit_tokens for one in measured if one not in own],
        }
        if own:
            facts |= self._describe(own)
        emit(**facts)

    def _describe(self, own: list[Measured]) -> dict[str, object]:
        def median_ms(values: list[float]) -> float:
            return round(statistics.median(values) * 1e3, 2)

        reports = [one.report for one in own]
        stored_tokens = reports[0].hit_tokens + reports[0].replay_tokens
        hit_bytes = stored_tokens // BLOCK_TOKENS * self._runner.pool.block_bytes
        fetch_s = statistics.median(one.fetch_s for one in reports)
        return {
            "first_token_ms": median_ms([one.ttft_s for one in reports]),
            "match_ms": median_ms([one.match_s for one in reports]),
            "fetch_ms": median_ms([one.fetch_s for one in reports]),
            "compute_ms": median_ms([one.prefill_s for one in reports]),
            "waited_ms": median_ms([one.waited_s for one in own]),
            "cached_bytes": max(one.cached_bytes for one in own),
            "hit_bytes": hit_bytes,
            "fetch_gb_per_s": round(hit_bytes / fetch_s / 1e9, 3) if fetch_s else None,
        }

    @contextmanager
    def _open_engines(self, socket: Path) -> Iterator[Iterator[LocalEngine]]:
        """Engines one after the other, none of which knows what the one before had in its pool;
        each is closed when the next one is asked for. They share a mover, which takes a second."""
        runner = self._runner
        with (
            AgentClient.open(socket, name="benchmark") as client,
            open_mover(
                runner.pool, runner.namespace.layout, lambda: client.arena, clock=clock
            ) as opened,
        ):
            rebuilder = find_rebuilder(
                client, runner.namespace, runner.pool, opened.mover, clock=clock
            )
            rebuilt_by = "agent" if rebuilder is None else "reader"
            emit(storage=self._name, rebuilt_by=rebuilt_by, **opened.describe())

            def engines() -> Generator[LocalEngine]:
                while True:
                    with open_engine_over(
                        runner,
                        "v41-shape",
                        client,
                        config=CONFIG,
                        mover=opened.mover,
                        rebuilder=rebuilder,
                        limits=LIMITS,
                    ) as engine:
                        yield engine

            produced = engines()
            try:
                yield produced
            finally:
                produced.close()


def measure_storage(
    name: str,
    parent: Path,
    runner: V41Runner,
    prompts: dict[int, Stored],
    alone: dict[int, list[int]],
    options: argparse.Namespace,
) -> None:
    blocks = max(options.lengths) // BLOCK_TOKENS + 1
    # Runs of a fetch and of saves, in whole MiB.
    arena_bytes = (64 + (4 * blocks * runner.pool.block_bytes >> 20)) << 20
    with (
        # A short name: the agent's socket lies in it.
        tempfile.TemporaryDirectory(prefix="ce-", dir=parent) as folder,
        start_cluster(Path(folder) / "c", max(options.workers), arena_bytes) as cluster,
    ):
        storage = Storage(name, cluster, runner)
        storage.measure_cold(prompts, alone, cluster.agents.socket(AGENT))
        for workers in options.workers:
            try:
                storage.measure_hits(prompts, workers, options.rounds)
            except Exception:
                emit(storage=name, workers=workers, error=traceback.format_exc())
        if name == "memory":
            storage.measure_hits_without_a_node(prompts, NODE_DOWN_WORKERS, options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("scaled", "tiny"), default="scaled")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--rounds", type=int, default=3, help="of each case, behind one to warm up")
    parser.add_argument("--threads", type=int, default=None, help="of the tensor library")
    parser.add_argument(
        "--storage", nargs="+", choices=("memory", "disk"), default=["memory", "disk"]
    )
    parser.add_argument("--disk", type=Path, default=Path("/tmp"), help="folder on a disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder in memory")
    options = parser.parse_args()
    if min(options.lengths) < 5 * BLOCK_TOKENS:
        parser.error("--lengths: expected 640 or more, for a hit behind a replay")
    kind = file_system_of(options.disk)
    if "disk" in options.storage and kind in IN_MEMORY:
        parser.error(f"--disk: given {options.disk}, which is {kind}, expected a folder on a disk")
    set_thread_count(options.threads)
    size: Size = options.size
    runner = make_runner(
        size,
        choose_device(options.device),
        pool_blocks=max(options.lengths) // BLOCK_TOKENS + 72,
        state_slots=4,
    )
    freeze_loaded_objects()
    emit(what="machine", device=str(runner.pool.device), cores=len(os.sched_getaffinity(0)))
    prompts = {length: Stored(random_prompt(length, seed=length)) for length in options.lengths}
    alone = {length: answer_alone(runner, one.prompt_ids) for length, one in prompts.items()}
    for name in options.storage:
        try:
            measure_storage(name, getattr(options, name), runner, prompts, alone, options)
        except Exception:
            emit(storage=name, error=traceback.format_exc())


if __name__ == "__main__":
    main()
