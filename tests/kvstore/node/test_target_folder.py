"""Whose a folder is: what is refused, with which words, and that nothing is touched then."""

import json
import re
from pathlib import Path

import pytest

from kvstore.errors import TargetDamaged, TargetError, TargetLocked, TargetMismatch
from kvstore.node.disk import OsDisk
from kvstore.node.segment import TargetIdentity
from kvstore.node.target import TargetSettings
from kvstore.node.target_folder import claim_folder
from kvstore.node.target_life import open_target
from tests.kvstore.node.driven_node import IDENTITY, DrivenNode, SetClock, open_test_target
from tests.kvstore.node.raw_client import Shard

OTHER_CLUSTER = TargetIdentity(bytes(16), "t01")
OTHER_TARGET = TargetIdentity(IDENTITY.cluster, "t02")


def claim(path: Path, identity: TargetIdentity = IDENTITY) -> None:
    claim_folder(path, identity, pid=4711, now_ns=1).release()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_new_folder_is_marked(tmp_path: Path) -> None:
    claim(tmp_path / "a" / "b")
    assert json.loads((tmp_path / "a" / "b" / "target.json").read_text()) == {
        "format": 2,
        "cluster": IDENTITY.cluster.hex(),
        "target": "t01",
        "created_ns": 1,
    }
    claim(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("identity", "what"), [(OTHER_CLUSTER, "cluster"), (OTHER_TARGET, "target")]
)
def test_folder_of_somebody_else_is_refused_and_left_alone(
    tmp_path: Path, identity: TargetIdentity, what: str
) -> None:
    claim(tmp_path)
    (tmp_path / "lock").unlink()
    before = contents(tmp_path)
    with pytest.raises(TargetMismatch, match=f"its {what} is .*, expected") as caught:
        claim(tmp_path, identity)
    assert caught.value.what == what
    assert contents(tmp_path) == before


def test_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    claim(tmp_path)
    path = tmp_path / "target.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(TargetMismatch, match="its format is 1, expected 2"):
        claim(tmp_path)


def test_folder_is_refused_when_somebody_holds_it(tmp_path: Path) -> None:
    held = claim_folder(tmp_path, IDENTITY, pid=4711, now_ns=1)
    with pytest.raises(TargetLocked, match="process 4711 serves it"):
        claim(tmp_path)
    held.release()
    claim(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 50_000])
def test_folder_is_refused_when_its_identity_is_unreadable(tmp_path: Path, content: str) -> None:
    (tmp_path / "target.json").write_text(content, encoding="latin-1")
    with pytest.raises(TargetDamaged, match=re.escape("target.json")):
        claim(tmp_path)


def test_folder_is_refused_when_it_has_segments_but_no_identity(tmp_path: Path) -> None:
    (tmp_path / "segment-000000.seg").write_bytes(b"x")
    with pytest.raises(TargetDamaged, match="1 segment"):
        claim(tmp_path)
    assert contents(tmp_path) == {"segment-000000.seg": b"x"}


def test_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TargetError, match="cannot be used"):
        claim(tmp_path / "file")
    with pytest.raises(TargetError, match="cannot be used"):
        claim(tmp_path / "file" / "below")


def make_segments(tmp_path: Path) -> list[Path]:
    driven = DrivenNode(tmp_path / "t", segment_bytes=8 << 10)
    for number in range(30):
        driven.write([Shard(bytes([number]) * 32, bytes(1000))])
    driven.close()
    paths = sorted((tmp_path / "t").glob("*.seg"))
    assert len(paths) > 3
    return paths


def test_all_segments_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    paths = make_segments(tmp_path)
    data = paths[0].read_bytes()
    paths[0].write_bytes(b"NOTASEGM" + data[8:])
    paths[1].write_bytes(data)
    # One that is only cut short is no reason to refuse, and is not mended for nothing.
    cut = paths[2].read_bytes()[:-1]
    paths[2].write_bytes(cut)
    with pytest.raises(TargetDamaged) as caught:
        open_test_target(tmp_path / "t", clock=SetClock())
    message = str(caught.value)
    assert "2 segment(s)" in message
    assert paths[2].read_bytes() == cut
    for path, problem in zip(paths, ["magic", "says it is segment 0"], strict=False):
        assert re.search(f"{path.name} [^;]*{problem}", message), message


@pytest.mark.parametrize("identity", [OTHER_CLUSTER, OTHER_TARGET])
def test_segment_of_another_target_is_refused(tmp_path: Path, identity: TargetIdentity) -> None:
    make_segments(tmp_path)
    mark = {"format": 2, "cluster": identity.cluster.hex(), "target": identity.name}
    (tmp_path / "t" / "target.json").write_text(json.dumps(mark))
    with pytest.raises(TargetDamaged, match=r"segment-000000\.seg its (cluster|target) is"):
        open_as(tmp_path / "t", identity)


def open_as(path: Path, identity: TargetIdentity) -> None:
    open_target(
        path,
        identity,
        capacity_bytes=1 << 20,
        settings=TargetSettings(),
        disk=OsDisk(),
        clock=SetClock(),
        pid=1,
    )


def test_refused_target_leaves_its_folder_unlocked(tmp_path: Path) -> None:
    paths = make_segments(tmp_path)
    whole = paths[0].read_bytes()
    paths[0].write_bytes(b"NOTASEGM" + whole[8:])
    with pytest.raises(TargetDamaged):
        open_test_target(tmp_path / "t", clock=SetClock())
    paths[0].write_bytes(whole)
    open_test_target(tmp_path / "t", clock=SetClock()).folder.release()
