"""The packed corpus: what was put in comes out, equal libraries give equal files."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.training.small_library import make_library
from training.batches import read_streams
from training.corpus import Corpus, Side, read_corpus
from training.pack import describe_pack, write_pack
from training.packed_corpus import read_packed_side
from training.tokenizer import read_token_bytes, tokenizer_text, train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_corpus(make_library(tmp_path_factory.mktemp("library")))


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return train_tokenizer([document.text for document in corpus.training], vocabulary=300)


def test_every_document_comes_back(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "corpus.npz"
    write_pack(corpus, tokenizer, file)
    token_bytes = read_token_bytes(tokenizer)
    for side, documents in ((Side.TRAINING, corpus.training), (Side.HELD_OUT, corpus.held_out)):
        packed = read_packed_side(file, side)
        assert packed.paths == [document.path for document in documents]
        assert packed.sizes_bytes.tolist() == [len(document.data) for document in documents]
        assert packed.ids.dtype == np.uint16
        for index, document in enumerate(documents):
            ids = packed.document(index).tolist()
            assert (ids[0], ids[-1]) == (0, 1)
            assert b"".join(token_bytes[token_id] for token_id in ids) == document.data


def test_fingerprints_are_in_the_file(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    arrays = write_pack(corpus, tokenizer, tmp_path / "corpus.npz")
    with np.load(tmp_path / "corpus.npz") as read:
        assert str(read["corpus_sha256"]) == corpus.sha256
        digest = hashlib.sha256(tokenizer_text(tokenizer).encode()).hexdigest()
        assert str(read["tokenizer_sha256"]) == digest
        assert (
            str(read["training_sha256"][0]) == hashlib.sha256(corpus.training[0].data).hexdigest()
        )
        assert set(read.files) == set(arrays)
    assert any(line.startswith("training: 30 files") for line in describe_pack(arrays))


def test_equal_corpora_give_equal_bytes(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_pack(corpus, tokenizer, tmp_path / "a.npz")
    write_pack(corpus, tokenizer, tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_borders_that_do_not_fit_are_refused(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    arrays = write_pack(corpus, tokenizer, tmp_path / "corpus.npz")
    arrays["training_ids"] = arrays["training_ids"][:-1]
    np.savez_compressed(tmp_path / "short.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="training borders that do not fit"):
        read_packed_side(tmp_path / "short.npz", Side.TRAINING)
    assert read_packed_side(tmp_path / "short.npz", Side.HELD_OUT).paths
    del arrays["held_out_starts"]
    np.savez_compressed(tmp_path / "short.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no held_out_starts"):
        read_packed_side(tmp_path / "short.npz", Side.HELD_OUT)


def test_program_writes_the_pack_and_its_tokenizer(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    make_library(tmp_path / "library")
    (tmp_path / "given.json").write_text(tokenizer_text(tokenizer), encoding="utf-8")
    options = ["--library", "library", "--tokenizer", "given.json", "--out", "made/corpus.npz"]
    answer = subprocess.run(
        [sys.executable, "-m", "training.pack", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert f"corpus sha256 {corpus.sha256}" in answer.stderr
    assert (tmp_path / "made" / "tokenizer.json").read_text("utf-8") == tokenizer_text(tokenizer)
    packed = read_packed_side(tmp_path / "made" / "corpus.npz", Side.HELD_OUT)
    assert packed.paths == [document.path for document in corpus.held_out]


def test_streams_of_training_are_the_sides_of_the_pack(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "corpus.npz"
    arrays = write_pack(corpus, tokenizer, file)
    training, held_out = read_streams(file, torch.device("cpu"), vocabulary=300, tokens_min=9)
    for stream, side, documents in (
        (training, "training", corpus.training),
        (held_out, "held_out", corpus.held_out),
    ):
        assert stream.ids.tolist() == arrays[f"{side}_ids"].tolist()
        assert stream.text_bytes == sum(len(document.data) for document in documents)
    assert held_out.bits_per_byte(np.log(2)) == len(held_out.ids) / held_out.text_bytes
    last = torch.tensor([len(training.ids) - 9])
    assert training.windows(last, 9).tolist() == [training.ids[-9:].tolist()]
    spread = held_out.spread(3, 9)
    assert spread[0].tolist() == held_out.ids[:9].tolist()
    assert spread[2].tolist() == held_out.ids[-9:].tolist()
    tokens = len(training.ids) - 2
    drawn = training.sample(100, tokens, torch.Generator().manual_seed(0))
    starts = {tuple(window) for window in drawn.tolist()}
    assert starts == {tuple(training.ids[n : n + tokens].tolist()) for n in range(3)}
