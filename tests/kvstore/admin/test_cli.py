"""The command as a whole: help, version, exit codes, and that it is quick to say so."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

import gc_worker.arguments
import kvstore.node.arguments
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


LONG = "x" * 100_000
UP_ENGINE = ("up", "--dir", "D", "--engines", "1b", "--model", str(ROOT / "models/v41-mini"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((LONG,), "No such command 'xxx"),
        (("up", f"--{LONG}"), "No such option: --xxx"),
        (("up", "--dir", "D", LONG), "Got unexpected extra argument"),
        (("up", "--dir", "D", "--nodes", LONG), "valid integer"),
        (("up", "--dir", "D", "--sync", LONG), "'never', 'interval', 'batch'."),
        (("up", "--dir", LONG), "name too long"),
        (("up", "--dir", "D", "--model", LONG, "--engines", "1b"), "expected a GGUF file"),
        (("up", "--dir", "D", "--engine-option", f"threads={LONG}"), "expected at most 4096"),
        ((*UP_ENGINE, "--engine-option", f"threads={LONG[:4096]}"), "valid integer"),
        (("up", "--dir", "D", "--target-size", LONG), "expected a size such as 4GiB"),
        (("status", "--cluster", LONG), "name too long"),
        (("status", "--socket", LONG), " characters)... "),
        (("inspect", LONG, "--cluster", "D"), "expected 64 hex digits"),
        (("agent", "--cluster", "D", "--socket", "s", "--roles", LONG), "expected some of check"),
        (("agent", "--cluster", "D", "--socket", "s", "--name", LONG), "expected 1 to 32 of"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_value_of_any_length_is_shown_in_short(words: tuple[str, ...], said: str) -> None:
    result = cachalot(*words, code=None)
    assert result.returncode != 0
    assert said in result.stderr
    assert len(result.stderr) < 1000


@pytest.mark.parametrize(
    ("program", "parse"),
    [
        ("kvstored", kvstore.node.arguments.parse_arguments),
        ("gc_worker", gc_worker.arguments.parse_arguments),
    ],
)
def test_word_of_any_length_is_shown_in_short_by_a_daemon(
    program: str,
    parse: Callable[[Sequence[str]], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--cluster", "c", "--node", "n01", f"--{LONG}"])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{program}: error: unrecognized arguments: --xxx")
    assert len(last) < 500


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
