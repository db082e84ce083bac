"""Puts the demo together, runs it, and leaves nothing behind."""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .display import Display
from .engines import OwnEngine
from .interruption import Interruption
from .nodes import CODE, NODES, CommandFailed, DemoNodes
from .outcomes import Outcome
from .scenario import Scenario, Stage

FOLDER_PREFIX = "cachalot-demo-"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What a user may choose."""

    tokens_max: int
    """Length of the document."""
    is_kept: bool
    """Leave the nodes running and the folder where it is."""


def run_demo(options: DemoOptions, display: Display, interruption: Interruption) -> list[Outcome]:
    """Play the scenario in a temporary folder; outcomes up to the first that breaks a claim.

    Raises KeyboardInterrupt if `interruption` came, CommandFailed if a command did not do what it
    is there for, and the errors of the engine. The nodes are stopped and the folder is removed
    whatever happens, unless `is_kept`.
    """
    nodes = DemoNodes(Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)))
    try:
        with display.shown():
            return _play(options, nodes, display, interruption)
    finally:
        if options.is_kept:
            print(
                f"kept: {nodes.folder}\n"
                f"to remove it: cachalot down --dir {nodes.folder} --wipe; rm -r {nodes.folder}",
                file=sys.stderr,
            )
        else:
            with interruption.held():
                remove(nodes)


def _play(
    options: DemoOptions, nodes: DemoNodes, display: Display, interruption: Interruption
) -> list[Outcome]:
    started_s = time.monotonic()
    with interruption.held():
        nodes.start()
    took_s = time.monotonic() - started_s
    display.note(f"{NODES} storage nodes, code {CODE}, started in {took_s:.1f} s: {nodes.folder}")
    agent = nodes.agent
    display.note(f"agent {agent.name} serves the engines through {agent.socket_path}")
    with OwnEngine(agent.socket_path) as engine:
        display.note(f"model loaded: {engine.model_name}")
        stage = Stage(
            nodes=nodes,
            engine=engine,
            display=display,
            interruption=interruption,
            tokens_max=options.tokens_max,
        )
        scenario = Scenario(stage)
        scenario.play()
        return scenario.outcomes


def remove(nodes: DemoNodes) -> None:
    """Stop the nodes and remove their folder. The folder stays if a node cannot be stopped."""
    try:
        nodes.stop()
    except CommandFailed as error:
        text = f"nodes may still run, so {nodes.folder} stays: {error}"
        raise CommandFailed(text) from error
    shutil.rmtree(nodes.folder)
