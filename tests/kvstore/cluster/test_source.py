"""Where a process gets its map from, and what it accepts as a newer one."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.cluster.map import ClusterMap, CodeShape, Node, write_cluster_map
from kvstore.cluster.source import FileMapSource, MapSource
from kvstore.errors import InvalidClusterMap, MissingClusterMap
from tests.kvstore.cluster.fleets import planned_map


def moved(cluster_map: ClusterMap, *, epoch: int) -> ClusterMap:
    """The same cluster after its first node got another address."""
    first = Node(name=cluster_map.nodes[0].name, address="elsewhere.example:7200")
    return replace(cluster_map, epoch=epoch, nodes=(first, *cluster_map.nodes[1:]))


def test_map_is_unchanged_after_load_and_changed_after_a_write(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    old = planned_map(12)
    write_cluster_map(old, path)
    source: MapSource = FileMapSource(path)
    assert source.has_changed()
    assert source.load() == old
    assert not source.has_changed()
    new = moved(old, epoch=2)
    write_cluster_map(new, path)
    assert source.has_changed()
    assert source.load() == new
    assert not source.has_changed()


def test_map_that_is_gone_counts_as_changed_and_load_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster_map(planned_map(12), path)
    source = FileMapSource(path)
    source.load()
    path.unlink()
    assert source.has_changed()
    with pytest.raises(MissingClusterMap):
        source.load()


def test_map_written_again_unchanged_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster_map(planned_map(12), path)
    source = FileMapSource(path)
    source.load()
    write_cluster_map(planned_map(12), path)
    assert source.load() == planned_map(12)


@pytest.mark.parametrize("epoch", [4, 5])
def test_changed_map_is_refused_when_its_epoch_did_not_grow(tmp_path: Path, epoch: int) -> None:
    path = tmp_path / "cluster.toml"
    old = replace(planned_map(12), epoch=5)
    write_cluster_map(old, path)
    source = FileMapSource(path)
    source.load()
    write_cluster_map(moved(old, epoch=epoch), path)
    with pytest.raises(InvalidClusterMap, match=f"epoch: given {epoch}, expected more than 5"):
        source.load()
    assert source.has_changed()


def test_map_of_another_cluster_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster_map(planned_map(12), path)
    source = FileMapSource(path)
    source.load()
    write_cluster_map(replace(planned_map(12), cluster="f" * 32, epoch=9), path)
    with pytest.raises(InvalidClusterMap, match="cluster: given ffff"):
        source.load()


@pytest.mark.parametrize(("k", "m"), [(9, 3), (11, 1), (12, 0)])
def test_map_of_another_code_is_refused_however_new_it_is(tmp_path: Path, k: int, m: int) -> None:
    path = tmp_path / "cluster.toml"
    old = planned_map(12)
    write_cluster_map(old, path)
    source = FileMapSource(path)
    source.load()
    write_cluster_map(replace(old, epoch=2, code=CodeShape(k=k, m=m, write_acks=k)), path)
    with pytest.raises(InvalidClusterMap, match=rf"code: given {k}\+{m}, expected 10\+2 as before"):
        source.load()
    write_cluster_map(replace(old, epoch=2, code=replace(old.code, write_acks=12)), path)
    assert source.load().code.write_acks == 12
