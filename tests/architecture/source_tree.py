"""The files of the project as the architecture tests see them: by path, as text, as syntax trees.

Nothing here imports the code that is looked at: a module with a mistake is still readable.
"""

import ast
import gc
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# What a user installs; `benchmarks`, `demo` and `training` are run from the checkout.
PACKAGES = ("engine", "erasure", "gc_worker", "kernels", "kvstore")
PROGRAMS = ("benchmarks", "demo", "training")

# Folders that tools make; only asked where there is no git to say what is ignored.
_MADE_BY_TOOLS = {"__pycache__", "build", "dist"}


@dataclass(frozen=True)
class Module:
    """One Python file: its path below the root, its dotted name, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The dotted name it is imported by; a package's name for its `__init__`."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__` of a package."""
        return self.path.endswith("/__init__.py")


@cache
def project_paths() -> tuple[str, ...]:
    """Return all files of the project, relative to the root, without what git ignores."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        found = {path for path in listing.stdout.split("\0") if path}
        return tuple(sorted(path for path in found if (ROOT / path).is_file()))
    return tuple(sorted(_walk()))


def _walk() -> list[str]:
    """List the files where there is no git, as in an unpacked archive."""
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        made = any(part in _MADE_BY_TOOLS or part.endswith(".egg-info") for part in parts)
        if path.is_file() and not hidden and not made:
            found.append("/".join(parts))
    return found


@cache
def project_texts() -> dict[str, str]:
    """Return the text of every project file that is text, by path."""
    texts = {}
    for path in project_paths():
        data = (ROOT / path).read_bytes()
        if b"\0" not in data:
            texts[path] = data.decode("utf-8")
    return texts


@cache
def modules() -> tuple[Module, ...]:
    """Return every Python file of the project, tests included."""
    # Millions of nodes, all of which stay: to look for garbage among them meanwhile takes 5 to 20
    # times as long as to parse.
    gc.disable()
    try:
        return tuple(
            Module(path, text, ast.parse(text, path))
            for path, text in project_texts().items()
            if path.endswith(".py")
        )
    finally:
        gc.enable()


def modules_of(*folders: str) -> list[Module]:
    """Return the Python files below the given top-level folders."""
    return [module for module in modules() if module.path.split("/", 1)[0] in folders]


@cache
def pyproject() -> dict[str, Any]:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
