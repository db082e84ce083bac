"""The evaluation: every model is judged on the same bytes, and the sums are right."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.training.silent_model import write_silent_model
from tests.training.small_library import make_library
from training.corpus import Corpus, read_corpus
from training.evaluate import evaluate, format_table, train_baselines
from training.excerpts import cut_excerpts
from training.tokenizer import train_tokenizer

VOCABULARY = 384


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_corpus(make_library(tmp_path_factory.mktemp("library")))


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return train_tokenizer([d.text for d in corpus.training], vocabulary=VOCABULARY)


def test_baselines_are_judged_on_the_same_bytes(corpus: Corpus, tokenizer: Tokenizer) -> None:
    told: list[str] = []
    report = evaluate(
        corpus,
        tokenizer,
        model_folder=None,
        files=2,
        tokens_max=100,
        drafts=3,
        progress=told.append,
    )
    assert [score.model for score in report.scores] == ["3-gram, tokens", "3-gram, bytes"]
    assert (len(report.files), report.judged_tokens) == (2, 200)
    assert report.corpus_sha256 == corpus.sha256
    assert told == ["counting 3-grams"]
    assert report.drafts is None
    for score in report.scores:
        assert len(score.file_bits) == 2
        assert score.bits_per_byte * report.judged_bytes == pytest.approx(sum(score.file_bits))
        assert score.bits_per_token * report.judged_tokens == pytest.approx(sum(score.file_bits))
        # The made-up files are much alike, and none takes what chance would.
        assert 0.01 < score.bits_per_byte < 4.0


def test_baselines_know_nothing_of_the_held_out_side(corpus: Corpus, tokenizer: Tokenizer) -> None:
    excerpts = cut_excerpts(corpus.held_out, tokenizer, tokens_max=None)
    without = train_baselines(replace(corpus, held_out=()), tokenizer)
    both = (*corpus.training, *corpus.held_out)
    leaky = train_baselines(replace(corpus, training=both), tokenizer)
    for name, bits_of in train_baselines(corpus, tokenizer).items():
        bits = sum(map(bits_of, excerpts))
        assert bits == sum(map(without[name], excerpts))
        assert bits > sum(map(leaky[name], excerpts)), name


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v41-silent"
    write_silent_model(folder, tokenizer)
    return folder


def test_model_of_a_folder_is_judged_beside_the_baselines(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path
) -> None:
    told: list[str] = []
    report = evaluate(
        corpus,
        tokenizer,
        model_folder=folder,
        files=2,
        tokens_max=60,
        drafts=3,
        progress=told.append,
    )
    model, *baselines = report.scores
    assert model.bits_per_token == pytest.approx(math.log2(VOCABULARY))
    assert model.model == "v41-silent"
    assert all(score.bits_per_byte < model.bits_per_byte for score in baselines)
    assert told[:2] == ["v41-silent: 1 of 2 files", "v41-silent: 2 of 2 files"]
    assert report.drafts is not None
    assert (report.drafts.drafts, report.drafts.guesses[0].reached) == (6, 6)
    assert format_table(report).splitlines()[-6].split()[:2] == ["guess", "reached"]


def test_drafts_are_left_out_when_none_are_asked_for(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path
) -> None:
    report = evaluate(
        corpus, tokenizer, model_folder=folder, files=1, tokens_max=20, drafts=0, progress=print
    )
    assert report.drafts is None
    assert "guess" not in format_table(report)


def run_program(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training.evaluate", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_program_judges_a_folder(corpus: Corpus, folder: Path, tmp_path: Path) -> None:
    library = str(make_library(tmp_path))
    sizes = ("--files", "1", "--tokens-max", "30", "--drafts", "2", "--json")
    answer = run_program("--model", str(folder), "--library", library, *sizes)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["corpus_sha256"] == corpus.sha256
    assert report["scores"][0]["bits_per_token"] == pytest.approx(math.log2(VOCABULARY))
    assert report["drafts"]["drafts"] == 2
    assert [guess["guess"] for guess in report["drafts"]["guesses"]] == [1, 2, 3, 4, 5]
    assert "v41-silent: 1 of 1 files" in answer.stderr


def test_program_names_a_folder_without_a_model(tmp_path: Path) -> None:
    answer = run_program("--model", str(tmp_path / "none"), "--library", str(tmp_path))
    assert answer.returncode == 2
    assert "none" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--tokens-max", "-1"), "given -1, expected a whole number, 0 or more"),
        (("--files", "0"), "given 0, expected a whole number, 1 or more"),
        ((), "texts to train on"),
    ],
    ids=["tokens below zero", "no files", "too few texts"],
)
def test_program_says_what_it_cannot_do(
    options: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    answer = run_program(*options, "--library", str(make_library(tmp_path, training=1)))
    assert answer.returncode == 2
    assert complaint in answer.stderr
    assert "Traceback" not in answer.stderr


def test_library_without_held_out_files_is_refused(corpus: Corpus, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no file of the held-out side"):
        evaluate(
            replace(corpus, held_out=()),
            tokenizer,
            model_folder=None,
            files=1,
            tokens_max=9,
            drafts=0,
            progress=print,
        )


def test_report_is_printed_as_a_table_and_as_json(corpus: Corpus, tokenizer: Tokenizer) -> None:
    report = evaluate(
        corpus, tokenizer, model_folder=None, files=9, tokens_max=None, drafts=0, progress=print
    )
    size = sum(len(document.data) for document in corpus.held_out)
    heading, columns, *lines = format_table(report).splitlines()
    assert heading.startswith(f"3 held-out file(s), {size:,} bytes, ")
    assert columns.split() == ["bits", "a", "byte", "bits", "a", "token"]
    assert [line.rsplit(maxsplit=2)[1] for line in lines] == [
        f"{score.bits_per_byte:.3f}" for score in report.scores
    ]
    read = json.loads(json.dumps(asdict(report)))
    assert read["scores"][0]["file_bits"] == report.scores[0].file_bits
