"""The units and examples in deploy/ fit each other, the documents and the programs."""

import re
from collections.abc import Sequence

import pytest

from gc_worker.arguments import parse_arguments
from tests.architecture.source_tree import ROOT

UNITS = ("kvstored@.service", "gc_worker@.service")
SYSTEMD = ROOT / "deploy" / "systemd"


def values_of(unit: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", (SYSTEMD / unit).read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["ReadWritePaths", "User", "StateDirectory", "LimitNOFILE"])
def test_node_and_worker_have_the_same_rights_to_the_targets(name: str) -> None:
    node, worker = (values_of(unit, name) for unit in UNITS)
    assert node == worker
    assert len(node) == 1


@pytest.mark.parametrize("unit", UNITS)
def test_unit_says_how_to_name_its_disks(unit: str) -> None:
    assert "RequiresMountsFor=" in (SYSTEMD / unit).read_text()
    assert f"{unit}.d/disks.conf" in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize("flags", [[], ["--control-remote"]])
def test_worker_takes_the_command_line_of_its_unit(flags: Sequence[str]) -> None:
    (line,) = values_of("gc_worker@.service", "ExecStart")
    words = [word for word in line.split()[1:] if word != "$CONTROL_FLAGS"]
    arguments = parse_arguments([*words, *flags])
    assert arguments.control == "map", "each node has its own address, and the map has it"
    assert arguments.is_control_remote == bool(flags)


def test_prometheus_scrapes_the_port_that_the_documents_name() -> None:
    example = (ROOT / "docs" / "formats" / "cluster-map.md").read_text()
    (port,) = re.findall(r'^control = "127.0.0.1:([0-9]+)"$', example, re.MULTILINE)
    scraped = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert set(re.findall(r'example:([0-9]+)"', scraped)) == {port}
    assert f"127.0.0.1:{port}" in (ROOT / "docs" / "operations.md").read_text()
