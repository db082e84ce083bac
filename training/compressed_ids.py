"""Engram's id of each token, as a file for a machine that has no tokenizer library.

    python -m training.compressed_ids --tokenizer FOLDER/tokenizer.json

writes compressed_ids.npz beside the tokenizer: `ids` int64 [V], and `tokenizer_sha256` of the file.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .arrays_file import TEXT, read_arrays
from .command import InvalidInput, ending_in_one_line, reading

FILE = "compressed_ids.npz"
_SOURCES = {FILE: "training.compressed_ids", "corpus.npz": "training.pack"}
"""Files beside a tokenizer that follow from it, and what writes them."""


def fold_tokens(tokenizer_file: Path) -> torch.Tensor:
    """Compressed ids int64 [V], by the rules of `engram_vocabulary`."""
    # Only here: training itself reads the file.
    from engine.models.deepseek_v41.engram_vocabulary import compress_token_texts

    from .tokenizer import read_tokenizer

    tokenizer = read_tokenizer(tokenizer_file)
    spellings = {number: text for text, number in tokenizer.get_vocab().items()}
    numbers = range(len(spellings))
    texts = [tokenizer.decode([number], skip_special_tokens=False) for number in numbers]
    return compress_token_texts(texts, [spellings[number] for number in numbers])


def read_compressed_ids(folder: Path) -> torch.Tensor:
    """Those of the tokenizer in `folder`.

    Raises InvalidInput if the file was not written or holds no such ids, if it was made for another
    tokenizer, or if the corpus beside it was packed with another one.
    """
    tokenizer_sha256 = _sha256(folder / "tokenizer.json")
    for name, source in _SOURCES.items():
        arrays = read_arrays(folder / name, {"tokenizer_sha256": (TEXT, 0)}, source=source)
        if str(arrays["tokenizer_sha256"]) != tokenizer_sha256:
            given = "a file made with another tokenizer"
            raise InvalidInput(str(folder / name), given=given, expected="the one beside it")
    ids = read_arrays(folder / FILE, {"ids": ("int64", 1)}, source=_SOURCES[FILE])["ids"]
    if not len(ids) or not np.array_equal(np.unique(ids), np.arange(ids.max() + 1)):
        given = f"{len(ids)} ids that leave numbers out"
        raise InvalidInput(str(folder / FILE), given=given, expected="0, 1, .. in any order")
    return torch.from_numpy(ids)


def _sha256(path: Path) -> str:
    with reading("tokenizer", path, expected="the tokenizer.json that training.pack writes"):
        return hashlib.sha256(path.read_bytes()).hexdigest()


@ending_in_one_line()
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write Engram's id of each token.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    arguments = parser.parse_args(given)
    ids = fold_tokens(arguments.tokenizer)
    np.savez(
        arguments.tokenizer.parent / FILE,
        ids=ids.numpy(),
        tokenizer_sha256=np.array(_sha256(arguments.tokenizer)),
    )
    print(f"{len(ids)} tokens, {int(ids.max()) + 1} compressed ids")


if __name__ == "__main__":
    main()
