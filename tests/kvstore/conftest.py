"""A cluster of real nodes that tests share; tests which harm nodes start their own."""

from collections.abc import Iterator

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import saving
from tests.patience import PATIENCE_S


@pytest.fixture
def patient_inquiry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves by this process wait for nodes that are slow to say which blocks they have."""
    monkeypatch.setattr(saving, "INQUIRY_DEADLINE_S", PATIENCE_S)


@pytest.fixture(scope="session")
def cluster_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Map of twelve healthy nodes, code 10+2."""
    folder = tmp_path_factory.mktemp("shared-cluster")
    # Each of the tests' many layouts has slots of its own size, and so segments of its own.
    with LocalCluster.start(
        folder / "c",
        nodes=12,
        k=10,
        m=2,
        target_size_bytes=512 << 20,
        segment_size_bytes=8 << 20,
    ) as cluster:
        yield str(cluster.cluster_path)
