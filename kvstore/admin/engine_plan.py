"""Which engine workers a local cluster is to have: pure decisions, nothing is started."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from ..errors import InvalidArgument
from .local_folder import LocalEngineOptions, LocalFolder

ENGINES_MAX = 32
"""Processes with a model each on one machine; more than that belongs on more machines."""
SPEC_EXPECTED = "such as 1p1d (1 prefill, 1 decode worker), 2p2d, or 1b (1 worker that does both)"


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine worker of the folder. Its name begins with the letter of its role."""

    name: str
    role: str
    """As `cachalot engine --role` takes it."""


def parse_engines(text: str) -> LocalEngineOptions:
    """How many engines of each role, from "1p1d". Raises InvalidArgument."""
    found = re.fullmatch(r"(?:([0-9]{1,2})p([0-9]{1,2})d)?(?:([0-9]{1,2})b)?", text.strip())
    prefill, decode, both = (int(digits or 0) for digits in found.groups()) if found else (0, 0, 0)
    is_whole = bool(prefill) == bool(decode) and prefill + decode + both > 0
    if not is_whole or prefill + decode + both > ENGINES_MAX:
        expected = f"{SPEC_EXPECTED}; at most {ENGINES_MAX} workers"
        raise InvalidArgument("--engines", given=repr(text)[:80], expected=expected)
    return LocalEngineOptions(prefill=prefill, decode=decode, both=both)


def name_engines(options: LocalEngineOptions) -> list[LocalEngine]:
    """p01, p02, then d01 and so on."""
    roles = (("prefill", options.prefill), ("decode", options.decode), ("both", options.both))
    return [
        LocalEngine(f"{role[0]}{number:02}", role)
        for role, count in roles
        for number in range(1, count + 1)
    ]


def check_is_no_engine(folder: LocalFolder, node: str, nodes: Container[str]) -> None:
    """Raises InvalidArgument for an engine of the folder where the name of a node belongs."""
    names = [engine.name for engine in name_engines(folder.read_engine_options())]
    if node in names and node not in nodes:
        raise InvalidArgument(
            "node",
            given=f"{node}, which is an engine",
            expected=f"a node; `cachalot down --dir {folder.path} --engine {node}` drains and stops"
            " an engine",
        )


def choose_engines(
    known: LocalEngineOptions,
    counts: LocalEngineOptions | None,
    model: str | None,
    *,
    running: Sequence[str],
) -> LocalEngineOptions:
    """What a folder is to have that has `known` and of it `running`, after what was asked for now.

    More engines can be added and none taken away, as with agents; another model is for engines that
    are down. Raises InvalidArgument.
    """
    wanted = known if counts is None else replace(counts, model=known.model)
    known_names = {engine.name for engine in name_engines(known)}
    lost = sorted(known_names - {engine.name for engine in name_engines(wanted)})
    if lost:
        raise InvalidArgument(
            "--engines",
            given=f"fewer than the cluster has ({', '.join(lost)} would be gone)",
            expected="as many or more of each role; `cachalot down --engine NAME` stops one",
        )
    if model is not None and model != known.model and running:
        verb = "runs" if len(running) == 1 else "run"
        raise InvalidArgument(
            "--model",
            given=f"{model}, while {', '.join(running)} {verb} {known.model}",
            expected="the same, or no engine that runs",
        )
    wanted = replace(wanted, model=model or known.model)
    if not name_engines(wanted):
        raise InvalidArgument("--engines", given="nothing", expected=SPEC_EXPECTED)
    if not wanted.model:
        raise InvalidArgument(
            "--model", given="nothing", expected="a GGUF file, or a folder with config.json"
        )
    return wanted
