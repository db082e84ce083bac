"""README's Python example runs as it stands there, against a real cluster."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from tests.architecture.source_tree import ROOT, project_texts


def find_examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_client_example_prints_what_it_says(tmp_path: Path) -> None:
    (example,) = find_examples(project_texts()["README.md"])
    (promised,) = re.findall(r"print\(.*\)  # (.*)", example)
    with LocalCluster.start(tmp_path / "my-cluster", target_size_bytes=64 << 20):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{example}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{promised}\n"


def test_examples_are_found_by_their_fence() -> None:
    text = "```sh\nls\n```\n```python\na = 1\n```\n```\nb\n```\n"
    assert find_examples(text) == ["a = 1\n"]
