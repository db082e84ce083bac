"""`cachalot engine`: its command line, what is wrong with it, and who serves a socket."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.worker import __main__ as command
from engine.worker.address import WorkerAddress
from engine.worker.listening import LOST_HOST_S, UNSENT_BYTES, listen
from engine.worker.options import parse_memory_bytes
from kvstore.socket_file import SocketFile
from tests.kvstore.admin.command_line import cachalot, one_line
from tests.kvstore.agent.agent_process import ROOT, short_folder


def run_here(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Exit code, and the only line on stderr, of a command line that loads no model."""
    monkeypatch.setattr(sys, "argv", ["engine.worker", *words])
    with pytest.raises(SystemExit) as caught:
        command.main()
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return caught.value.code, line


MODEL = ROOT / "models/v41-mini"
RIGHT = {"--role": "both", "--model": "none", "--listen": "127.0.0.1:0"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--role": "prefill"}, "--agent: given none, expected one, for the role prefill"),
        ({"--listen": "nowhere"}, "--listen: given 'nowhere', expected a path with a / in it"),
        ({"--listen": "a..b:1"}, "--listen: given 'a..b:1', expected a path with a / in it"),
        ({"--metrics": "foo"}, "--metrics: given 'foo', expected HOST:PORT"),
        ({"--metrics": "a/b:1"}, "--metrics: given 'a/b:1', expected HOST:PORT"),
        ({"--name": "a b"}, "--name: given 'a b', expected 1 to 32 letters"),
        ({"--device": "gpu"}, "--device: given 'gpu', expected cpu, cuda, or cuda: and a number"),
        ({"--pool-memory": "4GB"}, "--pool-memory: given '4GB', expected a size such as"),
        ({"--pool-memory": "1KiB"}, "--pool-memory: given 1024 bytes, expected 1MiB or more"),
        (
            {"--pool-memory": "1GiB", "--pool-blocks": "4"},
            "--pool-memory: given --pool-blocks too, expected one of them",
        ),
    ],
)
def test_wrong_option_is_named_in_one_line(
    change: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for pair in (RIGHT | change).items() for word in pair]
    code, line = run_here(words, monkeypatch, capsys)
    assert code == 2
    assert line.startswith(f"cachalot engine: {said}")


def test_check_of_the_options_names_a_folder_that_is_no_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, said in (
        (ROOT / "none", "1 problem(s): there is no such file or folder"),
        (ROOT / "docs", "2 problem(s): config.json: there is no such file; there is no .safetens"),
    ):
        changed = RIGHT | {"--model": str(folder)}
        words = ["--check-only", *(word for pair in changed.items() for word in pair)]
        code, line = run_here(words, monkeypatch, capsys)
        assert code == 2
        assert line.startswith(f"cachalot engine: model file {folder} has {said}")


def test_word_of_any_length_is_shown_in_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine.worker", "--role", "x" * 100_000])
    with pytest.raises(SystemExit) as caught:
        command.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "Error: Invalid value for '--role': " in said
    assert said.endswith("is not one of 'prefill', 'decode', 'both'.\n")
    assert len(said) < 1000


def test_cachalot_engine_shows_the_help_of_the_worker() -> None:
    shown = cachalot("engine", "--help").stdout
    assert shown.startswith("Usage: cachalot engine [OPTIONS]")
    assert "--role" in shown
    assert "Exit codes:" in shown


def test_model_that_is_not_there_is_named_in_one_line(tmp_path: Path) -> None:
    words = ("engine", "--role", "both", "--model", tmp_path / "none", "--listen", "127.0.0.1:0")
    line = one_line(cachalot(*words, code=2))
    assert line.startswith("cachalot engine: ")
    assert str(tmp_path / "none") in line


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which whoever loads the tensor library ends."""
    (tmp_path / "torch.py").write_text("raise SystemExit('the tensor library was loaded')\n")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def refused_at_once(environment: dict[str, str], **change: str | Path) -> tuple[int, str]:
    """Exit code, and the only line on stderr, of a worker of a model that is there."""
    words = {"role": "both", "model": MODEL, "listen": "127.0.0.1:0"} | change
    ended = subprocess.run(
        [sys.executable, "-m", "engine.worker"]
        + [str(word) for name, value in words.items() for word in (f"--{name}", value)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    (line,) = ended.stderr.splitlines()
    return ended.returncode, line


def test_socket_that_another_worker_serves_is_refused_before_anything_is_loaded(
    without_torch: dict[str, str],
) -> None:
    folder = short_folder()
    path = folder / "e.sock"
    with SocketFile(path, os.getpid(), option="--listen", noun="engine"):
        code, line = refused_at_once(without_torch, listen=path)
    shutil.rmtree(folder)
    assert code == 1
    assert f"socket {path}: another engine serves it (process {os.getpid()})" in line


def test_port_that_somebody_listens_on_is_refused_before_anything_is_loaded(
    without_torch: dict[str, str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for option, exit_code in (("listen", 2), ("metrics", 1)):
            code, line = refused_at_once(without_torch, **{option: address})
            assert code == exit_code
            assert line.startswith(f"cachalot engine: --{option}: ")
            assert f"{address}: Address already in use" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"agent": "/" + "a" * 120}, "--agent: given a path of 121 bytes"),
        ({"agent": "/dev/null"}, "--agent: given /dev/null, which is no socket, expected"),
        ({"model": "/none"}, "model file /none has 1 problem(s): there is no such file or folder"),
        ({"cost": "/none"}, "cost file /none: given No such file"),
    ],
)
def test_path_that_cannot_be_is_refused_before_anything_is_loaded(
    change: dict[str, str], said: str, without_torch: dict[str, str]
) -> None:
    code, line = refused_at_once(without_torch, **change)
    assert code == 2
    assert line.startswith(f"cachalot engine: {said}")


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1MiB", 1 << 20), ("4 GiB", 4 << 30), ("4096", 4096), ("7B", 7)]
)
def test_memory_is_read_as_bytes(text: str, size_bytes: int) -> None:
    assert parse_memory_bytes("--pool-memory", text) == size_bytes


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (None, "Address already in use"),
        # Of a network that is for documents only.
        (WorkerAddress(host="192.0.2.1", port=5), "Cannot assign requested address"),
        (WorkerAddress(host="a.invalid", port=5), ""),
    ],
)
def test_address_that_cannot_be_listened_on_is_named(
    address: WorkerAddress | None, reason: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = address or WorkerAddress(host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(InvalidRequest) as caught, listen(place):
            pass
    said = str(caught.value)
    assert said.startswith(f"--listen: given {place}: {reason}")
    assert said.endswith(", expected an address of this host, and a port that nobody listens on")
    assert "(" not in said


def test_connections_of_a_host_that_vanishes_come_to_an_end() -> None:
    with (
        listen(WorkerAddress(host="127.0.0.1", port=0)) as listening,
        socket.create_connection(listening.listener.getsockname()[:2]),
    ):
        listening.listener.setblocking(True)
        accepted, _ = listening.listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            wait_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert wait_ms == LOST_HOST_S * 1000


def test_system_takes_little_of_an_answer_that_is_not_read() -> None:
    with (
        listen(WorkerAddress(host="127.0.0.1", port=0)) as listening,
        socket.create_connection(listening.listener.getsockname()[:2]),
    ):
        listening.listener.setblocking(True)
        accepted, _ = listening.listener.accept()
        with accepted:
            kept_bytes = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            assert kept_bytes == UNSENT_BYTES
