"""What engines ask of an agent: a real process, real nodes, and bytes by hand over its socket."""

from __future__ import annotations

import fcntl
import os
import select
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from kvstore import agent_messages as m
from kvstore.arena.progress import ProgressReader
from kvstore.arena.run_layout import RunCode, RunLayout
from kvstore.arena.wakeup import drain
from kvstore.layout import BlockLayout, Section

from .agent_process import AgentProcess
from .arena_runs import SectionedBlocks
from .engine_steps import WINDOW, bytes_of, fetch_request, fill, put_window, store, wait_until
from .raw_engine import RawEngine

# The whole way ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_by_layer", [False, True])
def test_blocks_come_back_as_they_were_stored(engine: RawEngine, is_by_layer: bool) -> None:
    blocks = SectionedBlocks(70, seed=1 + is_by_layer)
    namespace = engine.open(blocks.namespace)
    assert store(engine, namespace, blocks).stored == 70
    keys = b"".join(blocks.keys)
    assert engine.ask(m.Match(namespace=namespace, keys=keys, deadline_s=5.0), m.Matched) == (
        m.Matched(70)
    )
    leased = engine.lease(namespace, 70)
    ended = engine.ask(fetch_request(leased.run, blocks, is_by_layer=is_by_layer), m.FetchEnded)
    assert (ended.blocks, ended.ended) == (70, "complete")
    run = engine.memory(leased, blocks.namespace.layout)
    reader = ProgressReader(run)
    assert reader.is_ended
    assert reader.whole_blocks == 70
    for section in range(4):
        assert np.array_equal(bytes_of(run, section, 70), blocks.section(section, 0, 70))
    engine.release(leased.run)


def test_first_section_is_told_by_a_wakeup_before_the_fetch_has_ended(engine: RawEngine) -> None:
    blocks = SectionedBlocks(256, seed=3)
    namespace = engine.open(blocks.namespace)
    assert store(engine, namespace, blocks).stored == 256
    leased = engine.lease(namespace, 256)
    run = engine.memory(leased, blocks.namespace.layout)
    request = engine.send(fetch_request(leased.run, blocks, is_by_layer=True))
    poll = select.poll()
    poll.register(engine.wakeups[leased.run], select.POLLIN)
    assert poll.poll(10_000), "nobody was woken"
    wait_until(lambda: run.view[:4] != bytes(4) and ProgressReader(run).ready_blocks(0) > 0)
    ready = ProgressReader(run).ready_blocks(0)
    assert np.array_equal(bytes_of(run, 0, ready), blocks.section(0, 0, ready))
    ended = engine.answer(request)
    assert isinstance(ended, m.FetchEnded)
    assert ended.blocks == 256
    engine.release(leased.run)


def test_fetch_delivers_what_is_stored_when_the_chain_goes_on(engine: RawEngine) -> None:
    blocks = SectionedBlocks(20, seed=4)
    namespace = engine.open(blocks.namespace)
    leased = engine.lease(namespace, 12)
    run = engine.memory(leased, blocks.namespace.layout)
    for section in range(4):
        run.section(section)[:] = blocks.section(section, 0, 12).data
    stored = m.StoreRun(
        run=leased.run,
        keys=b"".join(blocks.keys[:12]),
        first_block=0,
        ttl_class="chat",
        deadline_s=20.0,
    )
    assert engine.ask(stored, m.StoreEnded).stored == 12
    leased = engine.lease(namespace, 20)
    ended = engine.ask(fetch_request(leased.run, blocks), m.FetchEnded)
    assert (ended.blocks, ended.ended) == (12, "too few shards")
    engine.release(leased.run)


def test_forgotten_blocks_do_not_match(engine: RawEngine) -> None:
    blocks = SectionedBlocks(5, seed=5)
    namespace = engine.open(blocks.namespace)
    store(engine, namespace, blocks)
    keys = b"".join(blocks.keys)
    forget = m.Forget(namespace=namespace, keys=keys, first_block=2, deadline_s=5.0)
    assert engine.ask(forget, m.Forgotten).blocks == 3
    match = m.Match(namespace=namespace, keys=keys, deadline_s=5.0)
    assert engine.ask(match, m.Matched).blocks == 2


def test_stored_blocks_are_known_when_they_are_stored_again(engine: RawEngine) -> None:
    blocks = SectionedBlocks(4, seed=6)
    namespace = engine.open(blocks.namespace)
    assert store(engine, namespace, blocks).stored == 4
    while (again := store(engine, namespace, blocks)).failed:
        # A node was slow to say what it has: its blocks are in doubt, and not stored again.
        assert again.stored == 0
    assert (again.stored, again.known) == (0, 4)


def test_nodes_are_reported_with_their_statistics(engine: RawEngine) -> None:
    reports = engine.ask(m.AskNodes(deadline_s=5.0), m.NodeReports).nodes
    assert len(reports) == 12
    assert all(report.is_alive and b'"node"' in report.statistics for report in reports)


# Windows and prompts ------------------------------------------------------------------------------


def test_window_record_comes_back_with_its_sections_in_place(engine: RawEngine) -> None:
    blocks = SectionedBlocks(1, seed=7)
    namespace = engine.open(blocks.namespace, WINDOW)
    content = np.random.default_rng(7).bytes(3 * 1_056)
    assert put_window(engine, namespace, blocks.keys[0], content).is_kept
    look = m.LookUpWindows(namespace=namespace, keys=blocks.keys[0] + bytes(32), deadline_s=2.0)
    assert engine.ask(look, m.WindowsFound).hosts == ["", None]
    leased = engine.lease(namespace, 1, is_window=True)
    fetch = m.FetchWindow(namespace=namespace, key=blocks.keys[0], run=leased.run, deadline_s=2.0)
    assert engine.ask(fetch, m.WindowFetched).is_found
    run = engine.memory(leased, WINDOW)
    assert b"".join(bytes(run.section(section)) for section in range(3)) == content


def test_window_record_is_not_found_when_nobody_has_it(engine: RawEngine) -> None:
    namespace = engine.open(SectionedBlocks(1, seed=8).namespace, WINDOW)
    leased = engine.lease(namespace, 1, is_window=True)
    fetch = m.FetchWindow(namespace=namespace, key=bytes(32), run=leased.run, deadline_s=2.0)
    assert not engine.ask(fetch, m.WindowFetched).is_found
    engine.release(leased.run)


@pytest.mark.parametrize(
    ("has_window", "is_dense", "plan"),
    [
        (False, False, (8 * 128, 128, None)),
        (True, False, (9 * 128, 0, 9 * 128)),
        (False, True, (10 * 128, 0, None)),
    ],
)
def test_prompt_is_planned_by_the_hit_rule(
    engine: RawEngine, has_window: bool, is_dense: bool, plan: tuple[int, int, int | None]
) -> None:
    # 10 blocks and 10 tokens: L - 134 is a little more than 9 blocks, which is L1.
    blocks = SectionedBlocks(10, seed=20 + has_window + 2 * is_dense)
    namespace = engine.open(blocks.namespace, WINDOW)
    store(engine, namespace, blocks)
    if has_window:
        put_window(engine, namespace, blocks.keys[8], bytes(3 * 1_056))
    request = m.MatchPrompt(
        namespace=namespace,
        keys=b"".join(blocks.keys),
        prompt_tokens=10 * 128 + 10,
        is_dense=is_dense,
        deadline_s=5.0,
    )
    found = engine.ask(request, m.PromptMatched)
    assert found.matched_blocks == 10
    assert (found.hit_tokens, found.replay_tokens, found.window_anchor) == plan
    assert found.window_host == ""
    assert found.match_s > 0


# Leases -------------------------------------------------------------------------------------------


def test_lease_of_more_than_the_arena_gets_what_fits(engine: RawEngine) -> None:
    blocks = SectionedBlocks(1, seed=9)
    namespace = engine.open(blocks.namespace)
    leased = engine.lease(namespace, 5_000)
    assert leased.blocks == ((64 << 20) - 4096) // blocks.namespace.layout.block_bytes
    engine.release(leased.run)


def test_lease_with_room_for_parity_says_of_which_code_and_takes_what_that_needs(
    agent: AgentProcess, engine: RawEngine
) -> None:
    blocks = SectionedBlocks(1, seed=9)
    namespace = engine.open(blocks.namespace)
    assert engine.lease(namespace, 40).code == (0, 0)
    request = m.LeaseRun(namespace=namespace, blocks=40, deadline_s=5.0, has_parity_room=True)
    leased = engine.ask(request, m.RunLeased)
    layout = RunLayout(blocks.namespace.layout, 40, RunCode(*leased.code))
    assert leased.code == (10, 2)
    without = RunLayout(blocks.namespace.layout, 40)
    assert agent.status()["arena"]["leased_bytes"] == layout.run_bytes + without.run_bytes
    windows = engine.open(blocks.namespace, WINDOW)
    window = m.LeaseRun(
        namespace=windows, blocks=1, deadline_s=5.0, is_window=True, has_parity_room=True
    )
    assert engine.refusal(window).what == "has_parity_room"


@pytest.mark.parametrize(("has_room", "is_by_layer"), [(False, True), (True, False)])
def test_rebuilding_is_left_to_an_engine_only_in_layer_order_and_with_room_for_parity(
    engine: RawEngine, *, has_room: bool, is_by_layer: bool
) -> None:
    blocks = SectionedBlocks(1, seed=9)
    namespace = engine.open(blocks.namespace)
    request = m.LeaseRun(namespace=namespace, blocks=1, deadline_s=5.0, has_parity_room=has_room)
    fetch = m.FetchRun(
        run=engine.ask(request, m.RunLeased).run,
        keys=b"".join(blocks.keys),
        first_block=0,
        is_by_layer=is_by_layer,
        deadline_s=1.0,
        is_left_to_reader=True,
    )
    refused = engine.refusal(fetch)
    assert refused.is_mistake
    assert refused.what == "is_left_to_reader"


def test_lease_waits_until_its_deadline_when_the_arena_is_full(
    agent: AgentProcess, engine: RawEngine
) -> None:
    namespace = engine.open(SectionedBlocks(1, seed=10).namespace)
    everything = engine.lease(namespace, 5_000)
    with agent.engine() as other:
        theirs = other.open(SectionedBlocks(1, seed=10).namespace)
        begun_s = time.monotonic()
        assert other.lease(theirs, 5_000, deadline_s=0.3).blocks == 0
        assert time.monotonic() - begun_s > 0.25
        waiting = other.send(m.LeaseRun(namespace=theirs, blocks=10, deadline_s=20.0))
        engine.release(everything.run)
        leased = other.answer(waiting)
        assert isinstance(leased, m.RunLeased)
        assert leased.blocks == 10


def test_request_for_everything_holds_up_nobody_for_longer_than_a_second(
    agent: AgentProcess, engine: RawEngine
) -> None:
    blocks = SectionedBlocks(1, seed=18)
    namespace = engine.open(blocks.namespace)
    one = engine.lease(namespace, 1)
    giant = engine.send(m.LeaseRun(namespace=namespace, blocks=65_536, deadline_s=60.0))
    with agent.engine() as other:
        theirs = other.open(blocks.namespace)
        # The deadline is longer than anybody waits for an answer here.
        leased = other.lease(theirs, 4, deadline_s=60.0)
        assert leased.blocks == 4
        assert other.lease(theirs, 4, deadline_s=60.0).blocks == 4
    engine.release(one.run)
    everything = engine.answer(giant)
    assert isinstance(everything, m.RunLeased)
    assert everything.blocks > 500
    engine.wakeups[everything.run] = engine.descriptors.popleft()
    engine.release(everything.run)


def test_engine_cannot_make_the_agent_wait_by_what_it_does_to_its_wakeups(
    agent: AgentProcess, engine: RawEngine
) -> None:
    """The flags of an eventfd are shared: with O_NONBLOCK off and its count at the limit, worker
    and agent waited in their next write for ever."""
    blocks = SectionedBlocks(70, seed=19)
    namespace = engine.open(blocks.namespace)
    store(engine, namespace, blocks)
    leased = engine.lease(namespace, 70)
    wakeup = engine.wakeups[leased.run]
    fcntl.fcntl(wakeup, fcntl.F_SETFL, 0)
    with suppress(OSError):
        os.write(wakeup, (2**64 - 2).to_bytes(8, "little"))
    pids = agent.workers()
    for _ in range(20):
        ended = engine.ask(fetch_request(leased.run, blocks, is_by_layer=True), m.FetchEnded)
        assert (ended.blocks, ended.ended) == (70, "complete")
    assert agent.workers() == pids, "no worker had to be killed"
    engine.release(leased.run)


def test_wakeups_end_when_the_run_is_no_longer_the_engines(engine: RawEngine) -> None:
    namespace = engine.open(SectionedBlocks(2, seed=20).namespace)
    leased = engine.lease(namespace, 2)
    wakeup = engine.wakeups[leased.run]
    assert not select.select([wakeup], [], [], 0)[0]
    engine.release(leased.run)
    assert select.select([wakeup], [], [], 5)[0]
    assert not drain(wakeup)


def test_new_run_holds_no_progress_of_an_earlier_one(engine: RawEngine) -> None:
    blocks = SectionedBlocks(8, seed=11)
    namespace = engine.open(blocks.namespace)
    store(engine, namespace, blocks)
    first = engine.lease(namespace, 8)
    engine.ask(fetch_request(first.run, blocks), m.FetchEnded)
    engine.release(first.run)
    second = engine.lease(namespace, 8)
    assert second.offset == first.offset
    run = engine.memory(second, blocks.namespace.layout)
    assert bytes(run.view[: run.layout.table_bytes]) == bytes(run.layout.table_bytes)
    engine.release(second.run)


def test_released_run_gives_up_its_fetch(engine: RawEngine) -> None:
    blocks = SectionedBlocks(256, seed=12)
    namespace = engine.open(blocks.namespace)
    store(engine, namespace, blocks)
    leased = engine.lease(namespace, 256)
    request = engine.send(fetch_request(leased.run, blocks))
    engine.release(leased.run)
    ended = engine.answer(request)
    assert isinstance(ended, m.FetchEnded)
    assert ended.blocks in (0, 256)
    wait_until(lambda: engine.status()["arena"]["runs"] == 0)


def test_runs_return_when_an_engine_dies_in_a_fetch(agent: AgentProcess) -> None:
    blocks = SectionedBlocks(256, seed=13)
    with agent.engine() as engine:
        namespace = engine.open(blocks.namespace)
        store(engine, namespace, blocks)
        leased = engine.lease(namespace, 256)
        engine.lease(namespace, 8)
        engine.send(fetch_request(leased.run, blocks))
        waiting = m.LeaseRun(namespace=namespace, blocks=5_000, deadline_s=60.0)
        engine.send(waiting)
        wait_until(lambda: agent.status()["arena"]["waiting"] == 1)
    wait_until(lambda: agent.status()["arena"]["runs"] == 0)
    arena = agent.status()["arena"]
    assert (arena["leased_bytes"], arena["waiting"]) == (0, 0)
    assert arena["largest_free_bytes"] == arena["size_bytes"]


def test_handed_over_run_is_saved_although_its_engine_is_gone(agent: AgentProcess) -> None:
    blocks = SectionedBlocks(64, seed=14)
    keys = b"".join(blocks.keys)
    with agent.engine() as engine:
        namespace = engine.open(blocks.namespace)
        leased = engine.lease(namespace, 64)
        fill(engine.memory(leased, blocks.namespace.layout), blocks)
        engine.send(
            m.StoreRun(run=leased.run, keys=keys, first_block=0, ttl_class="chat", deadline_s=20.0)
        )
    with agent.engine() as engine:
        namespace = engine.open(blocks.namespace)
        match = m.Match(namespace=namespace, keys=keys, deadline_s=5.0)
        wait_until(lambda: engine.ask(match, m.Matched).blocks == 64)
        wait_until(lambda: engine.status()["arena"]["runs"] == 0)


# What is refused ----------------------------------------------------------------------------------


def test_requests_that_break_a_rule_are_refused_and_the_session_goes_on(
    agent: AgentProcess, engine: RawEngine
) -> None:
    blocks = SectionedBlocks(4, seed=15)
    namespace = engine.open(blocks.namespace)
    keys = b"".join(blocks.keys)
    leased = engine.lease(namespace, 2)
    with agent.engine() as other:
        assert other.refusal(m.ReleaseRun(run=leased.run)).what == "run"
    assert engine.refusal(m.Match(namespace=9, keys=keys, deadline_s=1.0)).what == "namespace"
    assert engine.refusal(m.Match(namespace=namespace, keys=b"x", deadline_s=1.0)).what == "keys"
    too_many = engine.refusal(fetch_request(leased.run, blocks))
    assert "at most 2" in too_many.expected
    window = m.FetchWindow(namespace=namespace, key=bytes(32), run=leased.run, deadline_s=1.0)
    assert engine.refusal(window).expected == "one with window sections"
    wrong_class = m.StoreRun(
        run=leased.run, keys=keys[:64], first_block=0, ttl_class="No Class", deadline_s=1.0
    )
    assert engine.refusal(wrong_class).what == "ttl_class"
    prompt = m.MatchPrompt(
        namespace=namespace, keys=keys, prompt_tokens=100, is_dense=False, deadline_s=1.0
    )
    assert engine.refusal(prompt).is_mistake
    assert engine.refusal(m.Hello(version=1, client="again")).what == "Hello"
    engine.release(leased.run)
    assert engine.refusal(m.ReleaseRun(run=leased.run)).what == "run"


def test_session_has_so_many_runs_and_namespaces_and_no_more(engine: RawEngine) -> None:
    blocks = SectionedBlocks(1, sections=(2_048,), seed=32)
    namespace = engine.open(blocks.namespace)
    assert engine.open(blocks.namespace) == namespace, "an equal one is the same one"
    leased = [engine.lease(namespace, 1) for _ in range(256)]
    assert len({one.offset for one in leased}) == 256
    refused = engine.refusal(m.LeaseRun(namespace=namespace, blocks=1, deadline_s=1.0))
    assert not refused.is_mistake
    engine.release(leased[0].run)
    assert engine.lease(namespace, 1).blocks == 1
    for number in range(255):
        engine.open(replace(blocks.namespace, tenant=f"t{number}"))
    request = m.OpenNamespace(
        model="one", weights="too", tokenizer="many", sections=[("all", 2_048)]
    )
    assert engine.refusal(request).what == "namespaces"


def test_session_has_fewer_namespaces_when_they_have_many_sections(engine: RawEngine) -> None:
    sections = tuple(Section(f"s{number}", 1) for number in range(1_024))
    many = replace(SectionedBlocks(1, seed=33).namespace, layout=BlockLayout(sections))
    for number in range(8):
        engine.open(replace(many, tenant=f"t{number}"), window=many.layout)
    assert engine.open(replace(many, tenant="t7"), window=many.layout) == 7
    request = m.OpenNamespace(
        model="one", weights="too", tokenizer="many", sections=[("all", 2_048)]
    )
    refused = engine.refusal(request)
    assert (refused.what, refused.given) == ("sections of all namespaces", "16385")


def test_namespace_that_cannot_be_is_refused(engine: RawEngine) -> None:
    request = m.OpenNamespace(model="m", weights="w", tokenizer="t", sections=[("all", 5)])
    assert "block bytes" in engine.refusal(request).what
    request = m.OpenNamespace(model="", weights="w", tokenizer="t", sections=[("all", 2_048)])
    assert engine.refusal(request).is_mistake


def test_second_fetch_into_a_run_is_refused_while_the_first_runs(engine: RawEngine) -> None:
    blocks = SectionedBlocks(256, seed=16)
    namespace = engine.open(blocks.namespace)
    store(engine, namespace, blocks)
    leased = engine.lease(namespace, 256)
    first = m.pack_message(901, fetch_request(leased.run, blocks))
    second = m.pack_message(902, fetch_request(leased.run, blocks))
    engine.socket.sendall(first + second)
    assert isinstance(engine.answer(902), m.Refused)
    assert isinstance(engine.answer(901), m.FetchEnded)
    engine.release(leased.run)


def test_other_version_is_told_which_one_is_spoken(agent: AgentProcess) -> None:
    with agent.engine(is_greeted=False) as engine:
        refused = engine.refusal(m.Hello(version=99, client="new"))
        assert (refused.given, refused.expected) == ("99", "1")
        engine.wait_until_ended()


def test_session_is_ended_when_it_does_not_begin_with_hello(agent: AgentProcess) -> None:
    with agent.engine(is_greeted=False) as engine:
        assert engine.refusal(m.AskStatus()).expected == "Hello"
        engine.wait_until_ended()


def test_agent_with_the_role_check_alone_has_no_arena_and_no_workers(cluster_path: str) -> None:
    with AgentProcess(cluster_path, words=("--roles", "check")) as agent:
        assert agent.workers() == []
        with agent.engine() as engine:
            assert engine.region is None
            blocks = SectionedBlocks(3, seed=17)
            namespace = engine.open(blocks.namespace)
            match = m.Match(namespace=namespace, keys=b"".join(blocks.keys), deadline_s=5.0)
            assert engine.ask(match, m.Matched).blocks == 0
            look = m.LookUpWindows(namespace=namespace, keys=bytes(32), deadline_s=1.0)
            assert engine.ask(look, m.WindowsFound).hosts == [None]
            refused = engine.refusal(m.LeaseRun(namespace=namespace, blocks=1, deadline_s=1.0))
            assert not refused.is_mistake
            assert engine.status()["arena"] is None
