"""The token file: made once, for its owner only, and refused when others may read it."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.admin.new_token import make_token_file
from kvstore.errors import InvalidArgument
from kvstore.token_file import TOKEN_PATTERN, read_token_file


def test_token_file_is_made_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "control-token"
    make_token_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert TOKEN_PATTERN.fullmatch(read_token_file(path))
    assert os.listdir(tmp_path) == ["control-token"]


def test_token_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "control-token"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make_token_file, [path] * 32))
    first = read_token_file(path)
    make_token_file(path)
    assert read_token_file(path) == first
    assert os.listdir(tmp_path) == ["control-token"]


def test_two_tokens_are_not_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_token_file(tmp_path / name)
    assert read_token_file(tmp_path / "a") != read_token_file(tmp_path / "b")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666])
def test_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "control-token"
    make_token_file(path)
    path.chmod(mode)
    with pytest.raises(InvalidArgument, match=f"mode {mode:04o}.*chmod 600"):
        read_token_file(path)


@pytest.mark.parametrize("content", [b"", b"short", b"a" * 129, b"a" * 31 + b" b", b"\xff" * 40])
def test_file_without_a_token_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "control-token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidArgument) as caught:
        read_token_file(path)
    assert not content or content.decode(errors="replace") not in str(caught.value)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(InvalidArgument, match="token file"):
            read_token_file(path)
