"""The command as a whole: help, version, exit codes, and that it is quick to say so."""

import re
import subprocess
import sys

import pytest

from kvstore import errors
from kvstore.admin.exit_codes import MEANINGS, ExitCode
from tests.kvstore.admin.command_line import ROOT, cachalot, cachalot_here

HEAVY = (
    *("asyncio", "fastapi", "http.client", "importlib.metadata", "kvstore.client"),
    *("kvstore.retention", "numpy", "pydantic", "rich"),
)
COMMANDS = (
    *("up", "down", "status", "top", "ttl", "watermark", "policy", "settings", "gc"),
    *("inspect", "verify", "drain", "bench"),
)


def test_help_names_every_command_and_every_exit_code() -> None:
    text = cachalot("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^  {command}  +\w", text, re.MULTILINE), command
    for code in ExitCode:
        assert re.search(rf"^ +{code.value}  {re.escape(MEANINGS[code])}$", text, re.MULTILINE)


def test_operations_page_has_the_same_exit_codes() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"| {code.value} | {MEANINGS[code]} |" in text


def test_every_error_of_the_store_has_a_documented_exit_code() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.StoreError)
    ]
    assert len(classes) > 10
    assert {kind.exit_code for kind in classes} <= {code.value for code in ExitCode}


def test_command_without_words_shows_help() -> None:
    result = cachalot(code=2)
    assert "Commands:" in result.stdout + result.stderr


def test_version_is_one_line() -> None:
    assert re.fullmatch(r"cachalot (\d[\w.]*|\(not installed.*\))\n", cachalot("--version").stdout)


@pytest.mark.parametrize("word", ["upp", "bring"])
def test_unknown_command_is_refused(word: str) -> None:
    assert f"No such command '{word}'" in cachalot_here(word, code=2).stderr


def test_help_loads_nothing_heavy() -> None:
    # The identity check has its own cost and is not what is looked at here.
    program = (
        "import sys; from kvstore.admin.cli import run; sys.argv = ['cachalot', '--help']; run();"
        f" print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40.0,
        check=True,
    )
    assert set(result.stderr.split("'")[1::2]) <= {"importlib.metadata"}
