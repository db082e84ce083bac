"""Functions and files that fit in a head, and names that say what is inside."""

import ast
from pathlib import PurePosixPath

from tests.architecture.source_tree import PACKAGES, Module, modules, modules_of

FUNCTION_LINES_MAX = 70
KERNEL_FUNCTION_LINES_MAX = 150  # a kernel factory holds its whole program
FILE_LINES_MAX = 500

# Names that any code would fit under, and names that hide a module of the standard library.
FORBIDDEN_STEMS = {
    *("common", "helper", "helpers", "manager", "misc", "util", "utils"),
    *("codecs", "platform", "queue", "select", "token", "types"),
}


def find_long_functions(module: Module) -> list[str]:
    """Return `path:line name (lines)` of every function over the limit."""
    limit = KERNEL_FUNCTION_LINES_MAX if is_kernel(module) else FUNCTION_LINES_MAX
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > limit:
                found.append(f"{module.path}:{node.lineno} {node.name} ({lines} > {limit})")
    return found


def is_kernel(module: Module) -> bool:
    return module.path.startswith("kernels/")


def test_functions_fit_their_limit() -> None:
    assert [found for module in modules() for found in find_long_functions(module)] == []


def test_long_functions_are_found_when_one_line_over() -> None:
    def function_of(lines: int) -> Module:
        text = "def f():\n" + "    x = 1\n" * (lines - 1)
        return Module("erasure/code.py", text, ast.parse(text))

    assert find_long_functions(function_of(FUNCTION_LINES_MAX)) == []
    assert find_long_functions(function_of(FUNCTION_LINES_MAX + 1)) == [
        "erasure/code.py:1 f (71 > 70)"
    ]


def test_files_fit_their_limit() -> None:
    sizes = {m.path: len(m.text.splitlines()) for m in modules() if not is_kernel(m)}
    assert {path: lines for path, lines in sizes.items() if lines > FILE_LINES_MAX} == {}


def test_file_names_say_what_is_inside() -> None:
    vague = [m.path for m in modules() if PurePosixPath(m.path).stem in FORBIDDEN_STEMS]
    vague += [m.path for m in modules() if FORBIDDEN_STEMS & set(PurePosixPath(m.path).parts[:-1])]
    assert vague == []


def test_top_level_packages_hold_only_a_docstring() -> None:
    # Anything more would be run by whoever imports one small module of the package.
    tops = [module for module in modules_of(*PACKAGES) if module.path.count("/") == 1]
    packages = [module for module in tops if module.is_package]
    assert {module.name for module in packages} >= {"engine", "erasure", "kvstore"}
    for package in packages:
        statements = package.tree.body
        assert len(statements) == 1, package.path
        assert ast.get_docstring(package.tree), package.path


def test_modules_say_what_they_are_for() -> None:
    silent = [module.path for module in modules() if not ast.get_docstring(module.tree)]
    assert silent == []
