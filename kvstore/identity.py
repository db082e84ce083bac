"""Refuses to start a process whose packages may not be the ones that were meant.

Our top-level packages have generic names. Where another distribution owns one of them, Python picks
by the order of `sys.path`, without a word: a process could run half of this system and half of
another one. The check costs about 50 ms, once, and is the first thing that each entry point does.

It is not a check of versions or of file contents, and not a place for other start-up work: it must
stay importable before anything of the other packages is.
"""

import re
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "cachalot-kv"

# All the names the project owns or will own: one that is not built yet must be free as well.
PACKAGES = ("engine", "erasure", "gc_worker", "kernels", "kvstore")


class PackageIdentityError(SystemExit):
    """The process must not run here; the message is one line that says why and what to do.

    It is a `SystemExit` because there is nobody to catch it: uncaught, the interpreter prints the
    line on stderr and ends with exit status 1, without a traceback.
    """


def check_package_identity() -> None:
    """End the process with `PackageIdentityError` unless our packages are ours and asserts run."""
    problem = find_identity_problem()
    if problem is not None:
        raise PackageIdentityError(f"refusing to start: {problem}")


def find_identity_problem() -> str | None:
    """Say in one line what is wrong with this environment, or None if nothing is."""
    if not __debug__:
        return (
            "assertions are off, and they guard stored data here;"
            " run without `python -O` and without PYTHONOPTIMIZE"
        )
    owners = packages_distributions()
    for package in PACKAGES:
        strangers = sorted(
            {_normalise(owner) for owner in owners.get(package, ())} - {DISTRIBUTION}
        )
        if strangers:
            return (
                f"the package {package!r} belongs to the distribution {strangers[0]!r} in"
                f" {sys.prefix}; `pip uninstall {strangers[0]}`, or install {DISTRIBUTION} into an"
                " environment of its own"
            )
    # Files on sys.path that no distribution lists: a stray folder, or PYTHONPATH.
    root = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        origin = _find_origin(package)
        if origin is not None and origin.parent != root:
            return (
                f"the package {package!r} comes from {origin} and not from {root};"
                " start elsewhere, or take that folder's parent off sys.path (PYTHONPATH)"
            )
    return None


def _normalise(distribution: str) -> str:
    """Return the one spelling of names such as `Cachalot_KV`, as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _find_origin(package: str) -> Path | None:
    """Return the folder or file that `import package` takes, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        # Not there, or a folder without `__init__.py`: any real package goes before that one.
        return None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
