"""What commands answer to changes that change nothing, to mistakes, and through a tunnel."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.local_cluster import LocalCluster
from tests.kvstore.admin.command_line import Result, cachalot_here, one_line
from tests.kvstore.admin.test_control_client import free_address
from tests.kvstore.admin.test_operating_commands import save_blocks


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes with a worker beside each."""
    folder = tmp_path_factory.mktemp("answers") / "cluster"
    with LocalCluster.start(folder, nodes=3, k=2, m=1, target_size_bytes=8 << 20, gc=True) as it:
        yield it


def run(cluster: LocalCluster, *words: str | Path, code: int = 0) -> Result:
    return cachalot_here(*words, "--cluster", cluster.cluster_path, code=code)


def run_json(cluster: LocalCluster, *words: str | Path) -> dict[str, Any]:
    found = json.loads(run(cluster, *words, "--json").stdout)
    assert isinstance(found, dict)
    return found


def test_change_to_what_is_so_already_is_done_and_changes_nothing(cluster: LocalCluster) -> None:
    run(cluster, "ttl", "set", "agent", "4d")
    run(cluster, "settings", "set", "scrub_bytes_per_s", "4MiB")
    version = run_json(cluster, "policy", "log")["version"]
    for change in (
        ("ttl", "set", "agent", "4d"),
        ("settings", "set", "scrub_bytes_per_s", "4MiB"),
        ("settings", "set", "hot_within_s", "1d"),
    ):
        line = f"unchanged: it is so already; policy version {version}\n"
        assert run(cluster, *change).stdout == line
        assert run(cluster, *change, "--dry-run").stdout.startswith("unchanged: ")
        assert run_json(cluster, *change)["is_changed"] is False
    back = run(cluster, "settings", "set", "scrub_bytes_per_s", "default")
    assert back.stdout.startswith("scrub_bytes_per_s: 4.0 MiB/s -> (default); ")
    rows = {row["name"]: row for row in run_json(cluster, "settings", "show")["settings"]}
    assert rows["scrub_bytes_per_s"]["is_set"] is False
    assert rows["scrub_bytes_per_s"]["current"] == 8 << 20


def test_refusals_say_what_was_given_and_how_to_go_on(cluster: LocalCluster) -> None:
    line = one_line(run(cluster, "ttl", "set", "agnt", "4d", code=2))
    assert "given 'agnt'" in line
    assert "`--new`" in line
    line = one_line(run(cluster, "settings", "set", "scrub_bytes_per_s", "1B", code=2))
    assert "given '1B'" in line
    assert "KiB to 1 TiB)" in line


def test_drain_that_an_undo_brings_back_is_told_before(cluster: LocalCluster) -> None:
    run(cluster, "drain", "n02", "--wait-s", "0")
    run(cluster, "drain", "n02", "--undo")
    version = run_json(cluster, "policy", "log")["version"]
    tried = run(cluster, "policy", "undo", "--dry-run")
    assert tried.stdout == "draining of n02: off -> on (dry run: nothing was changed)\n"
    undone = run(cluster, "policy", "undo")
    assert undone.stderr == (
        f"cachalot: takes version {version} back: n02 drains again, and takes no writes until"
        " `cachalot drain n02 --undo`\n"
    )
    assert undone.stdout.startswith("draining of n02: off -> on; ")
    run(cluster, "drain", "n02", "--undo")


def test_status_says_in_one_line_that_the_named_control_api_does_not_answer(
    cluster: LocalCluster,
) -> None:
    address = free_address()
    shown = run(cluster, "status", "--control", address, code=4).stdout
    (line,) = (line for line in shown.splitlines() if address in line)
    assert line == (
        f"gc_worker: not asked, as the control API at {address} (--control) does not answer:"
        " Connection refused"
    )
    said = json.loads(run(cluster, "status", "--control", address, "--json", code=4).stdout)
    assert (said["web_page"], said["nodes"][0]["worker"]) == (None, "not asked")


def test_one_worker_speaks_for_all_where_only_it_can_be_reached(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    control = cluster.map.node_by_name["n02"].control
    assert control is not None
    # The map of somebody on the other side of a tunnel, who reaches no worker by itself.
    text = cluster.cluster_path.read_text()
    for node in cluster.map.nodes:
        text = text.replace(f'control = "{node.control}"', "")
    far = tmp_path / "cluster.toml"
    far.write_text(text)
    token = cluster.cluster_path.parent / "control-token"
    words = ("--cluster", far, "--control", control, "--token-file", token)
    due_s = time.monotonic() + 30.0
    while True:
        said = json.loads(cachalot_here("status", *words, "--json", code=0).stdout)
        if said["workers"] == "gc_worker: running on all nodes":
            break
        assert time.monotonic() < due_s, said["workers"]
    assert [node["worker"] for node in said["nodes"]] == ["running"] * 3
    assert said["web_page"]["url"] == f"http://{control}/"
    top = cachalot_here("top", *words, "--interval-s", "1", code=0).stdout
    assert "gc_worker: running on all nodes" in top


# Last, as it ends a worker ----------------------------------------------------------------------


def test_share_of_a_worker_that_is_down_is_verified_by_others(cluster: LocalCluster) -> None:
    save_blocks(cluster.cluster_path, "a", "chat", blocks=8)
    cluster.workers.kill("n01", signal.SIGKILL)
    # The first of the map has the first share.
    done = run(cluster, "verify", "--sample", "1", code=7)
    assert "1 block verified" in done.stdout
    assert "not complete: 1 worker did not answer" in done.stdout
    assert done.stderr.startswith("cachalot: node n01: control API at ")
    for node in ("n02", "n03"):
        cluster.workers.kill(node, signal.SIGKILL)
    line = one_line(run(cluster, "verify", "--sample", "1", code=4))
    assert line.startswith("cachalot: no gc_worker answers: node n01: ")
