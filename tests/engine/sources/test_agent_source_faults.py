"""An agent or nodes that die or stand still in the middle of a load: it ends, and nothing leaks."""

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from engine.block_pool import BlockPool
from engine.errors import DeviceLost
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import SectionMover
from engine.prefix_source import LoadFellShort, LoadOutcome
from engine.sources.agent_source import AgentSource
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient
from kvstore.layout import BlockLayout
from tests.engine.kv.failing_mover import FailingMover
from tests.engine.stored_prompt import LAYOUT, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.kvstore.agent.agent_process import AgentProcess
from tests.kvstore.faults.lost_nodes import stopped

BLOCKS = 12
LONG_S = 3600.0


class Scene:
    """A prompt that is stored, a pool, and a source over an agent that may be harmed."""

    def __init__(
        self,
        client: BlockingAgentClient,
        limits: LoadLimits,
        make_mover: Callable[[BlockPool, BlockLayout], SectionMover] = MemcpyMover,
    ) -> None:
        self.prompt = StoredPrompt(BLOCKS)
        self.prompt.save(client)
        self.pool = self.prompt.pool(BLOCKS)
        self.faults = StoreFaults()
        self.source = AgentSource(
            client,
            namespace=self.prompt.namespace,
            pool=self.pool,
            window_layout=None,
            faults=self.faults,
            limits=limits,
            clock=time.monotonic,
            mover=make_mover(self.pool, LAYOUT),
        )

    def look_up(self) -> ThreadedLoad:
        load = self.source.look_up(self.prompt.tokens, self.prompt.keys)
        wait_until(lambda: load.found is not None)
        return load

    def begin(self) -> ThreadedLoad:
        load = self.look_up()
        assert load.found is not None
        assert load.found.plan.stored_blocks == BLOCKS
        self.order(load)
        return load

    def order(self, load: ThreadedLoad) -> None:
        """Begin; this test's engine keeps no references of its own."""
        assert load.found is not None
        block_ids = self.pool.allocate(BLOCKS)
        load.begin(load.found.plan, block_ids, 0)
        self.pool.release(block_ids)

    def begin_in(self, cluster: LocalCluster, agent: AgentProcess) -> ThreadedLoad:
        """A load whose run is leased and whose bytes do not come: of three nodes two stand
        still, to be woken by the caller."""
        load = self.look_up()
        for name in cluster.node_names[:2]:
            cluster.kill(name, signal.SIGSTOP)
        self.order(load)
        wait_until(lambda: agent.status()["arena"]["runs"] == 1)
        return load

    def blocks_of(self, load: ThreadedLoad) -> int:
        """What came; all references are given back by then."""
        wait_until(lambda: load.outcome is not None)
        assert load.outcome is not None
        assert self.pool.free_blocks == BLOCKS
        return load.outcome.blocks


@pytest.fixture
def cluster_that_wakes(frail_cluster: LocalCluster) -> Iterator[LocalCluster]:
    yield frail_cluster
    for name in frail_cluster.node_names:
        frail_cluster.kill(name, signal.SIGCONT)


def open_scene(client: BlockingAgentClient, *, fetch_deadline_s: float = LONG_S) -> Scene:
    limits = LoadLimits(
        match_deadline_s=0.3,
        fetch_deadline_s=fetch_deadline_s,
        section_wait_s=0.01,
        rest_s=LONG_S,
    )
    return Scene(client, limits)


def test_one_node_that_stands_still_costs_no_block(
    frail_cluster: LocalCluster, own_client: BlockingAgentClient
) -> None:
    scene = open_scene(own_client)
    with stopped(frail_cluster, frail_cluster.node_names[:1]):
        load = scene.begin()
        assert scene.blocks_of(load) == BLOCKS
    assert scene.source.close(DEADLINE_S)


def test_nodes_that_stand_still_cost_the_hit_at_the_deadline_and_the_next_one_no_time(
    cluster_that_wakes: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient
) -> None:
    scene = open_scene(own_client, fetch_deadline_s=1.0)
    next_one = scene.look_up()
    load = scene.begin_in(cluster_that_wakes, agent)
    assert scene.blocks_of(load) == 0
    wait_until(lambda: agent.status()["arena"]["runs"] == 0)
    scene.order(next_one)
    assert scene.blocks_of(next_one) == 0
    assert [event.step for event in outcome_of(next_one).events] == ["match"]
    assert scene.source.close(DEADLINE_S)


def test_pass_waits_as_long_as_it_may_and_a_load_given_up_then_returns_its_run(
    cluster_that_wakes: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient
) -> None:
    scene = open_scene(own_client)
    load = scene.begin_in(cluster_that_wakes, agent)
    with pytest.raises(LoadFellShort):
        load.wait_for_section(0)
    assert load.outcome is None
    assert not load.is_startable
    load.give_up()
    scene.blocks_of(load)
    wait_until(lambda: agent.status()["arena"]["runs"] == 0)
    assert scene.faults.count == 0
    assert scene.source.close(DEADLINE_S)


def test_closed_source_gives_up_a_load_while_nothing_comes(
    cluster_that_wakes: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient
) -> None:
    scene = open_scene(own_client)
    load = scene.begin_in(cluster_that_wakes, agent)
    assert scene.source.close(DEADLINE_S)
    scene.blocks_of(load)


def test_agent_killed_in_the_middle_of_a_load_costs_the_hit_and_is_counted_once(
    cluster_that_wakes: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient
) -> None:
    scene = open_scene(own_client)
    load = scene.begin_in(cluster_that_wakes, agent)
    agent.kill()
    with pytest.raises(LoadFellShort):
        load.wait_for_section(0)
    assert scene.blocks_of(load) < BLOCKS
    assert scene.faults.count == 1
    assert scene.source.close(DEADLINE_S)


@pytest.mark.parametrize("moment", ["before the match", "before the lease", "after the lease"])
def test_load_ends_by_its_deadline_when_the_agent_stands_still(
    cluster_that_wakes: LocalCluster,
    agent: AgentProcess,
    own_client: BlockingAgentClient,
    moment: str,
) -> None:
    scene = open_scene(own_client, fetch_deadline_s=1.0)
    if moment == "after the lease":
        load = scene.begin_in(cluster_that_wakes, agent)
        agent.process.send_signal(signal.SIGSTOP)
    elif moment == "before the lease":
        load = scene.look_up()
        agent.process.send_signal(signal.SIGSTOP)
        scene.order(load)
    else:
        agent.process.send_signal(signal.SIGSTOP)
        load = scene.look_up()
        assert load.found is not None
        assert load.found.plan.stored_blocks == 0
        load.give_up()
    assert scene.blocks_of(load) < BLOCKS
    assert scene.source.close(DEADLINE_S)


def outcome_of(load: ThreadedLoad) -> LoadOutcome:
    wait_until(lambda: load.outcome is not None)
    assert load.outcome is not None
    return load.outcome


def test_device_that_is_lost_is_a_short_load_and_no_fault_of_the_store(
    client: BlockingAgentClient, caplog: pytest.LogCaptureFixture
) -> None:
    lost = partial(FailingMover, error=DeviceLost("an illegal memory access was encountered"))
    scene = Scene(client, LoadLimits(fetch_deadline_s=DEADLINE_S), lost)
    for _ in range(2):
        load = scene.begin()
        assert outcome_of(load).blocks == 0
        with pytest.raises(LoadFellShort):
            load.wait_for_section(0)
    assert (scene.faults.count, scene.faults.transfers) == (0, 2)
    assert scene.pool.free_blocks == BLOCKS
    assert scene.source.close(DEADLINE_S)
    assert [one.getMessage() for one in caplog.records if "illegal" in one.getMessage()] == [
        "blocks were not moved: fetch failed, going on without it: "
        "an illegal memory access was encountered"
    ]
