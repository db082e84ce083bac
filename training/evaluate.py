"""Bits a byte of a trained model and of two 3-gram models, on the same held-out files; its drafts.

    python -m training.evaluate [--model FOLDER] [--files N] [--tokens-max N] [--drafts N] [--json]

Without --model only the 3-gram models are judged, with a tokenizer trained on the spot. The 3-gram
models are counted from the training side each time: that takes seconds. Progress goes to stderr.
Whole files are judged as texts with an end: every model also pays for saying that a file ends.
Drafts start at some places of each file; what they guess is asked of the model, not of the file.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engine.threads import prepare_environment, set_thread_count

from .command import InvalidInput, ending_in_one_line, require_folder, whole_number
from .corpus import Corpus, find_library, read_both_sides
from .draft_scores import DraftScore, format_drafts, sum_up
from .excerpts import Excerpt, choose_documents, cut_excerpts
from .ngram import train_byte_trigrams, train_trigrams
from .tokenizer import BOS_TOKEN_ID, encode_documents, read_tokenizer, train_tokenizer

FILES = 24
TOKENS_MAX, DRAFTS = 2_048, 16
"""Of each file. With FILES, about a minute for the reference operations on 2 cores."""
DRAFTS_MAX = 10_000

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one model needs for the excerpts; `file_bits` in the order of the files."""

    model: str
    bits_per_byte: float
    bits_per_token: float
    file_bits: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Scores on the same excerpts, and what was judged; None for a model that makes no drafts."""

    corpus_sha256: str
    files: list[str]
    judged_bytes: int
    judged_tokens: int
    scores: list[Score]
    drafts: DraftScore | None


def train_baselines(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Callable[[Excerpt], float]]:
    """By name, what gives the bits of an excerpt: 3-grams over tokens, and over bytes."""
    encoded = encode_documents(tokenizer, [document.text for document in corpus.training])
    tokens = train_trigrams(
        (ids[1:].astype(np.int64) for ids in encoded),
        symbols=tokenizer.get_vocab_size(),
        start=BOS_TOKEN_ID,
    )
    octets = train_byte_trigrams(document.data for document in corpus.training)
    return {
        "3-gram, tokens": lambda excerpt: tokens.bits(excerpt.ids[1:]),
        "3-gram, bytes": lambda excerpt: octets.bits(excerpt.byte_symbols),
    }


def score(name: str, file_bits: Sequence[float], excerpts: Sequence[Excerpt]) -> Score:
    """Bits of all excerpts together, over their bytes and over their tokens."""
    bits = sum(file_bits)
    return Score(
        model=name,
        bits_per_byte=bits / sum(len(excerpt.data) for excerpt in excerpts),
        bits_per_token=bits / sum(excerpt.tokens for excerpt in excerpts),
        file_bits=list(file_bits),
    )


def evaluate(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    model_folder: Path | None,
    files: int,
    tokens_max: int | None,
    drafts: int,
    progress: Progress,
) -> Report:
    """Judge the model of the folder, if there is one, and both baselines.

    Raises InvalidInput for a library without held-out files and for files that are longer than the
    model's positions, and what opening a model's folder raises.
    """
    documents = choose_documents(corpus.held_out, files)
    if not documents:
        given = "no file of the held-out side"
        raise InvalidInput("library", given=given, expected="one or more")
    excerpts = cut_excerpts(documents, tokenizer, tokens_max=tokens_max)
    scores, draft_score = [], None
    if model_folder is not None:
        # The tensor library reads its environment once; the program sets it before.
        from .model_bits import read_documents

        readings = read_documents(
            model_folder, [excerpt.ids for excerpt in excerpts], progress, drafts=drafts
        )
        scores.append(score(model_folder.name, [reading.bits for reading in readings], excerpts))
        judged = [draft for reading in readings for draft in reading.drafts]
        draft_score = sum_up(judged) if judged else None
    progress("counting 3-grams")
    for name, bits_of in train_baselines(corpus, tokenizer).items():
        scores.append(score(name, [bits_of(excerpt) for excerpt in excerpts], excerpts))
    return Report(
        corpus_sha256=corpus.sha256,
        files=[excerpt.path for excerpt in excerpts],
        judged_bytes=sum(len(excerpt.data) for excerpt in excerpts),
        judged_tokens=sum(excerpt.tokens for excerpt in excerpts),
        scores=scores,
        drafts=draft_score,
    )


def format_table(report: Report) -> str:
    """The scores as lines of text."""
    width = max(len(line.model) for line in report.scores)
    return "\n".join(
        [
            f"{len(report.files)} held-out file(s), {report.judged_bytes:,} bytes, "
            f"{report.judged_tokens:,} tokens; corpus {report.corpus_sha256[:16]}",
            f"{'':{width}}  bits a byte  bits a token",
            *(
                f"{line.model:{width}}  {line.bits_per_byte:11.3f}  {line.bits_per_token:12.3f}"
                for line in report.scores
            ),
            *(format_drafts(report.drafts) if report.drafts is not None else ()),
        ]
    )


@ending_in_one_line()
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bits a byte on held-out files.")
    parser.add_argument("--model", type=Path, help="folder of the model, with its tokenizer.json")
    parser.add_argument(
        "--files", type=whole_number(1), default=FILES, help="held-out files, at most"
    )
    parser.add_argument(
        "--tokens-max",
        type=whole_number(0),
        default=TOKENS_MAX,
        help="tokens of each file; 0 for all",
    )
    parser.add_argument(
        "--drafts",
        type=whole_number(0, DRAFTS_MAX),
        default=DRAFTS,
        help="judged drafts of each file, at most",
    )
    parser.add_argument(
        "--library", type=Path, default=find_library(), help="standard library of a Python"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(given)
    report = _evaluate_folder(arguments)
    print(json.dumps(asdict(report), indent=2) if arguments.json else format_table(report))


def _evaluate_folder(arguments: argparse.Namespace) -> Report:
    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    tokenizer = None
    if arguments.model is not None:
        require_folder("model", arguments.model)
        tokenizer = read_tokenizer(arguments.model / "tokenizer.json")
    corpus = read_both_sides(arguments.library)
    if tokenizer is None:
        progress("training the tokenizer")
        tokenizer = train_tokenizer(document.text for document in corpus.training)
    return evaluate(
        corpus,
        tokenizer,
        model_folder=arguments.model,
        files=arguments.files,
        tokens_max=arguments.tokens_max or None,
        drafts=arguments.drafts,
        progress=progress,
    )


if __name__ == "__main__":
    prepare_environment()
    # Calls of a small model are too short to be worth two threads: they take half as long on one.
    set_thread_count(1)
    main()
