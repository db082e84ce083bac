"""A library folder of small files, some of which do not belong to a corpus."""

import random
from pathlib import Path

from training.corpus import Side, side_of

_SYLLABLES = ("ab", "con", "de", "er", "fer", "in", "load", "mit", "per", "re", "ster", "tion")


def source_text(number: int) -> str:
    """A text as long as a short file, another one for each number."""
    rng = random.Random(number)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(12)]
    lines = [f'"""Module {number} of the library; it holds functions."""', ""]
    for word in words:
        other = rng.choice(words)
        lines += [f"def {word}(self, {other}):", f"    return {other} + {rng.randrange(99)}", ""]
    return "\n".join(lines) + "\n"


def paths_of_side(side: Side, count: int) -> list[str]:
    """The first `count` made-up paths that are on this side."""
    paths = (f"package/module_{number}.py" for number in range(1_000))
    return [path for path in paths if side_of(path) is side][:count]


def make_library(folder: Path, *, training: int = 30, held_out: int = 3) -> Path:
    """Write that many files of each side below a folder and give the folder."""
    paths = paths_of_side(Side.TRAINING, training) + paths_of_side(Side.HELD_OUT, held_out)
    for number, path in enumerate(paths):
        put(folder, path, source_text(number))
    return folder


def put(folder: Path, path: str, content: str | bytes) -> None:
    """Write one file and the folders above it."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
