"""A cluster of real nodes, code 4+2, for the tests of one module, and contexts on it."""

from collections.abc import AsyncIterator, Iterator

import pytest

from gc_worker.cluster_link import ClusterLink
from kvstore.admin.local_cluster import LocalCluster
from tests.gc_worker.repair_bench import RepairBench
from tests.patience import make_patient


@pytest.fixture(scope="session", autouse=True)
def patient_links() -> None:
    """No question to a healthy node ends at its deadline, which is two seconds otherwise."""
    make_patient(ClusterLink)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Six nodes that a test may harm if it mends them."""
    folder = tmp_path_factory.mktemp("repair") / "c"
    with LocalCluster.start(
        folder, nodes=6, k=4, m=2, target_size_bytes=32 << 20, segment_size_bytes=1 << 20
    ) as cluster:
        yield cluster


@pytest.fixture
async def bench(cluster: LocalCluster) -> AsyncIterator[RepairBench]:
    """A worker context for each node; every target is emptied at the end."""
    async with RepairBench.open(cluster) as bench:
        yield bench
        await bench.forget_all()
