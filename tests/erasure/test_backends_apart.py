"""Fall-backs in processes of their own, as two builds of ISA-L must not meet in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from erasure.choice import ENVIRONMENT_VARIABLE
from erasure.isal import DEBIAN_LIBRARY

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
# What a back end may break: its products, the code made of them, and the bytes of the format.
FILES = ("test_process_choice.py", "test_code.py", "test_golden.py")


def run_python(*arguments: str, backend: str | None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    environment.pop(ENVIRONMENT_VARIABLE, None)
    if backend is not None:
        environment[ENVIRONMENT_VARIABLE] = backend
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def require_backend(backend: str) -> None:
    if backend != "isal-debian":
        return
    # Looked up in a child: loading it here would bring a second build into this process.
    found = run_python("-c", f"import ctypes; ctypes.CDLL({DEBIAN_LIBRARY!r})", backend=None)
    if found.returncode:
        pytest.skip(f"{DEBIAN_LIBRARY} of Debian's package libisal2 is not installed")


@pytest.mark.parametrize("backend", ["isal-debian", "numpy"])
def test_backend_passes_all_tests_when_alone_in_its_process(backend: str) -> None:
    require_backend(backend)
    files = [str(FOLDER / name) for name in FILES]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = run_python("-m", "pytest", *options, *files, backend=backend)
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, result.stdout
    assert int(passed[1]) > 100


@pytest.mark.parametrize("backend", ["isal", "isal-debian", "numpy"])
def test_process_picks_the_back_end_that_the_environment_names(backend: str) -> None:
    require_backend(backend)
    program = "from erasure.code import Code; print(Code(4, 2).multiplier.name)"
    result = run_python("-c", program, backend=backend)
    assert (result.stdout.strip(), result.stderr) == (backend, "")


@pytest.mark.parametrize("backend", [None, ""])
def test_process_picks_the_wheel_when_nothing_is_named(backend: str | None) -> None:
    program = "from erasure.code import Code; print(Code(4, 2).multiplier.name)"
    result = run_python("-c", program, backend=backend)
    assert (result.stdout.strip(), result.stderr) == ("isal", "")


def test_process_stops_with_the_right_names_when_the_environment_names_none() -> None:
    result = run_python("-c", "from erasure.code import Code; Code(4, 2)", backend="jerasure")
    assert result.returncode == 1
    assert "CACHALOT_ERASURE: given 'jerasure'" in result.stderr
    assert "one of isal, isal-debian, numpy" in result.stderr


@pytest.mark.parametrize(("first", "second"), [("isal", "isal-debian"), ("isal-debian", "isal")])
def test_process_refuses_a_second_build_of_isal(first: str, second: str) -> None:
    require_backend(first)
    program = (
        "from erasure.choice import choose_multiplier; "
        "from erasure.errors import MultiplierConflictError as Conflict\n"
        f"assert choose_multiplier().name == {first!r}\n"
        f"try: choose_multiplier({second!r})\n"
        "except Conflict as error: print(error)\n"
        # What was chosen goes on working, and so does numpy beside it.
        f"assert choose_multiplier({first!r}) is choose_multiplier()\n"
        "assert choose_multiplier('numpy').name == 'numpy'\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(len({line.split()[-1] for line in maps.splitlines() if 'libisal' in line}))"
    )
    result = run_python("-W", "ignore", "-c", program, backend=first)
    assert result.stderr == ""
    error, builds = result.stdout.splitlines()
    assert f"given {second}, expected {first}" in error
    assert builds == "1"


def test_this_process_has_one_build_at_most() -> None:
    maps = Path("/proc/self/maps").read_text()
    builds = {line.split()[-1] for line in maps.splitlines() if "libisal" in line}
    assert len(builds) <= 1
