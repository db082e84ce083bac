"""`cachalot bench` measures what it says and leaves nothing behind."""

import json
import re
from pathlib import Path

import pytest

from kvstore.client import StoreClient
from tests.kvstore.admin.command_line import cachalot, one_line

FIGURES = {
    "memcpy",
    "raw_socket_fetch",
    "save",
    "fetch",
    "fetch_latency",
    "match",
    "fetch_one_slow_node",
    "fetch_large",
}


@pytest.mark.timeout(120)
def test_bench_reports_every_figure_with_its_machine_and_removes_its_blocks(
    cluster_path: str,
) -> None:
    def count_shards() -> int:
        with StoreClient.open(cluster_path) as store:
            reports = store.node_reports()
        return sum(one["blocks"] for node in reports for one in node.statistics["targets"])

    before = count_shards()
    done = cachalot(
        "bench", "--cluster", cluster_path, "--blocks", "70", "--rounds", "2",
        "--block-bytes", "12345", "--large-blocks", "140", "--json",
    )  # fmt: skip
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["benchmark"] for one in figures} == FIGURES
    assert [one["blocks"] for one in figures if one["benchmark"] == "fetch_latency"] == [1, 8, 64]
    for one in figures:
        assert one["value"] > 0
        assert one["unit"] in ("GB/s", "ms")
        assert one["parameters"]["code"] == "10+2"
        assert one["machine"]["cores"] >= 1
    assert count_shards() == before


def test_bench_says_what_is_missing_in_one_line() -> None:
    done = cachalot("bench", "--cluster", "nowhere.toml", code=3)
    assert "nowhere.toml" in one_line(done)


def test_bench_names_the_nodes_that_are_down(running: Path) -> None:
    cachalot("down", "--dir", running)
    done = cachalot("bench", "--cluster", running / "cluster.toml", code=4)
    assert "no answer from n01, n02; " in one_line(done)


def test_bench_says_in_words_when_the_nodes_have_no_room(running: Path) -> None:
    words = ("--cluster", running / "cluster.toml", "--blocks", "400", "--rounds", "1")
    done = cachalot("bench", *words, code=1)
    assert "SaveResult" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert re.search(
        r"save: of 400 blocks \d+ were stored, 0 were there already and \d+ were not", line
    )
    assert "`cachalot status` shows which are full or down" in line
