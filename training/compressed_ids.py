"""Engram's id of each token, as a file for a machine that has no tokenizer library.

    python -m training.compressed_ids --tokenizer FOLDER/tokenizer.json

writes compressed_ids.npz beside the tokenizer: `ids` int64 [V], and `tokenizer_sha256` of the file.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch

FILE = "compressed_ids.npz"


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

    Raises FileNotFoundError if the file was not written, ValueError if it was for another tokenizer
    or the corpus beside it was packed with another one.
    """
    tokenizer_sha256 = _sha256(folder / "tokenizer.json")
    for name in (FILE, "corpus.npz"):
        with np.load(folder / name, allow_pickle=False) as arrays:
            if str(arrays["tokenizer_sha256"]) != tokenizer_sha256:
                raise ValueError(f"{folder / name}: made with another tokenizer than the one there")
    with np.load(folder / FILE, allow_pickle=False) as arrays:
        return torch.from_numpy(arrays["ids"])


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write Engram's id of each token.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    arguments = parser.parse_args()
    ids = fold_tokens(arguments.tokenizer)
    np.savez(
        arguments.tokenizer.parent / FILE,
        ids=ids.numpy(),
        tokenizer_sha256=np.array(_sha256(arguments.tokenizer)),
    )
    print(f"{len(ids)} tokens, {int(ids.max()) + 1} compressed ids")


if __name__ == "__main__":
    main()
