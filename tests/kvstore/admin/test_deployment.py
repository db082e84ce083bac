"""The units and examples in deploy/ fit each other, the documents and the programs."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gc_worker.arguments import parse_arguments
from kvstore.admin.local_agents import STOP_DEADLINES as LOCAL_STOP
from tests.architecture.source_tree import ROOT
from tests.kvstore.admin.command_line import cachalot, one_line

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


def test_agent_takes_the_command_line_of_its_unit(tmp_path: Path) -> None:
    (line,) = values_of("cachalot-agent.service", "ExecStart")
    words = line.split()
    assert words[:2] == ["/usr/local/lib/cachalot/bin/cachalot", "agent"]
    (flags,) = re.findall(r"AGENT_FLAGS=(--.*)\"", (SYSTEMD / "cachalot-agent.service").read_text())
    given = [*words[1:-1], *flags.split()]
    # All options are right, so it comes as far as the map, which is not there. This machine may be
    # smaller than one for which those sizes are meant.
    small = ("--arena", "16MiB", "--window-memory", "16MiB")
    result = cachalot(*given, *small, "--cluster", tmp_path / "cluster.toml", code=3)
    assert "no cluster map" in one_line(result)
    assert "cachalot-agent.service.d/host.conf" in (SYSTEMD / "cachalot-agent.service").read_text()


def test_stop_of_the_agent_reaches_its_main_process_alone_and_lets_saves_end() -> None:
    assert values_of("cachalot-agent.service", "KillMode") == ["mixed"]
    (stop_s,) = values_of("cachalot-agent.service", "TimeoutStopSec")
    assert int(stop_s) > LOCAL_STOP.term_s


def test_agent_outlives_a_worker_without_memory_and_its_folder_outlives_the_agent() -> None:
    # A worker that was killed is started again by the agent; containers mount the socket's folder.
    assert values_of("cachalot-agent.service", "OOMPolicy") == ["continue"]
    assert values_of("cachalot-agent.service", "RuntimeDirectoryPreserve") == ["yes"]


def test_prometheus_scrapes_the_port_that_the_documents_name() -> None:
    example = (ROOT / "docs" / "formats" / "cluster-map.md").read_text()
    (port,) = re.findall(r'^control = "127.0.0.1:([0-9]+)"$', example, re.MULTILINE)
    scraped = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert set(re.findall(r'storage.example:([0-9]+)"', scraped)) == {port}
    assert f"127.0.0.1:{port}" in (ROOT / "docs" / "operations.md").read_text()
