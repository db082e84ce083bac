"""Engram's ids as training has them: those that the engine folds of the same tokenizer."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.models.deepseek_v41.engram_vocabulary import read_compressed_ids as ids_of_engine
from engine.models.deepseek_v41.shipped import shipped_config
from tests.training.small_library import make_library
from training.command import InvalidInput
from training.compressed_ids import read_compressed_ids
from training.corpus import Corpus, read_corpus
from training.pack import write_pack
from training.tokenizer import tokenizer_text, train_tokenizer

VOCABULARY = 384


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_corpus(make_library(tmp_path_factory.mktemp("library")))


def small_tokenizer(corpus: Corpus, documents: int) -> Tokenizer:
    texts = [document.text for document in corpus.training[:documents]]
    return train_tokenizer(texts, vocabulary=VOCABULARY)


def put_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_text(tokenizer), encoding="utf-8")


def write_ids(folder: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "training.compressed_ids",
            "--tokenizer",
            str(folder / "tokenizer.json"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
        timeout=50,
    )


def test_ids_are_those_of_the_engine_and_of_this_tokenizer_only(
    corpus: Corpus, tmp_path: Path
) -> None:
    tokenizer, other = small_tokenizer(corpus, 30), small_tokenizer(corpus, 20)
    assert tokenizer_text(tokenizer) != tokenizer_text(other)
    put_tokenizer(tmp_path, tokenizer)
    write_pack(corpus, tokenizer, tmp_path / "corpus.npz")
    with pytest.raises(InvalidInput, match="No such file"):
        read_compressed_ids(tmp_path)
    write_ids(tmp_path)
    ids = read_compressed_ids(tmp_path)
    config = shipped_config("v41-nano")
    assert config.engram is not None
    engram = replace(config.engram, compressed_vocabulary=int(ids.max()) + 1)
    engines = ids_of_engine(tmp_path, replace(config, vocabulary=VOCABULARY, engram=engram))
    assert ids.tolist() == engines.tolist()

    write_pack(corpus, other, tmp_path / "corpus.npz")
    with pytest.raises(ValueError, match=r"corpus\.npz: given a file made with another tokenizer"):
        read_compressed_ids(tmp_path)
    put_tokenizer(tmp_path, other)
    with pytest.raises(
        ValueError, match=r"compressed_ids\.npz: given a file made with another tokenizer"
    ):
        read_compressed_ids(tmp_path)
