"""Every module is imported by the product or is a program; the public names are a known list."""

import ast

from tests.architecture.source_tree import PACKAGES, PROGRAMS, Module, modules_of, pyproject

# The surface that users build on. A name is added here on purpose, and never taken away.
PUBLIC_NAMES_OF_CLIENT = [
    "AgentClient",
    "ArenaRun",
    "BlockLayout",
    "BlockLoss",
    "BlockingAgentClient",
    "BlockingStoreClient",
    "ClientCounters",
    "FetchEnd",
    "FetchResult",
    "KeyChain",
    "Namespace",
    "NodeReport",
    "PromptMatch",
    "RunOffer",
    "RunOperation",
    "SaveResult",
    "Section",
    "StoreClient",
    "check_rebuilt",
]


def find_imported(module: Module) -> set[str]:
    """Return the dotted names of all modules that a file may import, wherever in the file."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found.add(source)
            # `from package import module` names a module too.
            found.update(f"{source}.{alias.name}" for alias in node.names)
    return found


def is_program(module: Module) -> bool:
    """Whether a person or another process starts this file."""
    scripts = pyproject()["project"]["scripts"].values()
    if module.path.endswith("/__main__.py") or f"{module.name}:main" in scripts:
        return True
    tests = [ast.unparse(node.test) for node in module.tree.body if isinstance(node, ast.If)]
    return "__name__ == '__main__'" in tests


def test_every_module_is_imported_or_is_a_program() -> None:
    product = modules_of(*PACKAGES, *PROGRAMS)
    imported = {name for module in product for name in find_imported(module)}
    unused = [
        module.path
        for module in product
        if not module.is_package and module.name not in imported and not is_program(module)
    ]
    assert unused == []


def test_imports_are_found_in_all_their_forms() -> None:
    source = "from . import a\nfrom .b import c\nfrom ..d import e\nimport f.g\nfrom h import i"
    module = Module("kvstore/node/x.py", source, ast.parse(source))
    names = {"kvstore.node.a", "kvstore.node.b", "kvstore.d", "f.g", "h.i"}
    assert find_imported(module) >= names


def test_public_names_of_the_client_are_the_known_ones() -> None:
    (init,) = [m for m in modules_of("kvstore") if m.path == "kvstore/client/__init__.py"]
    (names,) = [
        ast.literal_eval(node.value)
        for node in init.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(names) == PUBLIC_NAMES_OF_CLIENT
