"""What a sink over an agent does beyond the contract, and what it does when the agent fails."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from engine.block_pool import BlockPool
from engine.kv import mover as mover_module
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark, SectionMover, Transfer
from engine.kv.nixl_mover import NixlMover
from engine.save_receipt import SaveReceipt, SaveSummary
from engine.sinks.agent_sink import AgentSink
from engine.sinks.threaded_sink import SinkLimits
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient
from kvstore.layout import BlockLayout
from tests.engine.kv.delayed_mover import DelayedMover
from tests.engine.kv.failing_mover import FailingMover
from tests.engine.kv.fake_nixl import FakeNixl
from tests.engine.stored_prompt import LAYOUT, WINDOW, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.kvstore.agent.agent_process import AgentProcess
from tests.kvstore.faults.lost_nodes import stopped

BLOCKS = 12


class Saving:
    """A prompt with window state, a pool, and a sink over an agent."""

    def __init__(
        self,
        client: BlockingAgentClient,
        limits: SinkLimits,
        make_mover: Callable[[BlockPool, BlockLayout], SectionMover] = MemcpyMover,
    ) -> None:
        self.client = client
        self.prompt = StoredPrompt(BLOCKS)
        self.pool = self.prompt.pool(BLOCKS)
        self.faults = StoreFaults()
        self.sink = AgentSink(
            client,
            namespace=self.prompt.namespace,
            pool=self.pool,
            window_layout=WINDOW,
            faults=self.faults,
            limits=limits,
            clock=time.monotonic,
            mover=make_mover(self.pool, LAYOUT),
        )

    def save(self) -> SaveReceipt:
        block_ids = self.pool.allocate(BLOCKS)
        for block_id, data in zip(block_ids, self.prompt.blocks, strict=True):
            self.pool.buffer(block_id)[:] = data
        receipt = SaveReceipt()
        self.sink.save_blocks(self.prompt.keys, block_ids, ttl_class="chat", receipt=receipt)
        self.pool.release(block_ids)
        return receipt

    def save_window(self) -> None:
        self.sink.save_window(self.prompt.keys[-1], self.prompt.record)

    def fetch_window(self) -> bytes | None:
        record = bytearray(WINDOW.block_bytes)
        found = self.client.fetch_window(self.prompt.namespace, self.prompt.keys[-1], record)
        return bytes(record) if found.is_found else None


def test_sink_puts_window_state_where_a_source_finds_it(client: BlockingAgentClient) -> None:
    saving = Saving(client, SinkLimits())
    saving.save_window()
    assert saving.sink.flush(DEADLINE_S)
    assert saving.fetch_window() == saving.prompt.window
    assert saving.sink.close(DEADLINE_S)
    assert saving.sink.dropped_windows == 0


def test_sink_with_fewer_runs_than_it_needs_waits_for_those_under_way(
    client: BlockingAgentClient, shared_agent: AgentProcess
) -> None:
    saving = Saving(client, SinkLimits(lease_blocks_max=1, runs_max=1))
    receipt = saving.save()
    assert saving.sink.close(DEADLINE_S)
    assert receipt.summary() == SaveSummary(stored=BLOCKS)
    wait_until(lambda: shared_agent.status()["arena"]["runs"] == 0)


def test_blocks_that_do_not_get_out_of_the_pool_are_no_fault_of_the_store(
    client: BlockingAgentClient,
) -> None:
    saving = Saving(client, SinkLimits(), FailingMover)
    for _ in range(2):
        receipt = saving.save()
        assert saving.sink.flush(DEADLINE_S)
        assert receipt.summary() == SaveSummary(failed=BLOCKS)
    assert saving.sink.close(DEADLINE_S)
    assert (saving.faults.count, saving.faults.transfers) == (0, 2)
    assert saving.pool.free_blocks == BLOCKS


class WaitingMover(MemcpyMover):
    """Its device is said to have computed so far when it is looked at."""

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        super().__init__(pool, layout)
        self.happened: list[str] = []

    def mark_compute(self) -> ComputeMark:
        return cast("ComputeMark", SimpleNamespace(query=self._note))

    def _note(self) -> bool:
        self.happened.append("computed")
        return True

    def from_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        assert after is None, "it has been waited for"
        return super().from_pool(part, section, block_ids)


def test_runs_are_leased_when_what_is_saved_is_computed(
    client: BlockingAgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room in the arena is not idle for a pass."""
    made: list[WaitingMover] = []

    def make(pool: BlockPool, layout: BlockLayout) -> WaitingMover:
        made.append(WaitingMover(pool, layout))
        return made[-1]

    saving = Saving(client, SinkLimits(lease_blocks_max=BLOCKS), make)
    (mover,) = made
    for name in ("lease_run", "lease_window"):
        lease = getattr(client, name)

        def noting(*args: object, lease: Any = lease, **options: object) -> object:  # noqa: ANN401
            mover.happened.append("lease")
            return lease(*args, **options)

        monkeypatch.setattr(client, name, noting)
    receipt = saving.save()
    assert saving.sink.flush(DEADLINE_S)
    assert mover.happened == ["computed", "lease"]
    record = replace(saving.prompt.record, after=mover.mark_compute())
    saving.sink.save_window(saving.prompt.keys[-1], record)
    assert saving.sink.close(DEADLINE_S)
    assert mover.happened == ["computed", "lease"] * 2
    assert receipt.summary() == SaveSummary(stored=BLOCKS)
    assert saving.fetch_window() == saving.prompt.window


def test_window_state_is_put_when_all_of_it_is_in_the_arena(client: BlockingAgentClient) -> None:
    made: list[DelayedMover] = []

    def make(pool: BlockPool, layout: BlockLayout) -> DelayedMover:
        made.append(DelayedMover(pool, layout))
        return made[-1]

    saving = Saving(client, SinkLimits(), make)
    saving.save_window()
    sections = len(WINDOW.sections)
    wait_until(lambda: len(made[0].started) == sections)
    made[0].go_on(sections - 1)
    assert saving.fetch_window() is None
    made[0].go_on()
    assert saving.sink.close(DEADLINE_S)
    assert saving.fetch_window() == saving.prompt.window


def test_window_state_of_a_device_that_is_lost_is_dropped_and_no_fault_of_the_store(
    client: BlockingAgentClient,
) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    saving = Saving(client, SinkLimits())
    after = cast("ComputeMark", SimpleNamespace(query=fail))
    saving.sink.save_window(saving.prompt.keys[-1], replace(saving.prompt.record, after=after))
    assert saving.sink.close(DEADLINE_S)
    assert saving.sink.dropped_windows == 1
    assert (saving.faults.count, saving.faults.transfers) == (0, 1)


def nixl_mover(pool: BlockPool, layout: BlockLayout) -> NixlMover:
    return NixlMover(pool, layout, arena=lambda: None, clock=time.monotonic, api=FakeNixl().module)


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError, torch.AcceleratorError, RuntimeError])
def test_window_state_that_a_device_does_not_copy_is_dropped_and_the_sink_goes_on(
    client: BlockingAgentClient, monkeypatch: pytest.MonkeyPatch, fault: type[RuntimeError]
) -> None:
    def fail(*_: object) -> NoReturn:
        raise fault("CUDA error: no luck\nand advice")

    saving = Saving(client, SinkLimits(), nixl_mover)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", fail)
        saving.save_window()
        assert saving.sink.flush(DEADLINE_S)
    assert saving.sink.dropped_windows == 1
    assert (saving.faults.count, saving.faults.transfers) == (0, 1)
    saving.save_window()
    assert saving.sink.close(DEADLINE_S)
    assert saving.fetch_window() == saving.prompt.window


def test_pass_that_never_ends_costs_the_blocks_behind_it_their_saving(
    client: BlockingAgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "poll", lambda is_over, deadline_s, **_: is_over())

    class HangingMover(MemcpyMover):
        def mark_compute(self) -> ComputeMark:
            return cast("ComputeMark", SimpleNamespace(query=lambda: False))

    saving = Saving(client, SinkLimits(), HangingMover)
    receipt = saving.save()
    assert saving.sink.flush(DEADLINE_S)
    assert receipt.summary() == SaveSummary(failed=BLOCKS)
    assert saving.pool.free_blocks == BLOCKS
    assert (saving.faults.count, saving.faults.transfers) == (0, 1)
    saving.save_window()
    assert saving.sink.close(DEADLINE_S)
    assert saving.fetch_window() == saving.prompt.window


@pytest.fixture
def full_arena(client: BlockingAgentClient) -> Iterator[None]:
    """Not a page is left."""
    namespace, hogs = StoredPrompt(0).namespace, []
    assert client.arena is not None
    most = len(client.arena) // LAYOUT.block_bytes
    while hog := client.lease_run(namespace, most, deadline_s=0.05):
        hogs.append(hog)
    yield
    for hog in hogs:
        hog.release()


@pytest.mark.usefixtures("full_arena")
def test_blocks_and_window_state_that_find_no_room_in_the_arena_are_given_up(
    client: BlockingAgentClient,
) -> None:
    saving = Saving(client, SinkLimits(lease_deadline_s=0.05))
    receipt = saving.save()
    saving.save_window()
    assert saving.sink.close(DEADLINE_S)
    assert receipt.summary() == SaveSummary(failed=BLOCKS)
    assert saving.sink.dropped_windows == 1
    assert saving.pool.free_blocks == BLOCKS
    assert saving.faults.count == 0


def test_sink_counts_an_agent_that_is_gone_and_saves_again_when_it_is_back(
    agent: AgentProcess, own_client: BlockingAgentClient
) -> None:
    saving = Saving(own_client, SinkLimits())
    agent.kill()
    receipt = saving.save()
    saving.save_window()
    assert saving.sink.flush(DEADLINE_S)
    assert receipt.summary() == SaveSummary(failed=BLOCKS)
    assert saving.pool.free_blocks == BLOCKS
    assert (saving.faults.count, saving.sink.dropped_windows) == (2, 1)
    agent.start()
    wait_until(lambda: own_client.is_connected)
    receipt = saving.save()
    saving.save_window()
    assert saving.sink.close(DEADLINE_S)
    assert receipt.summary() == SaveSummary(stored=BLOCKS)
    assert saving.fetch_window() == saving.prompt.window


def test_runs_under_way_when_the_agent_dies_are_failed_and_their_blocks_long_free(
    frail_cluster: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient
) -> None:
    saving = Saving(own_client, SinkLimits(save_deadline_s=600.0))
    with stopped(frail_cluster, frail_cluster.node_names):
        receipt = saving.save()
        saving.sink.make_room(BLOCKS, DEADLINE_S)
        assert saving.pool.free_blocks == BLOCKS
        assert receipt.summary() == SaveSummary(pending=BLOCKS)
        agent.kill()
        assert saving.sink.close(DEADLINE_S)
    assert receipt.summary() == SaveSummary(failed=BLOCKS)
    assert saving.faults.count == 1


def test_sink_closes_within_its_deadline_when_the_agent_stands_still(
    agent: AgentProcess, own_client: BlockingAgentClient
) -> None:
    saving = Saving(own_client, SinkLimits(lease_deadline_s=600.0))
    agent.process.send_signal(signal.SIGSTOP)
    saving.save()
    assert not saving.sink.close(0.05)
    agent.kill()
    wait_until(lambda: saving.pool.free_blocks == BLOCKS)
    assert saving.sink.close(DEADLINE_S)
    assert saving.faults.count > 0
