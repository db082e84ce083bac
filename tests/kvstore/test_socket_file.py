"""The socket at its path: one agent, one user, nothing of anybody else's replaced."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument, StoreError
from kvstore.socket_file import SocketFile, remove_stale_socket
from tests.kvstore.agent.agent_process import ROOT, short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    path = short_folder()
    yield path
    shutil.rmtree(path)


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))


def test_socket_has_mode_0600_whatever_the_umask_is(folder: Path) -> None:
    before = os.umask(0)
    try:
        with SocketFile(folder / "a.sock", 7):
            assert stat.S_IMODE(os.stat(folder / "a.sock").st_mode) == 0o600
            assert stat.S_IMODE(os.stat(folder / "a.sock.lock").st_mode) == 0o600
            connect(folder / "a.sock")
        assert os.umask(0) == 0, "and the umask is as it was"
    finally:
        os.umask(before)


def test_socket_is_removed_at_the_end(folder: Path) -> None:
    found = SocketFile(folder / "a.sock", 7)
    found.close()
    found.close()
    assert not (folder / "a.sock").exists()


def test_second_agent_is_refused_and_told_the_process(folder: Path) -> None:
    with SocketFile(folder / "a.sock", 4711):
        with pytest.raises(StoreError, match=r"another agent serves it \(process 4711\)"):
            SocketFile(folder / "a.sock", 4712)
        connect(folder / "a.sock")
    with SocketFile(folder / "a.sock", 4712):
        connect(folder / "a.sock")


@pytest.mark.parametrize("before", [5, 4711, 1234567])
def test_lock_names_a_process_at_every_moment(
    folder: Path, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "a.sock"
    lock = folder / "a.sock.lock"
    lock.write_text(f"{before}\n")
    seen: list[str] = []

    def watched(call: Callable[..., int | None]) -> Callable[..., int | None]:
        def run(*words: object) -> int | None:
            done = call(*words)
            with pytest.raises(StoreError) as refused:
                SocketFile(path, 1)
            seen.append(str(refused.value))
            return done

        return run

    for name in ("pwrite", "ftruncate"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    with SocketFile(path, 4712):
        assert lock.read_text() == "4712\n"
    assert seen
    assert set(seen) == {f"socket {path}: another agent serves it (process 4712)"}


def test_socket_of_a_killed_agent_is_replaced(folder: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path;"
        "from kvstore.socket_file import SocketFile;"
        "held = SocketFile(Path(sys.argv[1]), os.getpid()); os.kill(os.getpid(), 9)"
    )
    path = folder / "a.sock"
    ended = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=False)
    assert ended.returncode == -9
    assert path.exists()
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    with SocketFile(path, 7):
        connect(path)


def test_socket_that_another_program_serves_is_left_alone(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(os.fspath(folder / "a.sock"))
        theirs.listen()
        with pytest.raises(StoreError, match="another program serves it"):
            SocketFile(folder / "a.sock", 7)
        connect(folder / "a.sock")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(folder: Path, kind: str) -> None:
    path = folder / "a.sock"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(folder / "elsewhere")
    with pytest.raises(InvalidArgument, match="is no socket"):
        SocketFile(path, 7)
    assert os.path.lexists(path)


def test_lock_that_is_a_link_is_not_followed(folder: Path) -> None:
    (folder / "victim").write_text("mine")
    (folder / "a.sock.lock").symlink_to(folder / "victim")
    with pytest.raises(StoreError):
        SocketFile(folder / "a.sock", 7)
    assert (folder / "victim").read_text() == "mine"


def test_path_that_is_too_long_is_refused_with_its_length(folder: Path) -> None:
    path = folder / ("x" * (108 - len(os.fsencode(folder)) - 1))
    assert len(os.fsencode(path)) == 108
    with pytest.raises(InvalidArgument, match="a path of 108 bytes"):
        SocketFile(path, 7)
    fitting = Path(os.fspath(path)[:-1])
    with SocketFile(fitting, 7):
        connect(fitting)


def test_folder_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SocketFile(folder / "none" / "a.sock", 7)
    assert f"but folder {folder / 'none'} is not there" in str(caught.value)
    assert ".lock" not in str(caught.value)
    (folder / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is no folder"):
        SocketFile(folder / "file" / "a.sock", 7)


OF_NOBODY = """
import os, sys
from pathlib import Path
from kvstore.socket_file import SocketFile
from kvstore.errors import InvalidArgument
os.setuid(65534)
try:
    SocketFile(Path(sys.argv[1]), 7)
except InvalidArgument as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_folder_and_lock_of_another_user_are_named(folder: Path) -> None:
    def try_it(name: str) -> str:
        words = [sys.executable, "-c", OF_NOBODY, str(folder / name / "a.sock")]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return ended.stdout

    folder.chmod(0o755)
    (folder / "root").mkdir(mode=0o755)
    assert f"but cannot write in folder {folder / 'root'}: Permission denied" in try_it("root")
    (folder / "all").mkdir()
    (folder / "all").chmod(0o777)
    (folder / "all" / "a.sock.lock").touch(mode=0o600)
    assert "but a.sock.lock beside it is another user's" in try_it("all")
    (folder / "all" / "a.sock.lock").unlink()
    assert try_it("all") == ""


def test_lock_of_a_start_that_failed_goes_if_it_made_it(folder: Path) -> None:
    path, lock = folder / "a.sock", folder / "a.sock.lock"
    path.write_text("mine")
    with pytest.raises(InvalidArgument):
        SocketFile(path, 7)
    assert not lock.exists()
    lock.touch()
    with pytest.raises(InvalidArgument):
        SocketFile(path, 7)
    assert lock.exists()
    path.unlink()
    lock.unlink()
    with SocketFile(path, 7):
        pass
    assert not lock.exists(), "it never served"


def test_lock_of_an_agent_that_served_stays(folder: Path) -> None:
    with SocketFile(folder / "a.sock", 7) as held:
        held.keep_lock()
    assert (folder / "a.sock.lock").exists()


def test_socket_of_somebody_else_is_not_removed_at_the_end(folder: Path) -> None:
    path = folder / "a.sock"
    ours = SocketFile(path, 7)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(os.fspath(path))
        ours.close()
        assert path.exists()


def test_lock_holds_although_somebody_removed_and_made_the_file_anew(folder: Path) -> None:
    path = folder / "a.sock"
    with SocketFile(path, 7):
        os.unlink(folder / "a.sock.lock")
        # The new lock is free, but the socket is served.
        with pytest.raises(StoreError, match="serves it"):
            SocketFile(path, 8)
        connect(path)


def leave_socket(path: Path) -> None:
    """As a server does that is killed."""
    with SocketFile(path, 7) as held:
        held.keep_lock()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(path))


def test_socket_that_was_left_is_removed(folder: Path) -> None:
    leave_socket(folder / "a.sock")
    remove_stale_socket(folder / "a.sock")
    assert not (folder / "a.sock").exists()
    remove_stale_socket(folder / "a.sock")
    remove_stale_socket(folder / "none.sock")


def test_socket_that_is_served_again_stays_when_stale_ones_are_removed(folder: Path) -> None:
    leave_socket(folder / "a.sock")
    with SocketFile(folder / "a.sock", 8):
        remove_stale_socket(folder / "a.sock")
        assert (folder / "a.sock").is_socket()
        connect(folder / "a.sock")


def test_what_is_no_socket_stays_when_stale_ones_are_removed(folder: Path) -> None:
    path = folder / "a.sock"
    leave_socket(path)
    path.unlink()
    path.write_text("mine")
    remove_stale_socket(path)
    assert path.read_text() == "mine"
