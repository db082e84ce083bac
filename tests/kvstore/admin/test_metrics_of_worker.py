"""/metrics of real workers beside real nodes: all metrics have figures, a dead node is said."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.admin.control.metric_table import METRICS
from kvstore.admin.control_options import default_token_path
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingStoreClient
from kvstore.metrics.exposition import CONTENT_TYPE
from tests.kvstore.admin.control_host import request
from tests.kvstore.blocks import RandomBlocks

pytestmark = pytest.mark.slow

DEADLINE_S = 40.0
FIRST, SECOND = "n01", "n02"


@dataclass
class Workers:
    """The control APIs of the workers of a cluster."""

    cluster: LocalCluster
    token: str

    def port(self, node: str) -> int:
        control = self.cluster.map.node_by_name[node].control
        assert control is not None
        return int(control.rpartition(":")[2])

    def scrape(self, node: str = FIRST) -> dict[str, dict[str, float]]:
        """Value by labels (as text) by the family's name."""
        reply = request(self.port(node), "GET", "/metrics", token=self.token)
        assert (reply.status, reply.headers["content-type"]) == (200, CONTENT_TYPE)
        return {
            family.name: {str(sample.labels): sample.value for sample in family.samples}
            for family in text_string_to_metric_families(reply.content.decode())
        }

    def missing(self) -> set[str]:
        """Metrics without any sample of any worker."""
        found: set[str] = set()
        for node in (FIRST, SECOND):
            found |= {name for name, values in self.scrape(node).items() if values}
        return {metric.name.removesuffix("_total") for metric in METRICS} - found


@pytest.fixture
def workers(folder: Path) -> Iterator[Workers]:
    with LocalCluster.start(
        folder, nodes=2, k=1, m=1, target_size_bytes=8 << 20, gc=True
    ) as cluster:
        yield Workers(cluster, default_token_path(cluster.cluster_path).read_text().strip())


def test_every_metric_has_a_figure_once_a_cluster_has_been_used(workers: Workers) -> None:
    blocks = RandomBlocks(8, block_bytes=4096, seed=5)
    absent = RandomBlocks(2, block_bytes=4096, seed=6)
    client = BlockingStoreClient(workers.cluster.cluster_path)
    client.save(blocks.namespace, blocks.keys, blocks.sources)
    target = blocks.empty_target()
    assert client.fetch(blocks.namespace, blocks.keys, target.blocks).blocks == 8
    assert client.match(absent.namespace, absent.keys) == 0
    assert client.match(blocks.namespace, blocks.keys) == 8
    client.close()
    # Settings have a sample only where they were changed.
    due_s = time.monotonic() + DEADLINE_S
    while (missing := workers.missing()) != {"cachalot_setting"}:
        assert time.monotonic() < due_s, missing
        time.sleep(0.2)
    samples = workers.scrape()
    assert samples["cachalot_up"] == {str({"node": FIRST}): 1.0}
    of_target = {"class": "chat", "node": FIRST, "target": f"{FIRST}-t0"}
    assert samples["cachalot_class_blocks"][str(of_target)] == 8
    assert samples["cachalot_policy_version"] == {str({"node": FIRST}): 0.0}


def test_node_that_is_down_is_reported(workers: Workers) -> None:
    workers.scrape()
    workers.cluster.kill(FIRST)
    samples = workers.scrape()
    assert samples["cachalot_up"] == {str({"node": FIRST}): 0.0}
    assert samples["cachalot_blocks"] == {}
    assert samples["cachalot_watermark_ratio"]


def test_scrape_without_the_token_gets_nothing(workers: Workers) -> None:
    reply = request(workers.port(FIRST), "GET", "/metrics", token=None)
    assert reply.status == 401
    assert b"cachalot_" not in reply.content
