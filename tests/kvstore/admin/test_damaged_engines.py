"""A file of engines that is damaged hides none that runs; and which engines are missed by whom."""

import json
from pathlib import Path

import pytest

from kvstore.admin.down_report import describe_loss
from kvstore.admin.engine_plan import LocalEngine
from kvstore.admin.local_folder import LocalEngineOptions, LocalFolder
from kvstore.admin.node_process import ENGINE
from tests.kvstore.admin.command_line import cachalot, cachalot_here, is_running, one_line
from tests.kvstore.admin.test_local_engines import MODEL, SMALL, stand_ins

MAP = "cluster.toml"
P01, D01, D02, B01 = (
    LocalEngine("p01", "prefill"),
    LocalEngine("d01", "decode"),
    LocalEngine("d02", "decode"),
    LocalEngine("b01", "both"),
)


def test_damaged_file_of_engines_is_said_to_be_so_and_hides_none_that_runs(folder: Path) -> None:
    cachalot("up", "--dir", folder, *SMALL)
    place, where, by_map = LocalFolder(folder), ("--dir", folder), ("--cluster", folder / MAP)
    damaged = f"{place.engine_options_path}: damaged (it is not JSON); to have engines again: "
    with stand_ins(place, "b01") as running:
        place.of(ENGINE).log_path("b01").write_text("1\n")
        place.engine_options_path.write_text("garbage\n")
        for words in (
            ("up", *where),
            ("up", *where, "--engines", "1b", "--model", MODEL),
            ("down", *where, "--engine", "b01"),
        ):
            assert one_line(cachalot_here(*words, code=1)).startswith(f"cachalot: {damaged}")
        assert is_running(running["b01"].pid)
        status = cachalot_here("status", *by_map, "--json", code=6)
        assert json.loads(status.stdout)["engines_problem"].startswith(damaged)
        assert f"\nengines: {damaged}" in cachalot_here("status", *by_map, code=6).stdout
        # Names of nodes are known from the map.
        assert "no gc_worker" in one_line(cachalot_here("drain", "n01", *by_map, code=4))
        ended = cachalot_here("down", *where, code=0)
        assert f"b01: stopped (process {running['b01'].pid})" in ended.stdout
        assert damaged in ended.stderr
    cachalot_here("down", *where, "--wipe", code=0)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("running", "stopped", "said"),
    [
        ([P01, D01], ["d01"], "without d01 no engine decodes: answers get their first token and"),
        ([P01, D01], ["p01"], "without p01 no engine prefills: decode workers compute the prom"),
        ([P01, D01, D02], ["d01", "d02"], "without d01, d02 no engine decodes"),
        ([D01, D02, B01], ["b01"], "without b01 no engine prefills"),
        ([B01], ["b01"], "without b01 no engine runs: nobody is answered until one is back"),
        ([P01, D01, D02], ["d01"], ""),
        ([P01, D01, B01], ["p01", "d01"], ""),
        ([P01], ["d01"], ""),
        ([], ["d01"], ""),
    ],
)
def test_last_engine_of_a_kind_is_named_when_it_stops(
    running: list[LocalEngine], stopped: list[str], said: str
) -> None:
    found = describe_loss(running, stopped)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_down_warns_of_the_last_engine_that_decodes_also_in_a_dry_run(folder: Path) -> None:
    spaced = folder.with_name("with spaces")
    place = LocalFolder(spaced)
    with stand_ins(place, "p01", "d01"):
        place.write_engine_options(LocalEngineOptions(model="m", prefill=1, decode=1))
        words = ("down", "--dir", spaced, "--engine", "d01")
        warning = (
            "cachalot: without d01 no engine decodes: answers get their first token and wait until"
            " one is back\n"
        )
        tried = cachalot_here(*words, "--dry-run", code=0)
        assert tried.stderr == (
            f"{warning}cachalot: `cachalot up --dir '{spaced}'` would start d01 again\n"
        )
        assert cachalot_here(*words, code=0).stderr.startswith(warning)
