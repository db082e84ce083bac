"""The commands to run a cluster with, against real nodes and the real `gc_worker` beside each."""

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockLayout, Namespace, Section, StoreClient, saving
from tests.kvstore.admin.command_line import (
    COMMAND,
    ROOT,
    Result,
    cachalot,
    cachalot_here,
    one_line,
)
from tests.kvstore.admin.conftest import end_all
from tests.kvstore.admin.test_status_command import flip_stored_bytes
from tests.patience import PATIENCE_S, wait_until

BLOCKS = 64
BLOCK_BYTES = 40_000
NODES = ("n01", "n02", "n03")


def namespace_of(tenant: str) -> Namespace:
    layout = BlockLayout(sections=(Section("kv", BLOCK_BYTES),))
    return Namespace(model="m", weights="w", tokenizer="t", layout=layout, tenant=tenant)


def save_blocks(path: Path, tenant: str, ttl_class: str, blocks: int = BLOCKS) -> list[bytes]:
    """Store a chain of blocks, however slowly nodes say which of them they have; their keys."""
    namespace = namespace_of(tenant)
    keys = namespace.block_keys(np.arange(blocks * 128, dtype=np.int32))
    data = [bytes([index % 251]) * BLOCK_BYTES for index in range(blocks)]
    with StoreClient.open(path) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "INQUIRY_DEADLINE_S", PATIENCE_S)
        result = store.save(namespace, keys, data, ttl_class=ttl_class)
        assert result.stored + result.known == blocks
    return keys


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes, code 2+1, with blocks of two classes and a worker beside each node."""
    folder = tmp_path_factory.mktemp("operated") / "cluster"
    try:
        with LocalCluster.start(
            folder, nodes=3, k=2, m=1, target_size_bytes=64 << 20, gc=True
        ) as running:
            save_blocks(running.cluster_path, "a", "chat")
            save_blocks(running.cluster_path, "b", "agent")
            yield running
    finally:
        end_all(folder)


def run(cluster: LocalCluster, *words: str | Path, code: int = 0) -> Result:
    return cachalot_here(*words, "--cluster", cluster.cluster_path, code=code)


def run_json(cluster: LocalCluster, *words: str | Path, code: int = 0) -> dict[str, Any]:
    found = json.loads(run(cluster, *words, "--json", code=code).stdout)
    assert isinstance(found, dict)
    return found


def count_blocks(cluster: LocalCluster) -> dict[str, int]:
    with StoreClient.open(cluster.cluster_path) as store:
        return {
            report.node: sum(target["blocks"] for target in report.statistics["targets"])
            for report in store.node_reports()
        }


def fill_of(cluster: LocalCluster) -> float:
    """Of the fullest target."""
    return max(float(node["fill_ratio"]) for node in run_json(cluster, "status")["nodes"])


# Policy -----------------------------------------------------------------------------------------


def test_ttl_is_changed_on_all_nodes_and_taken_back(cluster: LocalCluster) -> None:
    before = run_json(cluster, "ttl", "show")
    assert before["ttl_s"] == {"agent": 259_200, "chat": 604_800}
    done = run(cluster, "ttl", "set", "chat", "5d", "--why", "disks are small", "--who", "ada")
    after = run_json(cluster, "ttl", "show")
    assert done.stdout.startswith("TTL of chat: 7 d -> 5 d; policy version ")
    assert done.stdout.endswith(" on 3 nodes\n")
    assert (after["ttl_s"]["chat"], after["is_agreed"]) == (432_000, True)
    assert [node["version"] for node in after["nodes"]] == [before["version"] + 1] * 3
    entry = run_json(cluster, "policy", "log", "--last", "1")["log"][0]
    assert (entry["who"], entry["why"]) == ("ada", "disks are small")
    assert (entry["what"], entry["from"], entry["to"]) == ("ttl_s.chat", 604_800, 432_000)
    shown = run(cluster, "policy", "log").stdout
    assert "ada" in shown
    assert "TTL of chat: 7 d -> 5 d" in shown
    undone = run(cluster, "policy", "undo", "--why", "they are not").stdout
    assert undone.startswith("TTL of chat: 5 d -> 7 d")
    assert run_json(cluster, "ttl", "show")["ttl_s"] == before["ttl_s"]
    log = run(cluster, "policy", "log").stdout
    assert f"(undoes version {before['version'] + 1})" in log


def test_bytes_of_each_class_are_shown(cluster: LocalCluster) -> None:
    held = run_json(cluster, "ttl", "show")["classes"]
    assert set(held) == {"agent", "chat"}
    for figures in held.values():
        assert figures["shards"] == BLOCKS * len(NODES)
        assert figures["bytes"] >= BLOCKS * BLOCK_BYTES * 3 // 2
    lines = run(cluster, "ttl", "show").stdout.splitlines()
    assert lines[0].split() == ["class", "ttl", "shards", "bytes"]
    assert lines[1].split()[:4] == ["agent", "3", "d", str(BLOCKS * len(NODES))]
    assert run_json(cluster, "status")["classes"] == held
    assert "\nstored: agent " in run(cluster, "status").stdout


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("ttl", "set", "chat", "0s"), "from 1 to"),
        (("ttl", "set", "chat", "5"), "units: d, h, min, s"),
        (("ttl", "set", "cat", "5d"), "say that the class is new"),
        (("ttl", "set", "No!", "5d", "--new"), "1 to 16 of a-z"),
        (("watermark", "set", "--high", "0.8"), "0 < low < high < 1"),
        (("watermark", "set", "--high", "90"), "a share such as 0.9 or 90%"),
        (("watermark", "set"), "--high, --low or both"),
        (("settings", "set", "nothing", "1"), "one of evict_bytes_per_s"),
        (("settings", "set", "sync", "batch"), "which is cold"),
        (("settings", "set", "scan_interval_s", "0"), "from 1 to"),
        (("settings", "set", "scan_interval_s", "fast"), "a time such as"),
        (("settings", "set", "scrub_is_on", "1"), "on or off"),
        (("settings", "set", "evict_slots_per_s", "1GiB"), "a whole number"),
        (("drain", "n99"), "one of the map: n01, n02, n03"),
        (("drain", "n\udcff", "--wait-s", "0"), "one of the map: n01, n02, n03"),
        (("drain", "n99", "--undo"), "one of the map: n01, n02, n03"),
        (("gc", "run", "--node", "n99"), "one of the map: n01, n02, n03"),
        (("gc", "run", "--node", "n01", "--control", "h:1"), "one of them: a worker evicts from"),
        (("gc", "run", "--control", "a..b:80"), "HOST:PORT of an HTTP server"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["", "dry run"])
def test_nonsense_is_refused_with_the_rule_it_breaks(
    cluster: LocalCluster, words: tuple[str, ...], rule: str, more: tuple[str, ...]
) -> None:
    version = run_json(cluster, "ttl", "show")["version"]
    assert rule in one_line(run(cluster, *words, *more, code=2))
    assert run_json(cluster, "ttl", "show")["version"] == version


def test_dry_run_of_a_change_shows_what_would_go_and_changes_nothing(
    cluster: LocalCluster,
) -> None:
    blocks = count_blocks(cluster)
    version = run_json(cluster, "ttl", "show")["version"]
    high, low = round(fill_of(cluster) * 0.8, 4), round(fill_of(cluster) * 0.5, 4)
    marks = ("watermark", "set", "--high", f"{high:.4f}", "--low", f"{low:.4f}")
    found = run_json(cluster, *marks, "--dry-run")
    assert found["is_dry_run"]
    assert (found["from"], found["to"]) == ({"high": 0.9, "low": 0.85}, {"high": high, "low": low})
    assert found["would_go"]["shards"] > 0
    groups = found["would_go"]["groups"]
    assert sum(group["shards"] for group in groups) == found["would_go"]["shards"]
    assert {group["class"] for group in groups} == {"agent", "chat"}
    assert {group["reason"] for group in groups} == {"least_used"}
    shown = run(cluster, *marks, "--dry-run").stdout
    assert "(dry run: nothing was changed)" in shown
    assert "after this change" in shown
    assert count_blocks(cluster) == blocks
    assert run_json(cluster, "ttl", "show")["version"] == version


def test_new_class_is_made_only_when_that_is_meant(cluster: LocalCluster) -> None:
    run(cluster, "ttl", "set", "code", "2d", code=2)
    assert "TTL of code: (not listed) -> 2 d" in run(cluster, *NEW_CLASS).stdout
    assert run_json(cluster, "ttl", "show")["ttl_s"]["code"] == 172_800
    assert "TTL of code: 2 d -> (not listed)" in run(cluster, "policy", "undo").stdout


NEW_CLASS = ("ttl", "set", "code", "2d", "--new")


def test_settings_are_shown_with_their_limits_and_the_hot_ones_can_be_set(
    cluster: LocalCluster,
) -> None:
    rows = {row["name"]: row for row in run_json(cluster, "settings", "show")["settings"]}
    assert (rows["scan_interval_s"]["heat"], rows["scan_interval_s"]["current"]) == ("hot", 10)
    assert rows["sync"]["heat"] == "cold"
    assert rows["sync"]["current"] == ["interval"]
    assert rows["memory"]["current"] == [256 << 20]
    assert rows["segment-bytes"]["current"] == [256 << 20]
    done = run(cluster, "settings", "set", "repair_bytes_per_s", "32MiB/s", "--why", "busy")
    assert done.stdout.startswith("repair_bytes_per_s: (default) -> 32.0 MiB/s; policy version")
    run(cluster, "settings", "set", "scan_interval_s", "5s")
    run(cluster, "settings", "set", "scrub_is_on", "off")
    after = {row["name"]: row for row in run_json(cluster, "settings", "show")["settings"]}
    assert after["repair_bytes_per_s"]["current"] == 32 << 20
    assert (after["scan_interval_s"]["current"], after["scan_interval_s"]["is_set"]) == (5, True)
    assert after["scrub_is_on"]["current"] is False
    shown = run(cluster, "settings", "show").stdout
    for name in rows:
        assert f"\n{name} " in shown, name
    assert "32.0 MiB/s (set)" in shown


def test_change_works_through_any_worker_while_another_is_down(cluster: LocalCluster) -> None:
    cluster.workers.kill("n01", signal.SIGKILL)
    try:
        done = run(cluster, "ttl", "set", "chat", "6d")
        assert "on 3 nodes" in done.stdout, "its node still serves"
        said = run_json(cluster, "status")
        assert said["workers"].startswith("gc_worker: not running on n01")
        workers = {node["node"]: node["worker"] for node in said["nodes"]}
        assert workers == {"n01": "not running", "n02": "running", "n03": "running"}
        run(cluster, "policy", "undo")
    finally:
        cachalot("up", "--dir", cluster.folder)


def test_control_option_names_one_worker(cluster: LocalCluster) -> None:
    control = cluster.map.nodes[1].control
    assert control is not None
    done = run(cluster, "ttl", "set", "chat", "6d", "--dry-run", "--control", f"http://{control}")
    assert "TTL of chat: 7 d -> 6 d" in done.stdout
    line = one_line(run(cluster, "policy", "undo", "--control", "http://127.0.0.1:1", code=4))
    assert "no gc_worker answers: node 127.0.0.1:1" in line


def test_wrong_and_missing_tokens_are_told_apart(cluster: LocalCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("x" * 40)
    line = one_line(run(cluster, "policy", "undo", "--token-file", wrong, code=2))
    assert "others must not read it" in line
    wrong.chmod(0o600)
    line = one_line(run(cluster, "policy", "undo", "--token-file", wrong, code=2))
    assert "the control API refuses the token" in line
    line = one_line(run(cluster, "policy", "undo", "--token-file", tmp_path / "none", code=2))
    assert "No such file" in line
    for words in (("verify",), ("gc", "run"), ("inspect", "ab" * 32), ("drain", "n01")):
        line = one_line(run(cluster, *words, "--token-file", wrong, code=2))
        assert "the control API refuses the token" in line
    line = one_line(run(cluster, "status", "--token-file", tmp_path / "none", code=2))
    assert "No such file" in line
    said = run_json(cluster, "status", "--token-file", wrong)
    assert {node["worker"] for node in said["nodes"]} == {"no access"}
    assert said["nodes_alive"] == 3


# Blocks -----------------------------------------------------------------------------------------


def test_inspect_shows_every_shard_of_a_block(cluster: LocalCluster) -> None:
    keys = save_blocks(cluster.cluster_path, "a", "chat")
    found = run_json(cluster, "inspect", keys[5].hex())
    assert (found["shards"], found["is_readable"]) == (3, True)
    assert {row["node"] for row in found["targets"] if "version" in row} == set(NODES)
    assert found["header"]["ttl_class"] == "chat"
    shown = run(cluster, "inspect", keys[5].hex().upper()).stdout
    assert "3 of 3 shards; it can be read (2 of one version are needed)" in shown
    assert "class chat, block 5 of its chain, 40000 bytes" in shown


def test_inspect_refuses_what_is_no_key(cluster: LocalCluster) -> None:
    assert "64 hex digits" in one_line(run(cluster, "inspect", "12ab", code=2))


def test_inspect_of_an_unknown_key_ends_with_7(cluster: LocalCluster) -> None:
    shown = run(cluster, "inspect", "ab" * 32, code=7).stdout
    assert shown == "no node that answers has a shard of it\n"
    assert run_json(cluster, "inspect", "ab" * 32, code=7)["shards"] == 0


def test_verify_reads_blocks_of_every_node_and_finds_them_whole(cluster: LocalCluster) -> None:
    found = run_json(cluster, "verify", "--sample", "30")
    assert (found["asked"], found["verified"], found["whole"]) == (30, 30, 30)
    assert found["bytes"] >= 30 * BLOCK_BYTES
    assert found["shards"] == {"good": 90}
    assert "30 blocks verified" in run(cluster, "verify", "--sample", "30").stdout


def test_status_and_top_show_fill_redundancy_and_workers(cluster: LocalCluster) -> None:
    said = run_json(cluster, "status")
    assert said["workers"] == "gc_worker: running on all nodes"
    assert {node["worker"] for node in said["nodes"]} == {"running"}
    assert set(said["redundancy"]["by_shards"]) == {"3", "2"}
    assert all(0 < node["fill_ratio"] < 1 for node in said["nodes"])
    shown = run(cluster, "status", "--targets").stdout
    assert "redundancy: " in shown
    assert "n03-t0" in shown
    (line,) = run(cluster, "top", "--json", "--interval-s", "0.2").stdout.splitlines()
    frame = json.loads(line)
    assert [node["node"] for node in frame["nodes"]] == list(NODES)
    assert frame["total"]["read_bytes_per_s"] >= 0
    plain = run(cluster, "top", "--count", "2", "--interval-s", "0.2").stdout
    assert plain.count("\nall ") == 2
    assert "\x1b" not in plain


def test_top_shows_the_rates_of_what_is_read_meanwhile(cluster: LocalCluster) -> None:
    keys = save_blocks(cluster.cluster_path, "a", "chat")
    into = [bytearray(BLOCK_BYTES) for _ in keys]
    command = subprocess.Popen(
        [*COMMAND, "top", "--cluster", str(cluster.cluster_path), "--json", "--interval-s", "1.5"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with StoreClient.open(cluster.cluster_path) as store:
        while command.poll() is None:
            assert store.match(namespace_of("a"), keys) == BLOCKS
            assert store.fetch(namespace_of("a"), keys, into).blocks == BLOCKS
            time.sleep(0.05)
    stdout, _ = command.communicate(timeout=PATIENCE_S)
    total = json.loads(stdout)["total"]
    assert total["match_hit_ratio"] == 1.0
    assert total["shards_read_per_s"] > 0
    assert total["read_bytes_per_s"] > 0


def test_top_is_drawn_in_place_on_a_terminal_until_interrupted(cluster: LocalCluster) -> None:
    leader, follower = pty.openpty()
    command = subprocess.Popen(
        [*COMMAND, "top", "--cluster", str(cluster.cluster_path), "--interval-s", "0.2"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160", "LINES": "40", "TERM": "xterm"},
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(follower)
    try:
        shown = read_until(leader, b"n03")
        command.send_signal(signal.SIGINT)
        shown += read_until(leader, None)
        _, stderr = command.communicate(timeout=PATIENCE_S)
    finally:
        command.kill()
        os.close(leader)
    assert (command.returncode, stderr) == (0, "")
    assert b"\x1b[?1049h" in shown, "on a screen of its own"
    assert b"\x1b[?1049l" in shown, "which is given back"


def read_until(descriptor: int, wanted: bytes | None) -> bytes:
    """What a terminal shows until `wanted` is there, or (None) until its other end is closed."""
    shown, due_s = b"", time.monotonic() + PATIENCE_S
    while wanted is None or wanted not in shown:
        assert time.monotonic() < due_s, shown
        if not select.select([descriptor], [], [], 0.5)[0]:
            continue
        try:
            part = os.read(descriptor, 65536)
        except OSError:
            break  # how a terminal says that its other end is closed
        if not part:
            break
        shown += part
    return shown


def test_verify_names_a_damaged_shard_and_ends_with_7(cluster: LocalCluster) -> None:
    flip_stored_bytes(cluster, "n02")
    found = run_json(cluster, "verify", "--sample", "900", code=7)
    # The first worker that comes upon it tells the node, which takes it out of use.
    assert found["shards"]["damaged"] >= 1
    assert {problem["node"] for problem in found["problems"]} == {"n02"}
    assert found["good"] == found["verified"] > found["whole"]


# Eviction and drain; these come last, as they change what is stored -----------------------------


def test_drain_says_when_the_node_may_be_stopped_and_is_undone(cluster: LocalCluster) -> None:
    tried = run(cluster, "drain", "n02", "--dry-run")
    assert tried.stdout == "draining of n02: off -> on (dry run: nothing was changed)\n"
    done = run(cluster, "drain", "n02", "--why", "new disk", "--wait-s", "60")
    assert "draining of n02: off -> on" in done.stdout
    assert "n02 may be stopped" in done.stdout
    states = {node["node"]: node["is_draining"] for node in run_json(cluster, "status")["nodes"]}
    assert states == {"n01": False, "n02": True, "n03": False}
    again = run_json(cluster, "drain", "n02", "--wait-s", "60")
    assert (again["node"], again["is_safe_to_stop"]) == ("n02", True)
    unseen = run_json(cluster, "drain", "n02", "--wait-s", "0")
    assert (unseen["is_safe_to_stop"], unseen["report"]) == (None, None)
    assert "at most 1 draining in a code group" in one_line(run(cluster, "drain", "n03", code=2))
    assert "draining of n02: on -> off" in run(cluster, "drain", "n02", "--undo").stdout
    version = run_json(cluster, "policy", "log")["version"]
    assert run(cluster, "drain", "n02", "--undo").stdout.startswith("unchanged: ")
    assert run_json(cluster, "policy", "log")["version"] == version


def test_drain_that_could_not_be_watched_is_not_begun(cluster: LocalCluster) -> None:
    version = run_json(cluster, "ttl", "show")["version"]
    control = cluster.map.node_by_name["n01"].control
    assert control is not None
    line = one_line(run(cluster, "drain", "n02", "--control", control, code=2))
    assert f"{control}, which is of n01, expected the control API of n02" in line
    assert run_json(cluster, "ttl", "show")["version"] == version


def test_drain_that_is_not_done_in_time_ends_with_8(cluster: LocalCluster) -> None:
    # While another node is down, a block may have too few shards without the draining one.
    cluster.kill("n03", signal.SIGKILL)
    try:
        done = run(cluster, "drain", "n01", "--wait-s", "3", code=8)
        assert "n01 may not be stopped yet" in done.stdout
        assert run(cluster, "drain", "n01", "--undo").stderr.startswith("cachalot: node n03 does")
    finally:
        cluster.restart_node("n03")


def test_gc_run_says_by_class_and_age_what_goes_before_it_goes(cluster: LocalCluster) -> None:
    assert "nothing would go" in run(cluster, "gc", "run", "--dry-run").stdout
    blocks = count_blocks(cluster)
    fill = fill_of(cluster)
    # The high one still above: the worker itself has nothing to do, and the run has none either.
    run(cluster, "watermark", "set", "--high", f"{fill + 0.01:.3f}", "--low", f"{fill / 2:.3f}")
    assert run_json(cluster, "gc", "run")["evicted"] == {}
    assert count_blocks(cluster) == blocks
    run(cluster, "settings", "set", "scan_interval_s", "1h")
    run(cluster, "watermark", "set", "--high", f"{fill * 0.9:.3f}")
    done = run_json(cluster, "gc", "run")
    # A node that was started anew a moment ago is told of the withdrawals when it can be reached.
    wait_until(lambda: all(count_blocks(cluster)[node] < blocks[node] for node in NODES))
    assert done["unfinished"] == []
    assert done["failed"] == {}
    run(cluster, "policy", "undo")


def test_drain_of_a_node_that_is_down_changes_nothing(cluster: LocalCluster) -> None:
    # The last one of this cluster, which has a worker less from here on.
    cluster.workers.kill("n03", signal.SIGKILL)
    version = run_json(cluster, "policy", "log")["version"]
    line = one_line(run(cluster, "drain", "n03", code=4))
    assert line.startswith("cachalot: node n03: its gc_worker, which would do it, does not answer")
    assert "nothing was changed" in line
    assert run_json(cluster, "policy", "log")["version"] == version


def test_commands_without_a_worker_say_what_is_missing(running: Path) -> None:
    # A cluster as it was before there were workers: status, top and every `show` still answer.
    words = ("--cluster", running / "cluster.toml")
    said = json.loads(cachalot_here("status", *words, "--json", code=0).stdout)
    assert said["workers"] == ("gc_worker: no control address in the map, so they cannot be asked")
    assert said["web_page"] is None
    assert said["redundancy"]["nodes_counted"] == 0
    shown = cachalot_here("status", *words, code=0).stdout
    assert "redundancy: not counted yet" in shown
    top = cachalot_here("top", *words, "--interval-s", "0.2", code=0).stdout
    assert "gc_worker: no control address in the map" in top
    for group in (("ttl", "show"), ("watermark", "show"), ("settings", "show"), ("policy", "log")):
        assert "policy version 0 on all nodes" in cachalot_here(*group, *words, code=0).stdout
    tried = cachalot_here("ttl", "set", "chat", "5d", "--dry-run", *words, code=0)
    assert "TTL of chat: 7 d -> 5 d (dry run" in tried.stdout
    assert "what would go because of it is not known" in tried.stderr
    tried = cachalot_here("ttl", "set", "chat", "5d", "--dry-run", "--json", *words, code=0)
    assert json.loads(tried.stdout)["would_go"] is None
    assert "what would go because of it is not known: no gc_worker" in tried.stderr
    for change in (
        ("ttl", "set", "chat", "5d"),
        ("policy", "undo"),
        ("gc", "run", "--dry-run"),
        ("verify",),
        ("drain", "n01"),
        ("inspect", "ab" * 32),
    ):
        assert "no gc_worker answers" in one_line(cachalot_here(*change, *words, code=4))


def test_show_names_the_nodes_that_do_not_answer(running: Path) -> None:
    with LocalCluster.attach(running) as cluster:
        cluster.kill("n02")
        shown = cachalot_here("ttl", "show", "--cluster", cluster.cluster_path, code=0).stdout
        assert "policy version 0; no answer from n02" in shown
        cluster.kill("n01")
        line = one_line(cachalot_here("ttl", "show", "--cluster", cluster.cluster_path, code=4))
    assert "no answer from n01, n02" in line
