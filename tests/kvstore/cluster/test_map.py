"""The cluster map's file: round trip, every mistake, hostile files, writing in one step."""

import os
import re
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.address import is_address
from kvstore.cluster.map import (
    MAP_BYTES_MAX,
    ClusterMap,
    CodeShape,
    Entrypoint,
    Group,
    Node,
    Target,
    load_cluster_map,
    parse_cluster_map,
    render_cluster_map,
    write_cluster_map,
)
from kvstore.cluster.validation import check_cluster_map
from kvstore.errors import ClusterMapError, InvalidClusterMap, MissingClusterMap
from tests.kvstore.cluster.fleets import planned_map

EXAMPLE = """\
format = 1
epoch = 3
cluster = "00112233445566778899aabbccddeeff"

[code]
k = 2
m = 1

[[nodes]]
name = "n0"
address = "127.0.0.1:7100"

[[nodes]]
name = "n1"
address = "[::1]:7101"

[[nodes]]
name = "n2"
address = "storage-2.example:7100"

[[targets]]
name = "t0"
node = "n0"
path = "n0/t0"
size_bytes = 1_000_000

[[targets]]
name = "t1"
node = "n1"
path = "/data/t1"
size_bytes = 2_000_000

[[targets]]
name = "t2"
node = "n2"
path = "n2/t2"
size_bytes = 4_000_000

[[targets]]
name = "t3"
node = "n2"
path = "n2/t3"
size_bytes = 4_000_000

[[groups]]
name = "g0"
targets = ["t0", "t1", "t2"]

[[groups]]
name = "g1"
targets = ["t0", "t1", "t3"]
weight = 2.5
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(InvalidClusterMap) as caught:
        parse_cluster_map(text.encode(), "cluster.toml")
    assert caught.value.path == Path("cluster.toml")
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


# --- reading


def test_map_is_read_with_its_defaults_and_look_ups(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(EXAMPLE)
    cluster_map = load_cluster_map(path)
    assert cluster_map.epoch == 3
    assert cluster_map.cluster_id == bytes.fromhex("00112233445566778899aabbccddeeff")
    assert cluster_map.code == CodeShape(k=2, m=1, write_acks=2)
    assert cluster_map.width == 3
    assert [(node.host, node.port) for node in cluster_map.nodes] == [
        ("127.0.0.1", 7100),
        ("::1", 7101),
        ("storage-2.example", 7100),
    ]
    assert cluster_map.node_of("t3") == cluster_map.node_by_name["n2"]
    assert [t.name for t in cluster_map.targets_by_node["n2"]] == ["t2", "t3"]
    assert cluster_map.target_number_by_name == {"t0": 0, "t1": 1, "t2": 2, "t3": 3}
    assert [cluster_map.weight_of(group) for group in cluster_map.groups] == [1_000_000, 2.5]
    assert cluster_map.target_by_name["t0"].folder(path) == tmp_path / "n0" / "t0"
    assert cluster_map.target_by_name["t1"].folder(path) == Path("/data/t1")
    with pytest.raises(KeyError):
        cluster_map.node_of("t4")


def test_target_folder_starts_at_the_map_when_the_map_path_is_relative() -> None:
    target = Target(name="t", node="n", path="disk/t", size_bytes=1)
    assert target.folder("some/cluster.toml") == Path.cwd() / "some" / "disk" / "t"


@pytest.mark.parametrize(
    ("k", "m", "write_acks"), [(10, 2, 11), (4, 2, 5), (1, 0, 1), (1, 1, 1), (16, 16, 31)]
)
def test_write_acks_are_all_but_one_when_none_are_given(k: int, m: int, write_acks: int) -> None:
    nodes = "".join(f'[[nodes]]\nname = "n{i}"\naddress = "h:{i + 1}"\n' for i in range(k + m))
    targets = "".join(
        f'[[targets]]\nname = "t{i}"\nnode = "n{i}"\npath = "t{i}"\nsize_bytes = 1\n'
        for i in range(k + m)
    )
    names = [f"t{i}" for i in range(k + m)]
    text = f'format = 1\nepoch = 1\ncluster = "{"0" * 32}"\n[code]\nk = {k}\nm = {m}\n'
    text += f'{nodes}{targets}[[groups]]\nname = "g"\ntargets = {names}\n'
    assert parse_cluster_map(text.encode(), "x").code.write_acks == write_acks


def test_missing_map_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(MissingClusterMap) as caught:
        load_cluster_map(tmp_path / "cluster.toml")
    assert isinstance(caught.value, FileNotFoundError)
    assert str(tmp_path / "cluster.toml") in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingClusterMap):
        load_cluster_map(tmp_path / "file" / "cluster.toml")


def test_example_of_the_format_page_is_a_map() -> None:
    page = (Path(__file__).parents[3] / "docs/formats/cluster-map.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert parse_cluster_map(example.encode(), "page").code == CodeShape(k=2, m=1, write_acks=2)


def test_control_address_is_optional_and_comes_back() -> None:
    without = parse_cluster_map(EXAMPLE.encode(), "x")
    assert [node.control for node in without.nodes] == [None] * 3
    assert "control" not in render_cluster_map(without)
    text = EXAMPLE.replace('7100"', '7100"\ncontrol = "[::1]:7200"', 1)
    cluster_map = parse_cluster_map(text.encode(), "x")
    assert [node.control for node in cluster_map.nodes] == ["[::1]:7200", None, None]
    assert parse_cluster_map(render_cluster_map(cluster_map).encode(), "x") == cluster_map


# --- every mistake has its message


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        # the top
        ("epoch = 3\n", "", "epoch: given nothing, expected a whole number from 1 to 4294967295"),
        ("epoch = 3", "epoch = 0", "epoch: given 0, expected"),
        ("epoch = 3", "epoch = true", "epoch: given True, expected"),
        ("epoch = 3", "epoch = 4294967296", "epoch: given 4294967296, expected"),
        ("epoch = 3", "epoch = 3.0", "epoch: given 3.0, expected"),
        ("epoch = 3", 'epoch = 3\nowner = "me"', "owner: unknown key, expected one of format, "),
        ("00112233445566778899aabbccddeeff", "0011", "cluster: given '0011', expected 32 hex"),
        ("aabbccddeeff", "AABBCCDDEEFF", "expected 32 hex digits, lower case"),
        # the code
        ("[code]\nk = 2\nm = 1\n", "", "code: given nothing, expected a [code] table"),
        ("k = 2", "k = 0", "code: k: given 0, expected a whole number from 1 to 32"),
        ("m = 1", "m = -1", "code: m: given -1, expected a whole number from 0 to 31"),
        ("k = 2\nm = 1", "k = 20\nm = 13", "code: k + m: given 20 + 13, expected at most 32"),
        ("m = 1", "m = 1\nwrite_acks = 1", "code: write_acks: given 1, expected a whole number fr"),
        ("m = 1", "m = 1\nwrite_acks = 4", "code: write_acks: given 4, expected a whole number fr"),
        ("m = 1", "m = 1\nacks = 3", "code: acks: unknown key, expected one of k, m, write_acks"),
        ("m = 1", "m = 2", "group g0: given 3 targets, expected k + m = 4"),
        # nodes
        ('name = "n0"\n', "", "nodes[0] (nothing): name: given nothing, expected 1 to 32 of"),
        ('name = "n0"', 'name = "a b"', "nodes[0] ('a b'): name: given 'a b', expected 1 to 32"),
        ('name = "n0"', f'name = "{"n" * 33}"', "expected 1 to 32 of A-Z a-z 0-9 . _ -"),
        ('name = "n0"', 'name = "n0"\nrack = 1', "nodes[0] ('n0'): rack: unknown key"),
        ('name = "n0"', 'name = "n1"', "nodes: name n1 is given 2 times"),
        ("127.0.0.1:7100", "127.0.0.1", "nodes[0] ('n0'): address: given '127.0.0.1', expected"),
        ("127.0.0.1:7100", "STORAGE-2.example:7100", "address storage-2.example:7100 is given 2 t"),
        ("127.0.0.1:7100", "[0:0::1]:7101", "nodes: address [::1]:7101 is given 2 times"),
        ('7100"', '7100"\ncontrol = 7', "nodes[0] ('n0'): control: given 7, expected \"host:port"),
        ('7100"', '7100"\ncontrol = "x"', "nodes[0] ('n0'): control: given 'x', expected"),
        ('7100"', '7100"\ncontrol = "[::1]:7101"', "nodes: address [::1]:7101 is given 2 times"),
        # targets
        ('node = "n0"', 'node = "n9"', "target t0: node n9 is not in the map"),
        ('name = "t0"', 'name = "t1"', "targets: name t1 is given 2 times"),
        ('"n0/t0"', '""', "targets[0] ('t0'): path: given '', expected a path"),
        ('"n0/t0"', r'"n0\nt0"', r"path: given 'n0\nt0', expected a path without control"),
        ('"n2/t3"', '"n2/./t2/"', "targets: node and path n2:n2/t2 is given 2 times"),
        ("1_000_000", "0", "targets[0] ('t0'): size_bytes: given 0, expected a whole number"),
        ("1_000_000", f"{2**60 + 1}", "size_bytes: given 1152921504606846977, expected a whole"),
        ("1_000_000", '"1 GiB"', "size_bytes: given '1 GiB', expected a whole number from 1"),
        # groups
        ('"t0", "t1", "t3"', '"t0", "t1"', "group g1: given 2 targets, expected k + m = 3"),
        ('"t0", "t1", "t3"', '"t0", "t1", "t8"', "group g1: target t8 is not in the map"),
        ('"t0", "t1", "t3"', '"t0", "t0", "t3"', "group g1: target t0 is given 2 times"),
        ('"t0", "t1", "t3"', '"t0", "t2", "t3"', "group g1: node (one target of each at most) n2"),
        ('"t0", "t1", "t3"', '"t0", "t1", "t2"', "target t3: is in no group"),
        ('["t0", "t1", "t3"]', '"t0"', "groups[1] ('g1'): targets: given 't0', expected a list"),
        ('["t0", "t1", "t3"]', '["t0", 1]', "groups[1] ('g1'): targets: given ['t0', 1], expect"),
        ('name = "g1"', 'name = "g0"', "groups: name g0 is given 2 times"),
        ("weight = 2.5", "weight = 0", "groups[1] ('g1'): weight: given 0, expected a number"),
        ("weight = 2.5", "weight = nan", "weight: given nan, expected a number above 0"),
        ("weight = 2.5", "weight = inf", "weight: given inf, expected a number above 0"),
        ("weight = 2.5", "weight = true", "weight: given True, expected a number above 0"),
        ("weight = 2.5", f"weight = {10**400}", "expected a number above 0, at most 2^60"),
    ],
)
def test_mistake_is_named(old: str, new: str, problem: str) -> None:
    assert old in EXAMPLE
    problems = problems_of(EXAMPLE.replace(old, new, 1))
    assert any(problem in found for found in problems), problems


@pytest.mark.parametrize("table", ["nodes", "targets", "groups"])
def test_map_without_a_table_is_refused(table: str) -> None:
    rest = re.sub(rf"\[\[{table}\]\]\n(.+\n)+\n?", "", EXAMPLE)
    assert f"{table}: given nothing, expected one or more [[{table}]] tables" in problems_of(rest)
    inline = f'{table} = "none"\n{rest}'
    assert any(p.startswith(f"{table}: given 'none'") for p in problems_of(inline))


def test_all_mistakes_are_named_at_once() -> None:
    text = (
        EXAMPLE.replace("epoch = 3", "epoch = -3")
        .replace("m = 1", "m = 40")
        .replace("127.0.0.1:7100", "nowhere")
        .replace("1_000_000", "1.5")
        .replace("weight = 2.5", 'weight = "heavy"')
        .replace('name = "n1"', 'name = "n1"\ncolour = "red"')
    )
    assert len(problems_of(text)) == 6


def test_one_mistake_does_not_cause_others() -> None:
    for old, new in [
        ("127.0.0.1:7100", "nowhere"),
        ("1_000_000", "0"),
        ("k = 2", "k = 0"),
        ("epoch = 3", "epoch = 0"),
        ("weight = 2.5", "weight = 0"),
    ]:
        assert len(problems_of(EXAMPLE.replace(old, new, 1))) == 1


@pytest.mark.parametrize("given", ["2", "0", "1.0", '"1"', "true"])
def test_another_format_is_refused_without_judging_the_rest(given: str) -> None:
    text = EXAMPLE.replace("format = 1", f"format = {given}").replace("epoch = 3", "epoch = -3")
    (problem,) = problems_of(text)
    assert problem.startswith("format: given ")
    assert problem.endswith(", expected 1")
    assert problems_of("") == ["format: given nothing, expected 1"]


def test_too_many_tables_are_refused() -> None:
    rows = [{"name": f"n{i}", "address": f"h{i}:1"} for i in range(4097)]
    cluster_map, problems = check_cluster_map({"format": 1, "nodes": rows})
    assert cluster_map is None
    assert "nodes: given 4097 tables, expected at most 4096" in problems


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:1", "h:65535", "a-b.c_d.example:80", "[::1]:7100", "[fe80::1%eth0]:7100"),
        *("[::ffff:10.0.0.1]:1", f"{'a' * 63}.example:1", "localhost:7100"),
    ],
)
def test_address_is_accepted(address: str) -> None:
    assert is_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *("", ":", ":80", "h", "h:", "h:0", "h:65536", "h:-1", "h:+1", "h: 80", "h:8 0", "h:٣"),
        *("::1:80", "[::1]", "[::1]80", "[127.0.0.1]:80", "[]:80", "[:]:80", "[::1%]:80"),
        *("1.2.3:80", "1.2.3.4.5:80", "256.1.1.1:80", "01.2.3.4:80", "a..b:80", ".a:80", "a.:80"),
        *("-a:80", "a-:80", "a/b:80", "user@h:80", "//h:80", f"{'a' * 64}:80", "h\n:80"),
        *(f"{'a.' * 127}aa:1", "[fe80::1%e th]:1", "münchen.example:80"),
    ],
)
def test_address_is_refused(address: str) -> None:
    assert not is_address(address)


# --- files that are no maps


def test_map_is_refused_when_it_is_no_toml() -> None:
    for content in (b"\xff\xfe", b"format = ", b"a = " + b"[" * 100_000, b"a = " + b"9" * 5000):
        with pytest.raises(InvalidClusterMap, match="not a TOML file in UTF-8"):
            parse_cluster_map(content, "x")


def test_map_is_refused_when_it_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(EXAMPLE + "#" * (MAP_BYTES_MAX - len(EXAMPLE)))
    assert load_cluster_map(path).epoch == 3
    with path.open("a") as file:
        file.write("#")
    with pytest.raises(InvalidClusterMap, match="file of 4194305 bytes, expected at most 4194304"):
        load_cluster_map(path)


def test_map_is_refused_when_it_is_no_regular_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path, fifo, tmp_path / "socket", Path("/dev/null")):
            with pytest.raises(InvalidClusterMap, match=r"not a regular file|cannot be opened"):
                load_cluster_map(path)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
row = st.fixed_dictionaries(
    {},
    optional={
        name: json_like | st.sampled_from(["n0", "t0", "h:1", 1, ["t0"]])
        for name in ("name", "address", "node", "path", "size_bytes", "targets", "weight")
    },
)


@given(
    st.fixed_dictionaries(
        {"format": st.just(1)},
        optional={
            "epoch": json_like,
            "cluster": json_like,
            "code": json_like | st.fixed_dictionaries({"k": json_like, "m": st.integers(0, 3)}),
            "nodes": json_like | st.lists(row, max_size=3),
            "targets": json_like | st.lists(row, max_size=3),
            "groups": json_like | st.lists(row, max_size=3),
            "entrypoints": json_like | st.lists(row, max_size=3),
        },
    )
)
def test_check_names_problems_and_never_fails_on_any_document(document: dict[str, object]) -> None:
    cluster_map, problems = check_cluster_map(document)
    assert (cluster_map is None) == bool(problems)


# --- writing


@st.composite
def cluster_maps(draw: st.DrawFn) -> ClusterMap:
    k = draw(st.integers(1, 4))
    m = draw(st.integers(0, 3))
    nodes = draw(st.integers(k + m, k + m + 3))
    names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", fullmatch=True)
    node_names = draw(st.lists(names, min_size=nodes, max_size=nodes, unique=True))
    target_names = draw(st.lists(names, min_size=nodes, max_size=nodes, unique=True))
    paths = st.text(min_size=1, max_size=40).filter(
        lambda text: not re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text)
    )
    sizes = st.integers(1, 2**60)
    weights = st.none() | st.floats(1e-18, 2.0**60)
    first = tuple(target_names[: k + m])
    rest = [(*first[1:], target) for target in target_names[k + m :]]
    return ClusterMap(
        cluster=draw(st.from_regex(r"[0-9a-f]{32}", fullmatch=True)),
        epoch=draw(st.integers(1, 2**32 - 1)),
        code=CodeShape(k=k, m=m, write_acks=draw(st.integers(k, k + m))),
        nodes=tuple(
            Node(name=name, address=draw(st.sampled_from(["[::1]", "h", "10.0.0.1"])) + f":{i + 1}")
            for i, name in enumerate(node_names)
        ),
        targets=tuple(
            Target(name=target, node=node, path=draw(paths), size_bytes=draw(sizes))
            for target, node in zip(target_names, node_names, strict=True)
        ),
        groups=tuple(
            Group(name=f"g{i}", targets=group, weight=draw(weights))
            for i, group in enumerate([first, *rest])
        ),
        entrypoints=tuple(
            Entrypoint(name=name, address=f"entry-{i}.example:{i + 1}")
            for i, name in enumerate(draw(st.lists(names, max_size=3, unique=True)))
        ),
    )


@given(cluster_maps())
def test_map_is_the_same_after_writing_and_reading(cluster_map: ClusterMap) -> None:
    text = render_cluster_map(cluster_map)
    assert parse_cluster_map(text.encode(), "x") == cluster_map
    assert render_cluster_map(parse_cluster_map(text.encode(), "x")) == text


def test_written_file_is_read_back_and_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster_map(planned_map(36), path)
    assert load_cluster_map(path) == planned_map(36)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["cluster.toml"]


def test_largest_planned_maps_fit_the_file_limit() -> None:
    assert len(render_cluster_map(planned_map(400, 2))) < MAP_BYTES_MAX / 8


def test_invalid_map_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write_cluster_map(planned_map(12), path)
    before = path.read_bytes()
    with pytest.raises(InvalidClusterMap, match="epoch: given 0"):
        write_cluster_map(replace(planned_map(12), epoch=0), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["cluster.toml"]


def test_old_map_stays_when_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_cluster_map(planned_map(12), path)
    assert sorted(os.listdir(tmp_path)) == ["cluster.toml"]


def test_map_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "cluster.toml"
    link.symlink_to(tmp_path / "real" / "cluster.toml")
    write_cluster_map(planned_map(12), link)
    assert link.is_symlink()
    assert load_cluster_map(tmp_path / "real" / "cluster.toml") == planned_map(12)


def test_errors_of_the_map_have_a_common_base() -> None:
    assert issubclass(InvalidClusterMap, ClusterMapError)
    assert issubclass(MissingClusterMap, ClusterMapError)
