"""What a hit with bounded replay, and the decoder tail, cost a trained model in bits a byte.

    python -m training.evaluate_replay --model FOLDER [--documents N] [--json]

After prompts of several lengths, starts of held-out files, the next tokens of the file are judged;
between the ways differs only how the prompt was computed. Files are taken that are long enough for
all lengths. Ends with an assertion if a hit with window state gives other bits than a cold prompt,
or a replay rewrites a block. Progress goes to stderr.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.threads import prepare_environment, set_thread_count

from .command import InvalidInput, ending_in_one_line, require_folder, whole_number
from .corpus import Corpus, find_library, read_both_sides
from .excerpts import Excerpt, choose_documents, cut_excerpts
from .replay_scores import JudgedAnswer, LengthScore, format_lengths, score_lengths
from .tokenizer import read_token_bytes, read_tokenizer

if TYPE_CHECKING:
    from .replay_bits import PrefixJudge

DOCUMENTS = 8
PROMPT_LENGTHS = (400, 700, 1_200, 1_900)
ANSWER_TOKENS = 128
"""With DOCUMENTS, about a minute for the reference operations on one core."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Scores by prompt length, and what was judged."""

    model: str
    corpus_sha256: str
    answer_tokens: int
    scores: list[LengthScore]
    answers: list[JudgedAnswer]


def evaluate_replay(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    model_folder: Path,
    documents: int,
    prompt_lengths: Sequence[int],
    answer_tokens: int,
    progress: Progress,
) -> ReplayReport:
    """Judge the model of the folder.

    Raises InvalidInput if the model's positions or all held-out files are too short for the longest
    prompt and its answer, or a prompt is too short to be hit, and what opening a model raises.
    """
    # The tensor library reads its environment once; the program sets it before.
    from engine.models.deepseek_v41.load import load_model

    from .replay_bits import PROMPT_TOKENS_MIN, PrefixJudge

    loaded = load_model(model_folder)
    tokens = max(prompt_lengths) + answer_tokens
    if min(prompt_lengths) < PROMPT_TOKENS_MIN:
        expected = f"{PROMPT_TOKENS_MIN} tokens or more"
        raise InvalidInput("prompt", given=min(prompt_lengths), expected=expected)
    if tokens > loaded.config.positions_max:
        expected = f"at most {loaded.config.positions_max}, the model's positions"
        raise InvalidInput("prompt and answer", given=f"{tokens} tokens", expected=expected)
    excerpts = choose_long_excerpts(corpus, tokenizer, documents=documents, tokens=tokens)
    answers = _judge(
        PrefixJudge(loaded, tokens_max=tokens),
        excerpts,
        read_token_bytes(tokenizer),
        prompt_lengths=prompt_lengths,
        answer_tokens=answer_tokens,
        progress=lambda done: progress(f"{model_folder.name}: {done} of {len(excerpts)} documents"),
    )
    return ReplayReport(
        model=model_folder.name,
        corpus_sha256=corpus.sha256,
        answer_tokens=answer_tokens,
        scores=score_lengths(answers),
        answers=answers,
    )


def _judge(
    judge: "PrefixJudge",
    excerpts: Sequence[Excerpt],
    token_bytes: Sequence[bytes],
    *,
    prompt_lengths: Sequence[int],
    answer_tokens: int,
    progress: Callable[[int], None],
) -> list[JudgedAnswer]:
    answers = []
    for number, excerpt in enumerate(excerpts, 1):
        judged = judge.judge(
            excerpt.ids, prompt_lengths=prompt_lengths, answer_tokens=answer_tokens
        )
        for length, readings in zip(prompt_lengths, judged, strict=True):
            ids = excerpt.ids[length : length + answer_tokens]
            answers.append(
                JudgedAnswer(
                    path=excerpt.path,
                    prompt_tokens=length,
                    answer_bytes=sum(len(token_bytes[token_id]) for token_id in ids),
                    readings=readings,
                )
            )
        progress(number)
    return answers


def choose_long_excerpts(
    corpus: Corpus, tokenizer: Tokenizer, *, documents: int, tokens: int
) -> list[Excerpt]:
    """The first `tokens` ids, BOS included, of at most `documents` held-out files that have them.

    Raises InvalidInput if none has.
    """
    ordered = choose_documents(corpus.held_out, len(corpus.held_out))
    excerpts = cut_excerpts(ordered, tokenizer, tokens_max=tokens - 1)
    # One that is whole would end within an answer, by a token without bytes.
    long = [excerpt for excerpt in excerpts if len(excerpt.ids) == tokens and not excerpt.is_whole]
    if not long:
        expected = f"one of more than {tokens} tokens"
        given = f"{len(excerpts)} held-out file(s), all of them shorter"
        raise InvalidInput("library", given=given, expected=expected)
    return long[:documents]


def format_report(report: ReplayReport) -> str:
    """The scores as lines of text."""
    overall = report.scores[-1]
    return "\n".join(
        [
            f"{report.model}: {overall.documents} held-out document(s), {report.answer_tokens} "
            f"tokens after each prompt, {overall.answer_bytes:,} bytes; corpus "
            f"{report.corpus_sha256[:16]}",
            "bits a byte after a cold prompt; of the other ways thousandths of a bit more, and "
            "divergence [95 % intervals]",
            *format_lengths(report.scores),
        ]
    )


@ending_in_one_line()
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bits a byte after hits of several kinds.")
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the model, with its tokenizer.json"
    )
    parser.add_argument(
        "--documents", type=whole_number(1), default=DOCUMENTS, help="held-out files, at most"
    )
    parser.add_argument(
        "--prompts",
        type=whole_number(1),
        nargs="+",
        default=list(PROMPT_LENGTHS),
        help="tokens of the prompts",
    )
    parser.add_argument(
        "--answer",
        type=whole_number(1),
        default=ANSWER_TOKENS,
        help="tokens that are judged after each",
    )
    parser.add_argument(
        "--library", type=Path, default=find_library(), help="standard library of a Python"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(given)
    require_folder("model", arguments.model)
    report = evaluate_replay(
        read_both_sides(arguments.library),
        read_tokenizer(arguments.model / "tokenizer.json"),
        model_folder=arguments.model,
        documents=arguments.documents,
        prompt_lengths=arguments.prompts,
        answer_tokens=arguments.answer,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(asdict(report), indent=2) if arguments.json else format_report(report))


if __name__ == "__main__":
    prepare_environment()
    # Calls of a small model are too short to be worth two threads: they take half as long on one.
    set_thread_count(1)
    main()
