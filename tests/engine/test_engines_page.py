"""The engine in a program, in docs/engines.md, runs as it stands there."""

import re
import subprocess
import sys

from tests.architecture.source_tree import ROOT, project_texts


def test_example_of_an_engine_answers_streams_and_aborts() -> None:
    text = project_texts()["docs/engines.md"]
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (example,) = (one for one in examples if "LLMEngine(" in one)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    aborted, *answered, first, _, _, _, _, _, _, last = done.stdout.splitlines()
    assert aborted.startswith("c aborted ")
    assert [line.split()[:2] for line in answered] == [["a", "length"], ["b", "length"]]
    assert re.fullmatch(r"0 \(\d+,\) None", first)
    assert re.fullmatch(r"7 \(\d+,\) length", last)
