"""Ctrl-C while a program is still being loaded: it ends with 130, and says nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = """
import os, signal, sys

class Interrupting:
    '''Interrupts this process when it imports a module, inside the import.'''

    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Interrupting())
"""
PROGRAMS = {
    "cachalot": ("kvstore.admin.cli", "status", "--cluster", "none"),
    "demo": ("demo",),
    "generate": (
        "engine.generate",
        "--prompt",
        "x",
        "--model",
        "models/v41-mini",
        "--max-tokens",
        "1",
    ),
    "fit_cost": ("engine.fit_cost", "--model", "/"),
    "worker": ("engine.worker", "--help"),
    "serving": ("engine.worker", "--role", "both", "--model", "models/v41-mini"),
}


def run_interrupted(
    folder: Path, program: str, module: str, *more: str, is_ignored: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run it, with SIGINT as it begins to import a module."""
    text = SITE.format(name=module, number=int(signal.SIGINT))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    words = [sys.executable, "-m", *PROGRAMS[program], *more]
    if is_ignored:
        words = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *words]
    return subprocess.run(
        words,
        cwd=ROOT,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("cachalot", "kvstore.identity"),
        ("cachalot", "typer"),
        ("cachalot", "kvstore.admin.commands"),
        ("cachalot", "kvstore.admin.cluster_status"),
        ("demo", "kvstore.identity"),
        ("demo", "demo.command"),
        ("generate", "typer"),
        ("generate", "kvstore.identity"),
        ("generate", "torch"),
        ("generate", "torch.nn.functional"),
        ("generate", "gguf"),
        ("fit_cost", "typer"),
        ("fit_cost", "torch.nn.functional"),
        ("worker", "typer"),
    ],
)
def test_interrupt_of_an_import_ends_the_program_with_130_and_no_word(
    tmp_path: Path, program: str, module: str
) -> None:
    done = run_interrupted(tmp_path, program, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_worker_that_is_interrupted_while_it_is_loaded_ends_as_one_that_serves(
    tmp_path: Path,
) -> None:
    place = tmp_path / "b.sock"
    done = run_interrupted(tmp_path, "serving", "torch.nn.functional", "--listen", str(place))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not place.exists()


def test_interrupt_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    done = run_interrupted(tmp_path, "generate", "torch", is_ignored=True)
    assert (done.returncode, done.stderr) == (0, "")
