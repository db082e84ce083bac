"""Both sides of the corpus as token ids in one compressed file, for a machine without this Python.

    python -m training.pack --out FILE [--tokenizer tokenizer.json] [--library FOLDER]

writes FILE (.npz) and beside it tokenizer.json, trained on the training side if none was given.
Equal libraries give equal files. The arrays of FILE, for `side` "training" and "held_out":

    <side>_ids      uint16 [T]      BOS, the tokens of a document, EOS; document after document
    <side>_starts   int64 [D + 1]   where each document starts in them; the last one is T
    <side>_bytes    int64 [D]       bytes of each document's text
    <side>_paths    str [D]         paths below the library
    <side>_sha256   str [D]         hex digest of each document's text
    corpus_sha256, tokenizer_sha256   str []   the latter of tokenizer.json
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .command import ending_in_one_line
from .corpus import Corpus, Document, Side, find_library, read_both_sides
from .tokenizer import encode_documents, read_tokenizer, tokenizer_text, train_tokenizer


def pack_side(documents: tuple[Document, ...], tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    """The arrays of one side by the last part of their names."""
    encoded = encode_documents(tokenizer, [document.text for document in documents])
    return {
        "ids": np.concatenate([np.empty(0, np.uint16), *encoded]),
        "starts": np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        "bytes": np.array([len(document.data) for document in documents], np.int64),
        "paths": np.array([document.path for document in documents], np.str_),
        "sha256": np.array([hashlib.sha256(d.data).hexdigest() for d in documents], np.str_),
    }


def write_pack(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> dict[str, NDArray[Any]]:
    """Write the packed corpus to `path` and give its arrays."""
    arrays: dict[str, NDArray[Any]] = {
        "corpus_sha256": np.array(corpus.sha256),
        "tokenizer_sha256": np.array(
            hashlib.sha256(tokenizer_text(tokenizer).encode()).hexdigest()
        ),
    }
    for side, documents in ((Side.TRAINING, corpus.training), (Side.HELD_OUT, corpus.held_out)):
        packed = pack_side(documents, tokenizer)
        arrays |= {f"{side.value}_{name}": array for name, array in packed.items()}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return arrays


def describe_pack(arrays: dict[str, NDArray[Any]]) -> list[str]:
    """Sizes and fingerprints, one fact a line."""
    lines = []
    for side in Side:
        size_bytes = int(arrays[f"{side.value}_bytes"].sum())
        tokens = len(arrays[f"{side.value}_ids"])
        files = len(arrays[f"{side.value}_bytes"])
        lines.append(
            f"{side.value}: {files:,} files, {size_bytes:,} bytes, {tokens:,} tokens with the two "
            f"around each file, {size_bytes / max(tokens - 2 * files, 1):.3f} bytes a token"
        )
    return [
        *lines,
        f"corpus sha256 {arrays['corpus_sha256']}",
        f"tokenizer sha256 {arrays['tokenizer_sha256']}",
    ]


@ending_in_one_line()
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pack the corpus as token ids.")
    parser.add_argument("--out", type=Path, required=True, help="file to write (.npz)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use, not a new one")
    parser.add_argument(
        "--library", type=Path, default=find_library(), help="standard library of a Python"
    )
    arguments = parser.parse_args(given)
    corpus = read_both_sides(arguments.library)
    if arguments.tokenizer is None:
        tokenizer = train_tokenizer(document.text for document in corpus.training)
    else:
        tokenizer = read_tokenizer(arguments.tokenizer)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arrays = write_pack(corpus, tokenizer, arguments.out)
    tokenizer_file = arguments.out.parent / "tokenizer.json"
    tokenizer_file.write_text(tokenizer_text(tokenizer), encoding="utf-8")
    print("\n".join(describe_pack(arrays)), file=sys.stderr)


if __name__ == "__main__":
    main()
