"""Clock, chance and waiting are handed in; errors are not swallowed."""

import ast

import pytest

from tests.architecture.source_tree import PACKAGES, Module, modules, modules_of

# The composition roots, which pick the real clock and the real random source, and the class that
# is the real clock. All else takes them as arguments, so that a simulator can run it in its time.
COMPOSITION_ROOTS = (
    "engine/fit_cost.py",
    "engine/generate.py",
    "engine/worker/main.py",
    "gc_worker/main.py",
    "kvstore/admin/",
    "kvstore/agent/main.py",
    "kvstore/agent/worker.py",
    "kvstore/node/clock.py",
    "kvstore/node/main.py",
)

BANNED_MODULES = {"random", "secrets", "time"}
BANNED_NAMES = {
    "asyncio.sleep",
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "os.getrandom",
    "os.urandom",
    "uuid.uuid1",
    "uuid.uuid4",
}
# Names of types, for annotations; calling one makes it a use, but for a generator with its seed.
TYPE_NAMES = {"random.Random", "time.struct_time"}


def find_impure_uses(tree: ast.Module) -> list[str]:
    """Return `line: name` of each use of clock, chance or sleep that was not handed in.

    As the default of a parameter or of a field (`clock: Callable[[], float] = time.monotonic`) a
    function is not used but offered: that is how it is handed in.
    """
    names = _imported_names(tree)
    offered = {id(node) for default in _defaults(tree) for node in ast.walk(default)}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = set()
    for node in ast.walk(tree):
        name = _full_name(node, names)
        if name is None or not _is_banned(name):
            continue
        call = called.get(id(node))
        if call is None and (id(node) in offered or name in TYPE_NAMES):
            continue
        if call is not None and name == "random.Random" and call.args:
            continue
        assert isinstance(node, ast.expr)
        found.add((node.lineno, name))
    return [f"{line}: {name}" for line, name in sorted(found)]


def _is_banned(name: str) -> bool:
    module, _, rest = name.partition(".")
    return name in BANNED_NAMES or (module in BANNED_MODULES and rest != "")


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full name behind each name that an import binds in this file."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                names[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _full_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """Resolve `a.b.c` through the imports; None where the root is not an imported name."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(attributes)])


def _defaults(tree: ast.Module) -> list[ast.expr]:
    """Return the default expressions of all parameters and of all class fields."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            found += [default for default in (*node.defaults, *node.kw_defaults) if default]
        elif isinstance(node, ast.ClassDef):
            found += [
                part.value for part in node.body if isinstance(part, ast.AnnAssign) and part.value
            ]
    return found


def find_swallowed_errors(tree: ast.Module) -> list[int]:
    """Return the lines where any error at all is caught and nothing is done about it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or _is_wide(node.type)):
            if all(
                isinstance(part, ast.Pass | ast.Continue) or _is_dots(part) for part in node.body
            ):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            found += [node.lineno for argument in node.args if _is_wide(argument)]
    return found


def _is_wide(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(p, ast.Name) and p.id in ("Exception", "BaseException") for p in parts)


def _is_dots(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_packages_take_clock_and_chance_from_outside() -> None:
    found = {
        module.path: uses
        for module in modules_of(*PACKAGES)
        if not module.path.startswith(COMPOSITION_ROOTS) and (uses := find_impure_uses(module.tree))
    }
    assert found == {}


def test_composition_roots_are_all_there() -> None:
    paths = [module.path for module in modules()]
    gone = [root for root in COMPOSITION_ROOTS if not any(p.startswith(root) for p in paths)]
    assert gone == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.sleep(1)", ["2: time.sleep"]),
        ("import time as t\nx = t.monotonic", ["2: time.monotonic"]),
        ("from time import monotonic as now\nnow()", ["2: time.monotonic"]),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0)", ["3: asyncio.sleep"]),
        ("from datetime import datetime\ndatetime.now()", ["2: datetime.datetime.now"]),
        ("import datetime\ndatetime.datetime.now()", ["2: datetime.datetime.now"]),
        ("import os\nos.urandom(8)", ["2: os.urandom"]),
        ("import uuid\nuuid.uuid4()", ["2: uuid.uuid4"]),
        ("import random\nrandom.choice([1])", ["2: random.choice"]),
        ("import random\nrandom.Random()", ["2: random.Random"]),
        ("import random\nrandom.Random(7)", []),
        ("import random\ndef f(rng: random.Random): rng.choice([1])", []),
        ("import time\ndef f(clock=time.monotonic): return clock()", []),
        ("import time\ndef f(now=time.monotonic()): return now", ["2: time.monotonic"]),
        ("import time\nclass C:\n    clock: object = time.monotonic", []),
        ("import time\ndef f(self): self.clock = time.monotonic", ["2: time.monotonic"]),
        ("import asyncio\nasync def f(loop): return loop.time()", []),
    ],
)
def test_impure_uses_are_found_when_planted(source: str, found: list[str]) -> None:
    assert find_impure_uses(ast.parse(source)) == found


def _swallows(module: Module) -> list[str]:
    return [f"{module.path}:{line}" for line in find_swallowed_errors(module.tree)]


def test_no_error_is_swallowed() -> None:
    assert [place for module in modules() for place in _swallows(module)] == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("try:\n    f()\nexcept Exception:\n    pass", [3]),
        ("try:\n    f()\nexcept:\n    ...", [3]),
        ("try:\n    f()\nexcept (OSError, BaseException):\n    pass", [3]),
        ("for x in y:\n    try:\n        f()\n    except Exception:\n        continue", [4]),
        ("import contextlib\nwith contextlib.suppress(Exception):\n    f()", [2]),
        ("try:\n    f()\nexcept OSError:\n    pass", []),
        ("try:\n    f()\nexcept Exception as error:\n    log(error)", []),
    ],
)
def test_swallowed_errors_are_found_when_planted(source: str, lines: list[int]) -> None:
    assert find_swallowed_errors(ast.parse(source)) == lines
