"""The entrypoints of a cluster map: optional, checked, and the same after writing and reading."""

from dataclasses import replace

import pytest

from kvstore.cluster.map import Entrypoint, parse_cluster_map, render_cluster_map
from tests.kvstore.cluster.test_map import EXAMPLE, problems_of

ENTRYPOINTS = """
[[entrypoints]]
name = "e0"
address = "127.0.0.1:7300"

[[entrypoints]]
name = "e1"
address = "[::1]:7300"
"""


def test_entrypoints_are_optional_and_come_back() -> None:
    without = parse_cluster_map(EXAMPLE.encode(), "x")
    assert without.entrypoints == ()
    assert "entrypoints" not in render_cluster_map(without)
    assert parse_cluster_map(f"entrypoints = []\n{EXAMPLE}".encode(), "x") == without
    cluster_map = parse_cluster_map((EXAMPLE + ENTRYPOINTS).encode(), "x")
    first, second = cluster_map.entrypoints
    assert first == Entrypoint(name="e0", address="127.0.0.1:7300")
    assert (second.host, second.port) == ("::1", 7300)
    assert cluster_map.entrypoint_by_name == {"e0": first, "e1": second}
    assert replace(cluster_map, entrypoints=()) == without
    assert parse_cluster_map(render_cluster_map(cluster_map).encode(), "x") == cluster_map


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"e0"', '"e 0"', "entrypoints[0] ('e 0'): name: given 'e 0', expected 1 to 32 of"),
        ('name = "e0"\n', "", "entrypoints[0] (nothing): name: given nothing, expected 1 to 32"),
        ('"e0"', '"e1"', "entrypoints: name e1 is given 2 times"),
        ('"e0"', '"e0"\nweight = 1', "entrypoints[0] ('e0'): weight: unknown key, expected one of"),
        ("127.0.0.1:7300", "127.0.0.1", "entrypoints[0] ('e0'): address: given '127.0.0.1', exp"),
        ("127.0.0.1:7300", "0.0.0.0:7300", "address: given '0.0.0.0:7300', expected"),
        ("127.0.0.1:7300", "[0::0]:7300", "which others can connect to"),
        ("127.0.0.1:7300", "239.1.1.1:7300", "which others can connect to"),
        ("127.0.0.1:7300", "[0:0::1]:7300", "entrypoints: address [::1]:7300 is given 2 times"),
        ("127.0.0.1:7300", "127.0.0.1:7100", "address 127.0.0.1:7100 is also an address of a node"),
        ("127.0.0.1:7300", "[0::1]:7200", "address [::1]:7200 is also an address of a node"),
    ],
)
def test_mistake_of_an_entrypoint_is_named(old: str, new: str, problem: str) -> None:
    nodes = EXAMPLE.replace('7100"', '7100"\ncontrol = "[::1]:7200"', 1)
    assert old in ENTRYPOINTS
    (found,) = problems_of(nodes + ENTRYPOINTS.replace(old, new, 1))
    assert problem in found


def test_entrypoints_that_are_no_tables_or_too_many_are_refused() -> None:
    (problem,) = problems_of(f'entrypoints = "none"\n{EXAMPLE}')
    assert problem == "entrypoints: given 'none', expected one or more [[entrypoints]] tables"
    rows = "".join(f'[[entrypoints]]\nname = "e{i}"\naddress = "e{i}:1"\n' for i in range(257))
    (problem,) = problems_of(f"{EXAMPLE}\n{rows}")
    assert problem == "entrypoints: given 257 tables, expected at most 256"
