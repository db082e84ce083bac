"""Engram's id of each token, as a file for a machine that has no tokenizer library.

    python -m training.compressed_ids --tokenizer FOLDER/tokenizer.json

writes compressed_ids.npy (int64 [V]) beside the tokenizer.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

FILE = "compressed_ids.npy"


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
    """Those of the tokenizer in `folder`; raises FileNotFoundError if the file was not written."""
    return torch.from_numpy(np.load(folder / FILE, allow_pickle=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write Engram's id of each token.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    arguments = parser.parse_args()
    ids = fold_tokens(arguments.tokenizer)
    np.save(arguments.tokenizer.parent / FILE, ids.numpy())
    print(f"{len(ids)} tokens, {int(ids.max()) + 1} compressed ids")


if __name__ == "__main__":
    main()
