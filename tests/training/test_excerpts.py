"""Excerpts: the same bytes for every model, cut at a number of tokens."""

from itertools import pairwise

import pytest
from tokenizers import Tokenizer

from tests.training.small_library import make_library
from training.corpus import Corpus, read_corpus
from training.excerpts import choose_documents, cut_excerpts
from training.ngram import BYTE_END
from training.tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_corpus(make_library(tmp_path_factory.mktemp("library"), held_out=6))


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return train_tokenizer([document.text for document in corpus.training], vocabulary=300)


def test_sample_grows_without_changing(corpus: Corpus) -> None:
    chosen = [choose_documents(corpus.held_out, files) for files in range(8)]
    assert [len(documents) for documents in chosen] == [0, 1, 2, 3, 4, 5, 6, 6]
    for fewer, more in pairwise(chosen):
        assert more[: len(fewer)] == fewer
    reordered = tuple(reversed(corpus.held_out))
    assert choose_documents(reordered, 4) == chosen[4]


def test_whole_excerpt_has_the_end_and_all_bytes(corpus: Corpus, tokenizer: Tokenizer) -> None:
    for document, excerpt in zip(
        corpus.held_out, cut_excerpts(corpus.held_out, tokenizer, tokens_max=None), strict=True
    ):
        assert excerpt.is_whole
        assert excerpt.data == document.data
        assert (excerpt.ids[0], excerpt.ids[-1]) == (BOS_TOKEN_ID, EOS_TOKEN_ID)
        assert excerpt.byte_symbols.tolist() == [*document.data, BYTE_END]


def test_cut_excerpt_has_the_bytes_of_its_tokens_and_no_end(
    corpus: Corpus, tokenizer: Tokenizer
) -> None:
    whole = cut_excerpts(corpus.held_out, tokenizer, tokens_max=None)
    for entire, excerpt in zip(
        whole, cut_excerpts(corpus.held_out, tokenizer, tokens_max=50), strict=True
    ):
        assert (excerpt.tokens, excerpt.is_whole) == (50, False)
        assert excerpt.ids.tolist() == entire.ids[:51].tolist()
        assert entire.data.startswith(excerpt.data)
        assert excerpt.byte_symbols.tolist() == list(excerpt.data)


def test_cut_just_before_the_end_takes_the_end_away(corpus: Corpus, tokenizer: Tokenizer) -> None:
    (whole,) = cut_excerpts(corpus.held_out[:1], tokenizer, tokens_max=None)
    (equal,) = cut_excerpts(corpus.held_out[:1], tokenizer, tokens_max=whole.tokens)
    (cut,) = cut_excerpts(corpus.held_out[:1], tokenizer, tokens_max=whole.tokens - 1)
    assert equal.is_whole
    assert not cut.is_whole
    assert cut.data == whole.data
