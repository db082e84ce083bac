"""The tokenizer: fixed ids, nothing lost, the same file every time."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.training.small_library import source_text
from training.tokenizer import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    IMAGE_TOKEN_ID,
    NOISE_TOKEN_ID,
    PAD_TOKEN_ID,
    SPECIAL_TOKEN_IDS,
    VOCABULARY,
    encode_documents,
    read_token_bytes,
    read_tokenizer,
    tokenizer_text,
    train_tokenizer,
)

SMALL = 300
TEXTS = [source_text(number) for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocabulary=SMALL)


def test_special_ids_are_first_and_last(tokenizer: Tokenizer) -> None:
    assert (BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID) == (0, 1, 2)
    assert (IMAGE_TOKEN_ID, NOISE_TOKEN_ID) == (VOCABULARY - 2, VOCABULARY - 1) == (2046, 2047)
    assert sorted(tokenizer.get_added_tokens_decoder()) == [0, 1, 2, SMALL - 2, SMALL - 1]
    assert tokenizer.get_vocab_size() == SMALL
    assert len(SPECIAL_TOKEN_IDS) == len(set(SPECIAL_TOKEN_IDS))


def test_merges_shorten_the_texts_they_were_made_from(tokenizer: Tokenizer) -> None:
    ids = encode_documents(tokenizer, TEXTS)
    assert sum(map(len, ids)) < 0.7 * sum(len(text.encode()) for text in TEXTS)


@given(st.text() | st.sampled_from(["<|begin_of_text|>", "a<|image|>b", "<|end_of_text|>"]))
def test_any_text_comes_back_without_special_tokens(text: str) -> None:
    tokenizer = _kept_tokenizer()
    (ids,) = encode_documents(tokenizer, [text])
    assert ids.dtype == np.uint16
    assert (ids[0], ids[-1]) == (BOS_TOKEN_ID, EOS_TOKEN_ID)
    token_bytes = read_token_bytes(tokenizer)
    assert b"".join(token_bytes[i] for i in ids) == text.encode()
    assert {0, 1, 2, SMALL - 2, SMALL - 1}.isdisjoint(ids[1:-1].tolist())


_KEPT: list[Tokenizer] = []


def _kept_tokenizer() -> Tokenizer:
    if not _KEPT:
        _KEPT.append(train_tokenizer(TEXTS, vocabulary=SMALL))
    return _KEPT[0]


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    (ids,) = encode_documents(tokenizer, ["2048"])
    token_bytes = read_token_bytes(tokenizer)
    assert [token_bytes[i] for i in ids[1:-1]] == [b"2", b"0", b"4", b"8"]


def test_file_gives_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer_text(tokenizer), encoding="utf-8")
    read = read_tokenizer(file)
    texts = [*TEXTS[:3], "<|image|> in a text", "naïve\t\N{SNOWMAN}"]
    for ours, theirs in zip(
        encode_documents(tokenizer, texts), encode_documents(read, texts), strict=True
    ):
        assert ours.tolist() == theirs.tolist()
    assert tokenizer_text(read) == tokenizer_text(tokenizer)


def test_training_again_in_another_process_gives_the_same_file(tokenizer: Tokenizer) -> None:
    # Hash tables of the trainer are seeded anew in each process.
    program = (
        "import sys\n"
        "from tests.training.test_tokenizer import SMALL, TEXTS\n"
        "from training.tokenizer import tokenizer_text, train_tokenizer\n"
        "sys.stdout.write(tokenizer_text(train_tokenizer(TEXTS, vocabulary=SMALL)))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": ".", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=True,
        timeout=50,
    )
    assert answer.stdout.decode() == tokenizer_text(tokenizer)


def test_too_few_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 2048"):
        train_tokenizer(["def f(): pass\n"])
