"""The import contracts in pyproject.toml catch what they are there to catch.

Each case plants one forbidden import in a copy of the packages and runs the linter on the copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, modules_of, pyproject

ROOT_PACKAGES: list[str] = pyproject()["tool"]["importlinter"]["root_packages"]


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the packages that the contracts are about, without any other file."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for module in modules_of(*ROOT_PACKAGES):
        (copy / module.path).parent.mkdir(parents=True, exist_ok=True)
        (copy / module.path).write_text(module.text, encoding="utf-8")
    return copy


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=tree,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_contracts_are_kept_by_the_tree_as_it_is(copied_tree: Path) -> None:
    result = lint(copied_tree)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("kvstore/node/planted.py", "import engine.generate", "go downwards only"),
        ("erasure/planted.py", "import kvstore.key", "go downwards only"),
        ("engine/planted.py", "import demo", "go downwards only"),
        ("kvstore/node/planted.py", "import kvstore.client", "Inside kvstore too"),
        ("kvstore/client/planted.py", "import kvstore.node", "Inside kvstore too"),
        ("kvstore/cluster/planted.py", "import kvstore.client", "Inside kvstore too"),
        ("kvstore/planted.py", "", "Inside kvstore too"),
        ("engine/planted.py", "import kvstore.wire", "public modules of kvstore"),
        ("engine/planted.py", "from kvstore.node import main", "public modules of kvstore"),
        ("demo/planted.py", "import kvstore.node.main", "public modules of kvstore"),
        ("kvstore/client/planted.py", "import erasure.isal", "public modules of erasure"),
        ("kvstore/key.py", "import time", "are pure"),
        ("kvstore/node/planted.py", "import torch.nn", "no tensor library"),
        ("erasure/planted.py", "import torch", "no tensor library"),
        ("engine/planted.py", "import tilelang.language", "TileLang is imported"),
        ("engine/planted.py", "import transformers", "transformers is never"),
        ("engine/planted.py", "import http.server", "HTTP is spoken"),
        ("kvstore/node/planted.py", "import fastapi", "HTTP is spoken"),
        ("kvstore/client/planted.py", "import rich.table", "Command lines"),
    ],
)
def test_contract_is_broken_when_a_forbidden_import_is_planted(
    copied_tree: Path, path: str, line: str, contract: str
) -> None:
    planted = copied_tree / path
    before = planted.read_text() if planted.exists() else None
    planted.write_text(f"{before or ''}\n{line}\n")
    result = lint(copied_tree)
    if before is None:
        planted.unlink()
    else:
        planted.write_text(before)
    assert result.returncode == 1, result.stdout
    assert re.search(rf"^.*{contract}.* BROKEN", result.stdout, re.MULTILINE), result.stdout
