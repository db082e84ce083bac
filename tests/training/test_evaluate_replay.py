"""The program that judges hits: files are long enough, its report adds up, mistakes are told."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.training.silent_model import write_silent_model
from tests.training.small_library import make_library, paths_of_side, put, source_text
from training.corpus import Corpus, Side, read_corpus
from training.evaluate_replay import ReplayReport, choose_long_excerpts, evaluate_replay
from training.replay_bits import PROMPT_TOKENS_MIN
from training.replay_scores import Prefix
from training.tokenizer import train_tokenizer

VOCABULARY = 384


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three held-out files, two of them long."""
    folder = make_library(tmp_path_factory.mktemp("library"))
    for path in paths_of_side(Side.HELD_OUT, 2):
        put(folder, path, path + "".join(source_text(number) for number in range(6)))
    return folder


@pytest.fixture(scope="module")
def corpus(library: Path) -> Corpus:
    return read_corpus(library)


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return train_tokenizer([d.text for d in corpus.training], vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "v41-silent"
    write_silent_model(folder, tokenizer)
    return folder


def evaluate(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, prompt: int, answer: int = 7
) -> ReplayReport:
    return evaluate_replay(
        corpus,
        tokenizer,
        model_folder=folder,
        documents=5,
        prompt_lengths=[prompt],
        answer_tokens=answer,
        progress=print,
    )


def test_excerpts_are_of_files_that_go_on(corpus: Corpus, tokenizer: Tokenizer) -> None:
    excerpts = choose_long_excerpts(corpus, tokenizer, documents=5, tokens=500)
    assert {e.path for e in excerpts} == set(paths_of_side(Side.HELD_OUT, 2))
    assert [(len(e.ids), e.is_whole) for e in excerpts] == [(500, False)] * 2
    assert len(choose_long_excerpts(corpus, tokenizer, documents=1, tokens=500)) == 1


def test_report_has_every_document_and_adds_up(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path
) -> None:
    report = evaluate(corpus, tokenizer, folder, prompt=PROMPT_TOKENS_MIN)
    assert [answer.path for answer in report.answers] == [
        excerpt.path
        for excerpt in choose_long_excerpts(
            corpus, tokenizer, documents=5, tokens=PROMPT_TOKENS_MIN + 7
        )
    ]
    for answer in report.answers:
        bits = {prefix: reading.bits for prefix, reading in answer.readings.items()}
        assert bits == pytest.approx(dict.fromkeys(Prefix, 7 * math.log2(VOCABULARY)))
    _, overall = report.scores
    assert overall.answer_bytes == sum(answer.answer_bytes for answer in report.answers)
    for line in overall.prefixes:
        assert line.bits == pytest.approx(14 * math.log2(VOCABULARY) / overall.answer_bytes)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (PROMPT_TOKENS_MIN - 1, f"prompt: given {PROMPT_TOKENS_MIN - 1}, expected"),
        (3_000, "library: given 3 held-out file(s), all of them shorter, expected one of more"),
        (10**7, "prompt and answer: given 10000007 tokens, expected at most"),
    ],
    ids=["nothing to hit", "no such file", "beyond the positions"],
)
def test_lengths_that_cannot_be_judged_are_refused(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, prompt: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(").replace(")", r"\)")):
        evaluate(corpus, tokenizer, folder, prompt=prompt)


def run_program(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training.evaluate_replay", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_program_judges_a_folder(library: Path, folder: Path) -> None:
    sizes = ("--documents", "1", "--prompts", "400", "--answer", "3", "--json")
    answer = run_program("--model", str(folder), "--library", str(library), *sizes)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["answer_tokens"] == 3
    assert [score["prompt_tokens"] for score in report["scores"]] == [400, None]
    assert "v41-silent: 1 of 1 documents" in answer.stderr


def test_program_says_what_it_cannot_use(folder: Path, tmp_path: Path) -> None:
    library = str(make_library(tmp_path))
    answer = run_program("--model", str(folder), "--library", library, "--prompts", "2000")
    assert answer.returncode == 2
    assert answer.stderr.startswith("library: given 3 held-out file(s)")
    assert "Traceback" not in answer.stderr
    assert run_program("--model", str(tmp_path / "none")).returncode == 2
