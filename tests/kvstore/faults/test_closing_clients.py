"""The blocking client under threads that it is taken from, and signals that interrupt it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import StoreClient
from kvstore.errors import ClientClosed
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.faults.lost_nodes import stopped
from tests.patience import OPERATION_S, PATIENCE_S, WELL_BEFORE_S


class Interrupted(BaseException):
    """What a signal handler raises, as KeyboardInterrupt is."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("three")
    with LocalCluster.start(folder / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20) as it:
        yield it


@pytest.fixture(scope="module")
def blocks(cluster: LocalCluster) -> RandomBlocks:
    made = RandomBlocks(70, block_bytes=12_345, seed=41)
    with StoreClient.open(cluster.cluster_path) as store:
        assert store.save(made.namespace, made.keys, made.sources).stored == 70
    return made


def run_until_closed(operation: Callable[[], object], ends: list[str]) -> None:
    """Notes how the operation ended: with its result, or with which error."""
    try:
        operation()
        ends.append("result")
    except BaseException as error:
        ends.append(type(error).__name__)


def test_close_ends_the_operations_of_other_threads(
    cluster: LocalCluster, blocks: RandomBlocks
) -> None:
    fresh = RandomBlocks(70, block_bytes=12_345, seed=42)
    ends: list[str] = []
    store = StoreClient.open(cluster.cluster_path)
    targets = [blocks.empty_target() for _ in range(3)]
    operations: list[Callable[[], object]] = [
        lambda: store.save(fresh.namespace, fresh.keys, fresh.sources, deadline_s=OPERATION_S),
        lambda: store.forget(fresh.namespace, fresh.keys, deadline_s=OPERATION_S),
        lambda: store.match(fresh.namespace, fresh.keys, deadline_s=OPERATION_S),
        *(
            lambda target=target: store.fetch(
                blocks.namespace, blocks.keys, target.blocks, deadline_s=OPERATION_S
            )
            for target in targets
        ),
    ]
    with stopped(cluster, cluster.node_names):
        threads = [
            threading.Thread(target=run_until_closed, args=(operation, ends))
            for operation in operations
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert ends == [], "all of them wait for nodes that stand still"
        store.close()
        for thread in threads:
            thread.join(WELL_BEFORE_S)
        assert ends == [ClientClosed.__name__] * len(operations)
        before = [target.area.copy() for target in targets]
    time.sleep(0.1)
    for target, area in zip(targets, before, strict=True):
        assert (target.area == area).all()


def test_threads_that_work_hard_end_with_a_result_or_with_client_closed(
    cluster: LocalCluster, blocks: RandomBlocks
) -> None:
    for delay_s in (0.0, 0.01, 0.03):
        ends: list[str] = []
        store = StoreClient.open(cluster.cluster_path)

        def work(store: StoreClient | object = store, ends: list[str] = ends) -> None:
            target = blocks.empty_target()
            while not ends or ends[-1] == "result":
                run_until_closed(
                    lambda: store.fetch(  # type: ignore[union-attr]
                        blocks.namespace, blocks.keys, target.blocks
                    ),
                    ends,
                )

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(delay_s)
        store.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert set(ends) <= {"result", "ClientClosed"}
        assert "ClientClosed" in ends


@pytest.fixture
def interrupt() -> Iterator[Callable[[float], None]]:
    """Makes a signal arrive after some seconds whose handler raises in the main thread."""

    def raise_interrupted(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, raise_interrupted)
    yield lambda after_s: signal.setitimer(signal.ITIMER_REAL, after_s) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_nothing_is_written_after_an_exception_came_out_of_a_fetch(
    cluster: LocalCluster, blocks: RandomBlocks, interrupt: Callable[[float], None]
) -> None:
    with StoreClient.open(cluster.cluster_path) as store:
        buffers = [bytearray(blocks.block_bytes) for _ in blocks.keys]
        with stopped(cluster, cluster.node_names):
            interrupt(0.1)
            with pytest.raises(Interrupted):
                store.fetch(blocks.namespace, blocks.keys, buffers, deadline_s=OPERATION_S)
            for buffer in buffers:
                buffer.append(0)  # raises BufferError if anything still points into it
        # The nodes go on, and their answers arrive now.
        assert store.match(blocks.namespace, blocks.keys) == 70
        time.sleep(0.1)
        assert not any(any(buffer) for buffer in buffers)
        target = blocks.empty_target()
        assert store.fetch(blocks.namespace, blocks.keys, target.blocks).blocks == 70
        assert (target.area == blocks.area).all()


def test_the_sources_are_the_callers_again_after_an_exception_came_out_of_a_save(
    cluster: LocalCluster, interrupt: Callable[[float], None]
) -> None:
    fresh = RandomBlocks(64, block_bytes=113_920, seed=43)
    with StoreClient.open(cluster.cluster_path) as store:
        buffers = [bytearray(source) for source in fresh.sources]
        with stopped(cluster, cluster.node_names):
            # Finding out what is known takes a quarter of a second here; then blocks are sent.
            interrupt(0.5)
            with pytest.raises(Interrupted):
                store.save(fresh.namespace, fresh.keys, buffers, deadline_s=OPERATION_S)
            for buffer in buffers:
                buffer.clear()
        target = fresh.empty_target()
        fetched = store.fetch(fresh.namespace, fresh.keys, target.blocks)
        delivered = fetched.blocks * fresh.block_bytes
        assert fetched.rejected_shards == 0
        assert (target.area[:delivered] == fresh.area[:delivered]).all()
