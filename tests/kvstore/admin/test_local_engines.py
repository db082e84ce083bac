"""Engine workers beside nodes and agents: who starts them, how they are, and who ends them."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient, find_places
from kvstore.admin.exit_codes import ExitCode
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_engines import LocalEngines
from kvstore.admin.local_folder import LocalEngineOptions, LocalFolder, NodeRecord
from kvstore.admin.node_process import ENGINE
from tests.kvstore.admin.command_line import (
    ROOT,
    cachalot,
    cachalot_here,
    cachalot_json,
    find_running,
    is_running,
    one_line,
)
from tests.kvstore.admin.conftest import end_all

MODEL = ROOT / "models" / "v41-mini"
SMALL = ("--nodes", "1", "--code", "1+0", "--target-size", "8MiB", "--no-gc")
SMALL_AGENTS = ("--arena", "16MiB", "--window-memory", "4MiB")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder with a path that is short enough for sockets."""
    place = Path(tempfile.mkdtemp(dir="/tmp", prefix="ce-"))
    yield place / "c"
    end_all(place)
    shutil.rmtree(place)


async def first_tokens(folder: Path, prompt_ids: Sequence[int] = (5, 6, 7)) -> list[int]:
    client = EngineClient(find_places(str(folder / "engines")))
    parts = client.generate(prompt_ids, max_tokens=3)
    return [token async for part in parts for token in part.token_ids]


def engines_in_status(folder: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
    words = ("status", "--cluster", str(folder / "cluster.toml"), "--json", *words)
    said = json.loads(cachalot_here(*words, code=code).stdout)
    engines: list[dict[str, Any]] = said["engines"]
    counts = len(engines), sum(engine["is_alive"] for engine in engines)
    assert (said["engines_total"], said["engines_alive"]) == counts
    return engines


@pytest.mark.timeout(240)
def test_up_starts_engines_and_an_agent_and_down_ends_them(folder: Path) -> None:
    said = cachalot_json(
        *("up", "--dir", folder, *SMALL, *SMALL_AGENTS, "--engines", "1b", "--model", MODEL),
        *("--engine-option", "pool-blocks=40"),
    )
    (agent,), (engine,) = said["agents"], said["engines"]
    assert list(engine) == [
        *("engine", "role", "model", "options", "socket", "pid", "is_started", "log_path")
    ]
    assert engine["options"] == {"pool-blocks": "40"}
    assert (engine["engine"], engine["role"], engine["model"]) == ("b01", "both", str(MODEL))
    assert engine["socket"] == str(folder / "engines" / "b01.sock")
    assert len(asyncio.run(first_tokens(folder))) == 3

    (seen,) = engines_in_status(folder)
    assert (
        seen.items()
        >= {
            **{"engine": "b01", "state": "running", "pid": engine["pid"], "role": "both"},
            **{"socket": engine["socket"], "problem": "", "requests": 0, "waiting": 0},
            **{"failed_blocks": 0, "dropped_blocks": 0, "dropped_windows": 0, "store_errors": 0},
        }.items()
    )
    assert seen["free_blocks"] <= seen["pool_blocks"] == 40
    assert (seen["model"], len(seen["namespace"])) == ("v41-mini", 32)
    assert (seen["transfer_errors"], seen["blocks_move"]["mover"]) == (0, "memcpy")
    assert seen["document"]["engine"]["counts"]["requests"] == 1
    LocalEngines(LocalFolder(folder)).kill("b01", signal.SIGSTOP)
    (silent,) = engines_in_status(folder, "--wait-s", "0.5", code=ExitCode.NODES_DOWN)
    assert (silent["state"], silent["pid"]) == ("silent", engine["pid"])
    assert "no answer within 0.5 s" in silent["problem"]
    LocalEngines(LocalFolder(folder)).kill("b01")
    (down,) = engines_in_status(folder, code=ExitCode.NODES_DOWN)
    assert (down["state"], down["pid"], down["requests"]) == ("down", None, None)
    words = ("status", "--cluster", folder / "cluster.toml")
    assert "\n0 of 1 engine alive\n" in cachalot_here(*words, code=ExitCode.NODES_DOWN).stdout
    (again,) = cachalot_json("up", "--dir", folder, "--no-gc")["engines"]
    assert again["is_started"]
    assert again["pid"] != engine["pid"]
    assert again["options"] == {"pool-blocks": "40"}
    shown = cachalot("up", "--dir", folder, "--no-gc").stdout
    assert [line.split()[:4] for line in shown.splitlines() if line.startswith("b01")] == [
        ["b01", "was", "running", str(again["pid"])]
    ]

    line = one_line(cachalot_here("down", "--dir", folder, "--engine", "b02", code=2))
    assert line == "cachalot: --engine: given 'b02', expected one of the cluster: b01"
    status = cachalot_here("status", "--cluster", folder / "cluster.toml", code=0).stdout
    assert "\n1 of 1 engine alive\n" in status
    rows = [line.split() for line in status.splitlines()]
    assert [[*row[:4], row[-1]] for row in rows if row[:1] == ["b01"]] == [
        ["b01", "running", str(again["pid"]), "both", engine["socket"]]
    ]
    tried = cachalot("down", "--dir", folder, "--engine", "b01", "--dry-run")
    assert tried.stdout == f"b01: would be stopped (process {again['pid']})\n"
    removed = cachalot("down", "--dir", folder, "--engine", "b01", "--remove")
    assert removed.stdout.startswith(f"b01: stopped (process {again['pid']})\n2 files removed")
    assert engines_in_status(folder) == []
    assert is_running(agent["pid"])

    plan = cachalot_json("down", "--dir", folder, "--wipe", "--dry-run")
    done = cachalot_json("down", "--dir", folder, "--wipe")
    assert (done["removed_paths"], done["kept_paths"]) == (plan["removed_paths"], [])
    assert find_running(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.timeout(180)
def test_blocks_that_full_nodes_do_not_take_are_named_by_all_who_know(folder: Path) -> None:
    full = ("--nodes", "1", "--code", "1+0", "--target-size", "256KiB", "--no-gc")
    engine = ("--engines", "1b", "--model", MODEL)
    cachalot_json("up", "--dir", folder, *full, *SMALL_AGENTS, *engine)
    due_s = time.monotonic() + 40
    prompt, failed = 0, 0
    while not failed:
        assert time.monotonic() < due_s, "nothing is refused"
        prompt += 1
        asyncio.run(first_tokens(folder, [prompt] * 600))
        failed = engines_in_status(folder)[0]["failed_blocks"]
    status = cachalot("status", "--cluster", folder / "cluster.toml").stdout
    assert re.search(
        r"^n01: \d+ shards? not stored since it started, for want of room$", status, re.M
    )
    for who in ("agent a01", "engine b01"):
        line = rf"^{who}: \d+ blocks? not saved since it started: \d+ failed, 0 dropped$"
        assert re.search(line, status, re.M), status


@pytest.mark.timeout(180)
def test_engine_that_does_not_start_leaves_nodes_and_no_engine(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    words = ("up", "--dir", folder, *SMALL, *SMALL_AGENTS, "--engines", "1b", "--model", tmp_path)
    result = cachalot(*words, code=2)
    assert "engine b01: ended with exit code 2 before it was ready" in result.stderr
    assert "config.json" in result.stderr
    rest = f"the nodes and agents run; `cachalot down --dir {folder}` stops them"
    assert f"cachalot: {rest}\n" in result.stderr
    # The next start does not try it again.
    assert LocalEngines(LocalFolder(folder)).wanted == []
    assert cachalot_json("up", "--dir", folder, "--no-gc")["engines"] == []
    said = cachalot_json("down", "--dir", folder)
    assert [one["outcome"] for one in said["nodes"]] == ["stopped"]
    assert said["engines"] == []
    assert LocalFolder(folder).of(ENGINE).log_path("b01").exists()
    wiped = cachalot_json("down", "--dir", folder, "--wipe")
    assert wiped["kept_paths"] == []
    assert list(folder.iterdir()) == []


def test_engines_whose_model_is_gone_are_named_and_the_rest_is_started(
    folder: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    folder.mkdir()
    LocalFolder(folder).write_engine_options(LocalEngineOptions(model=str(gone), both=1))
    result = cachalot("up", "--dir", folder, *SMALL)
    said = f"cachalot: the engines are not started: --model: given {gone}, which is not there"
    assert said in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["b01", "down", "-", "both", str(folder / "engines" / "b01.sock")] in rows
    assert [row[:2] for row in rows if row[:1] == ["n01"]] == [["n01", "started"]]


def test_removed_engine_is_off_the_list_with_all_its_files(folder: Path) -> None:
    place = LocalFolder(folder)
    engines = place.of(ENGINE)
    ours, lock = engines.log_path("d02"), engines.socket_path("d02").with_suffix(".sock.lock")
    ours.parent.mkdir(parents=True)
    for path in (ours, lock, engines.socket_path("d02").with_name("d01.sock.lock")):
        path.write_text("1\n")
    place.write_engine_options(LocalEngineOptions(model="m", prefill=1, decode=2))
    words = ("down", "--dir", folder, "--engine", "d02", "--remove")
    tried = cachalot_json(*words, "--dry-run")
    assert [one.name for one in LocalEngines(place).wanted] == ["p01", "d01", "d02"]
    done = cachalot_json(*words)
    for said in (tried, done):
        assert said["removed_paths"] == [str(lock), str(ours)]
        assert said["engines"] == [{"engine": "d02", "pid": None, "outcome": "not running"}]
        assert said["other_engines"] == ["p01", "d01"]
    assert (tried["is_dry_run"], done["is_dry_run"]) == (True, False)
    assert [one.name for one in LocalEngines(place).wanted] == ["p01", "d01"]
    assert sorted(path.name for path in folder.rglob("*")) == [
        *("d01.sock.lock", "engines", "engines.json")
    ]
    line = one_line(cachalot_here(*words, code=2))
    assert line == "cachalot: --engine: given 'd02', expected one of the cluster: p01, d01"
    shown = cachalot("down", "--dir", folder, "--engine", "p01", "--remove")
    assert shown.stdout == "p01: not running\n0 files removed, 0 B\n"
    assert shown.stderr == "cachalot: the cluster has d01; `up --engines` adds one\n"


SLOW_DRAIN = """
import signal, time

def drain(*_):
    time.sleep(1)
    raise SystemExit

signal.signal(signal.SIGTERM, drain)
print("ready", flush=True)
while True:
    signal.pause()
"""


@contextmanager
def stand_ins(place: LocalFolder, *names: str) -> Iterator[Mapping[str, subprocess.Popen[bytes]]]:
    """Run processes that are taken for these engines of a folder, and drain for a second."""
    engines = place.of(ENGINE)
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in names:
            engines.node_path(name).mkdir(parents=True)
            path = str(engines.socket_path(name))
            command = [sys.executable, "-c", SLOW_DRAIN, "-m", ENGINE.module, "--name", name]
            process = subprocess.Popen([*command, "--listen", path], stdout=subprocess.PIPE)
            running[name] = process
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            engines.write_record(NodeRecord(node=name, address=path, pid=process.pid))
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_engine_that_drains_is_not_killed_by_the_deadline_of_others(folder: Path) -> None:
    place = LocalFolder(folder)
    with stand_ins(place, "b01") as running:
        place.write_engine_options(LocalEngineOptions(model="m", both=1))
        said = cachalot_json("down", "--dir", folder, "--engine", "b01", "--wait-s", "0.1")
        pid = running["b01"].pid
        assert said["engines"] == [{"engine": "b01", "pid": pid, "outcome": "stopped"}]
    assert running["b01"].returncode == 0


def test_several_engines_are_stopped_at_once_and_none_of_them_if_one_is_none(folder: Path) -> None:
    place = LocalFolder(folder)
    words = ("down", "--dir", folder, "--engine", "d01", "--engine", "d03", "--engine", "d01")
    with stand_ins(place, "d01", "d02", "d03") as running:
        place.write_engine_options(LocalEngineOptions(model="m", decode=4))
        line = one_line(cachalot_here(*words, "--engine", "d05", code=2))
        assert line == (
            "cachalot: --engine: given 'd05', expected one of the cluster: d01, d02, d03, d04"
        )
        tried = cachalot_json(*words, "--dry-run")["engines"]
        assert [(one["engine"], one["outcome"]) for one in tried] == [
            ("d01", "would be stopped"),
            ("d03", "would be stopped"),
        ]
        assert all(is_running(process.pid) for process in running.values())
        done = cachalot_json(*words)["engines"]
        assert [(one["engine"], one["outcome"]) for one in done] == [
            ("d01", "stopped"),
            ("d03", "stopped"),
        ]
        assert [is_running(process.pid) for process in running.values()] == [False, True, False]
        rest = cachalot("down", "--dir", folder, "--engine", "d02", "--engine", "d04")
        pid = running["d02"].pid
    assert rest.stdout == f"d02: stopped (process {pid})\nd04: not running\n"
    assert rest.stderr == (
        "cachalot: without d02 no engine runs: nobody is answered until one is back\n"
        f"cachalot: `cachalot up --dir {folder}` starts d02, d04 again\n"
    )


def test_several_engines_are_removed_at_once(folder: Path) -> None:
    place = LocalFolder(folder)
    logs = [str(place.of(ENGINE).log_path(name)) for name in ("d02", "d03")]
    words = ("down", "--dir", folder, "--engine", "d02", "--engine", "d03", "--remove")
    with stand_ins(place, "d01", "d02", "d03") as running:
        for log in logs:
            Path(log).write_text("1\n")
        place.write_engine_options(LocalEngineOptions(model="m", decode=3))
        line = one_line(cachalot_here(*words, "--engine", "d04", code=2))
        assert line.endswith("given 'd04', expected one of the cluster: d01, d02, d03")
        tried = cachalot_json(*words, "--dry-run")
        assert [one.name for one in LocalEngines(place).wanted] == ["d01", "d02", "d03"]
        assert all(is_running(process.pid) for process in running.values())
        done = cachalot_json(*words)
        assert [is_running(process.pid) for process in running.values()] == [True, False, False]
    for said, outcome in ((tried, "would be stopped"), (done, "stopped")):
        found = [(one["engine"], one["outcome"]) for one in said["engines"]]
        assert found == [("d02", outcome), ("d03", outcome)]
        assert (said["removed_paths"], said["other_engines"]) == (logs, ["d01"])
    assert [one.name for one in LocalEngines(place).wanted] == ["d01"]


def test_wrong_option_is_told_as_such_also_while_an_engine_runs(folder: Path) -> None:
    place = LocalFolder(folder)
    words = ("up", "--dir", folder, "--engine-option")
    with stand_ins(place, "b01"):
        place.write_engine_options(LocalEngineOptions(model=str(MODEL), both=1))
        wrong = one_line(cachalot_here(*words, "pool-blocks=0", code=2))
        other = one_line(cachalot_here(*words, "pool-blocks=8", code=2))
    assert "which says: Invalid value for '--pool-blocks': " in wrong
    assert "given --pool-blocks=8, while b01 runs none, expected the same" in other


def test_removal_of_no_engine_is_refused(folder: Path) -> None:
    line = one_line(cachalot_here("down", "--dir", folder, "--remove", code=2))
    assert line == "cachalot: --remove: given without --engine, expected the engine to remove"


def test_foreground_that_cannot_start_its_engines_leaves_nothing_behind(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    words = ("--foreground", *SMALL, *SMALL_AGENTS, "--engines", "1b", "--model", tmp_path)
    cachalot("up", "--dir", folder, *words, code=2)
    assert find_running(folder) == []


@pytest.mark.parametrize("words", [("drain", "d01"), ("drain", "d01", "--dry-run"), ("down",)])
def test_engine_in_place_of_a_node_is_told_how_to_stop_it(
    folder: Path, words: tuple[str, ...]
) -> None:
    place = LocalFolder(folder)
    with LocalCluster.start(folder, nodes=1, k=1, m=0, target_size_bytes=64 << 20) as cluster:
        place.write_engine_options(LocalEngineOptions(model="m", prefill=1, decode=1))
        by_folder = ("--dir", folder, "--node", "d01")
        by_map = ("--cluster", cluster.cluster_path)
        place_words = by_folder if words == ("down",) else by_map
        line = one_line(cachalot_here(*words, *place_words, code=2))
        named = cachalot_here("down", "--dir", folder, "--node", "n01", code=0)
    assert line == (
        "cachalot: node: given d01, which is an engine, expected a node; `cachalot down --dir"
        f" {folder} --engine d01` drains and stops an engine"
    )
    assert named.stdout.startswith("n01: stopped")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engines", "1b"), "--model: given nothing, expected a GGUF file"),
        (("--engines", "1b", "--model", "none"), "none, which is not there, expected a GGUF"),
        (
            ("--engines", "1b", "--model", ROOT / "docs"),
            "docs, config.json: there is no such file; there is no .safetensors file, expected",
        ),
        (("--engines", "2"), "--engines: given '2', expected such as 1p1d"),
        (("--model", MODEL), "--engines: given nothing, expected such as 1p1d"),
        (
            ("--engines", "1b", "--model", MODEL, "--engine-option", "pool-blocks=0"),
            "--engine-option: given --pool-blocks=0, expected options of `cachalot engine`, which"
            " says: Invalid value for '--pool-blocks': ",
        ),
        (
            ("--engines", "1b", "--model", MODEL, "--engine-option", "pool-memory=1KB"),
            "which says: --pool-memory: given '1KB', expected a size such as 512MiB or 4GiB",
        ),
        (
            ("--engines", "1b", "--model", MODEL, "--engine-option", "blocks=1"),
            "which says: No such option: --blocks",
        ),
        (
            ("--engines", "1b", "--model", MODEL, "--engine-option", "metrics=foo"),
            "which says: --metrics: given 'foo', expected HOST:PORT",
        ),
    ],
)
def test_wrong_wish_for_engines_starts_nothing(
    folder: Path, words: tuple[str, ...], said: str
) -> None:
    line = one_line(cachalot_here("up", "--dir", folder, *SMALL, *words, code=2))
    assert said in line
    assert not folder.exists()


def test_engines_without_an_agent_are_refused(folder: Path) -> None:
    words = ("up", "--dir", folder, *SMALL, "--agents", "0", "--engines", "1b", "--model", MODEL)
    line = one_line(cachalot_here(*words, code=2))
    assert line == "cachalot: agents: given 0, expected 1 or more: the engines need one"
    assert not folder.exists()
