"""The example in docs/engine-client.md runs as it stands there, against a real agent."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from tests.architecture.source_tree import ROOT, project_texts

pytestmark = pytest.mark.slow


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """With room for the path of a socket."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    yield folder
    shutil.rmtree(folder)


def test_engine_examples_print_what_they_say_in_a_first_and_a_second_run(
    short_folder: Path,
) -> None:
    text = project_texts()["docs/engine-client.md"]
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + "".join(examples)
    promised = re.findall(r"print\(.*\)  # (.*) \((.*)\)$", program, re.MULTILINE)
    assert len(promised) == program.count("print(") == 6
    with LocalCluster.start(
        short_folder / "my-cluster", nodes=3, k=2, m=1, target_size_bytes=64 << 20, agents=1
    ):
        for said in zip(*promised, strict=True):
            done = subprocess.run(
                [sys.executable, "-X", "dev", "-c", program],
                cwd=short_folder,
                capture_output=True,
                text=True,
                timeout=50,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.splitlines() == list(said)


def test_engine_example_has_a_namespace_of_its_own() -> None:
    """Blocks of the README's example have other bytes: a key that both had would spoil one."""
    models = [
        set(re.findall(r'Namespace\(model="([^"]*)"', project_texts()[page]))
        for page in ("README.md", "docs/engine-client.md")
    ]
    assert all(models)
    assert models[0].isdisjoint(models[1])
