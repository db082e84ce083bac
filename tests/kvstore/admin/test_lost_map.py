"""A local cluster whose map was deleted: nothing is made worse, and the way back is named."""

import shutil
from pathlib import Path

from tests.kvstore.admin.command_line import cachalot, find_running, one_line

SMALL = ("--nodes", "2", "--code", "1+1", "--target-size", "8MiB")


def test_up_does_not_take_running_nodes_for_a_new_cluster_when_the_map_is_lost(
    running: Path,
) -> None:
    # It made another cluster's map once, and ended the nodes that served the old one.
    pids = find_running(running)
    kept = (running / "cluster.toml").read_bytes()
    (running / "cluster.toml").unlink()
    line = one_line(cachalot("up", "--dir", running, code=3))
    assert "cluster.toml is gone" in line
    assert "copy the map back" in line
    assert find_running(running) == pids
    assert not (running / "cluster.toml").exists()
    (running / "cluster.toml").write_bytes(kept)
    assert "0 nodes started, 2 were running" in cachalot("up", "--dir", running).stdout


def test_up_makes_a_new_cluster_when_what_the_lost_one_stored_is_given_up(running: Path) -> None:
    (running / "cluster.toml").unlink()
    cachalot("down", "--dir", running)
    cachalot("up", "--dir", running, *SMALL, code=3)
    shutil.rmtree(running / "nodes")
    assert "nodes started" in cachalot("up", "--dir", running, *SMALL).stdout


def test_status_says_where_a_lost_map_can_be_had(running: Path) -> None:
    (running / "cluster.toml").unlink()
    line = one_line(cachalot("status", "--cluster", running / "cluster.toml", code=3))
    assert "no cluster map at" in line
    assert "copied back from any client" in line


def test_down_says_what_stays_and_how_to_remove_it(running: Path) -> None:
    done = cachalot("down", "--dir", running)
    assert f"`cachalot down --dir {running} --wipe` removes it" in one_remark(done.stderr)
    wiped = cachalot("down", "--dir", running, "--wipe")
    assert wiped.stderr == ""


def one_remark(stderr: str) -> str:
    (line,) = stderr.splitlines()
    return line
