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


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """With room for the path of a socket."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    yield folder
    shutil.rmtree(folder)


def test_engine_example_prints_what_it_says(short_folder: Path) -> None:
    text = project_texts()["docs/engine-client.md"]
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    promised = re.findall(r"print\(.*\)  # (.*)", example)
    assert len(promised) == 5
    with LocalCluster.start(
        short_folder / "my-cluster", nodes=3, k=2, m=1, target_size_bytes=64 << 20, agents=1
    ):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{example}"],
            cwd=short_folder,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == promised
