"""A process refuses to start where its packages may be somebody else's.

Each case runs in a process of its own, with a folder on its path that looks like an environment
into which another distribution was installed: the real metadata reader sees real files.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.identity import PACKAGES as GUARDED
from kvstore.identity import find_identity_problem
from tests.architecture.source_tree import (
    PACKAGES,
    ROOT,
    Module,
    modules,
    modules_of,
    pyproject,
)

CHECK = "from kvstore.identity import check_package_identity; check_package_identity(); print('up')"


def start(
    *path: Path, options: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the check with the given folders on sys.path, in a process."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *options, "-c", CHECK],
        cwd="/",
        env=inherited
        | {"PYTHONPATH": os.pathsep.join(str(folder) for folder in path)}
        | (environment or {}),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def install(site: Path, distribution: str, package: str, *, listed_in: str) -> None:
    """Lay out what an installer leaves behind for a distribution with one package."""
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text("")
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    if listed_in == "RECORD":
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n{info.name}/METADATA,,\n")
    else:
        (info / listed_in).write_text(f"{package}\n")


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 1, result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("refusing to start: ")
    for word in words:
        assert word in line


def test_process_starts_when_all_names_are_ours(tmp_path: Path) -> None:
    install(tmp_path, "other-thing", "other", listed_in="RECORD")
    result = start(ROOT, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "up\n", "")


@pytest.mark.parametrize("package", GUARDED)
@pytest.mark.parametrize("listed_in", ["RECORD", "top_level.txt"])
def test_process_refuses_when_another_distribution_owns_a_name(
    tmp_path: Path, package: str, listed_in: str
) -> None:
    install(tmp_path, "their-dist", package, listed_in=listed_in)
    # Behind ours on the path: nothing is shadowed yet, but one change of folder would do it.
    assert_refused(
        start(ROOT, tmp_path), "'their-dist'", f"'{package}'", "pip uninstall their-dist"
    )


def test_process_starts_when_our_own_distribution_is_spelt_otherwise(tmp_path: Path) -> None:
    # Older installers write names with underscores or capitals.
    install(tmp_path, "Cachalot_KV", "kernels", listed_in="top_level.txt")
    (tmp_path / "kernels" / "__init__.py").unlink()
    assert start(ROOT, tmp_path).stdout == "up\n"


def test_process_refuses_when_a_stray_folder_shadows_a_package(tmp_path: Path) -> None:
    (tmp_path / "erasure").mkdir()
    (tmp_path / "erasure" / "__init__.py").write_text("")
    assert_refused(start(tmp_path, ROOT), "'erasure'", str(tmp_path / "erasure"), str(ROOT))


def test_process_refuses_when_a_stray_file_takes_a_name(tmp_path: Path) -> None:
    (tmp_path / "gc_worker.py").write_text("")
    assert_refused(start(tmp_path, ROOT), "'gc_worker'", str(tmp_path / "gc_worker.py"))


@pytest.mark.parametrize(
    ("options", "environment"),
    [(("-O",), {}), (("-OO",), {}), ((), {"PYTHONOPTIMIZE": "1"})],
)
def test_process_refuses_when_assertions_are_off(
    options: tuple[str, ...], environment: dict[str, str]
) -> None:
    result = start(ROOT, options=options, environment=environment)
    assert_refused(result, "assertions are off", "PYTHONOPTIMIZE")


def test_this_environment_is_ours() -> None:
    assert find_identity_problem() is None


def test_guarded_names_are_the_packages_that_are_installed() -> None:
    included = pyproject()["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(GUARDED) == sorted(PACKAGES)
    assert sorted(included) == sorted(part for name in GUARDED for part in (name, f"{name}.*"))


def test_identity_imports_only_the_standard_library() -> None:
    (module,) = [m for m in modules() if m.path == "kvstore/identity.py"]
    roots: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module is not None
            roots.add(node.module.partition(".")[0])
    assert roots <= sys.stdlib_module_names


BEFORE_THE_CHECK = re.compile(
    r"end_at_interrupt\(\)|from (\.\.|kvstore\.)identity import check_package_identity"
)
"""Ctrl-C has no traceback from the first import on, and that of the check takes a moment."""


def find_entry_functions() -> list[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return every top-level function `main`: that is what a process of ours starts with."""
    return [
        (module, node)
        for module in modules_of(*PACKAGES, "demo")
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "main"
    ]


def test_every_entry_point_checks_identity_first() -> None:
    entries = find_entry_functions()
    names = {module.name for module, _ in entries}
    scripts = {target.partition(":")[0] for target in pyproject()["project"]["scripts"].values()}
    assert names >= {"engine.generate"} | scripts
    assert any(name.startswith("demo") for name in names)
    for module, main in entries:
        body = main.body[1:] if ast.get_docstring(main) else main.body
        words = [text for text in map(ast.unparse, body) if not BEFORE_THE_CHECK.fullmatch(text)]
        assert words[0] == "check_package_identity()", f"{module.path}: main"
