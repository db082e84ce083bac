"""The command line of the demo.

Exit codes: 0 all went as claimed; 1 a claim did not hold, or a part failed; 2 a wrong argument, or
no model; 128 + its number for a signal (130 for Ctrl-C).
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from engine.errors import EngineError
from kvstore.errors import StoreError

from .display import choose_display
from .document import TOKENS_MAX, TOKENS_MIN, MissingText
from .interruption import Interruption
from .nodes import CommandFailed
from .outcomes import Outcome
from .run import DemoOptions, run_demo

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help="Ask a real model about a long text, and break its storage nodes meanwhile.")
def demo(
    tokens: Annotated[
        int, typer.Option(help="length of the text", min=TOKENS_MIN, max=TOKENS_MAX)
    ] = 4_000,
    keep: Annotated[
        bool, typer.Option("--keep", help="leave nodes and folder as they are")
    ] = False,
    is_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object at the end")
    ] = False,
) -> None:
    display = choose_display(Console(), is_json=is_json)
    with Interruption() as interruption:
        try:
            outcomes = run_demo(DemoOptions(tokens_max=tokens, is_kept=keep), display, interruption)
        except KeyboardInterrupt:
            raise typer.Exit(interruption.exit_code) from None
        except (CommandFailed, EngineError, MissingText, OSError, StoreError) as error:
            print(f"demo: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(getattr(error, "exit_code", 1)) from error
    if is_json:
        print(json.dumps(describe(outcomes)))
    else:
        display.finish(outcomes)
    broken = describe_broken(outcomes)
    if broken:
        print(f"demo: {broken}", file=sys.stderr)
        raise typer.Exit(1)


def describe(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The JSON object: every request with its numbers, its answer and its claims."""
    requests = []
    for outcome in outcomes:
        reply = asdict(outcome.reply)
        prompt_tokens = len(reply.pop("prompt_ids"))
        answer_tokens = len(reply.pop("token_ids"))
        requests.append(
            {
                "number": outcome.request.number,
                "title": outcome.request.title,
                "prompt_tokens": prompt_tokens,
                "answer_tokens": answer_tokens,
                **reply,
                "claims": [asdict(claim) for claim in outcome.claims],
            }
        )
    return {"requests": requests, "all_claims_hold": not describe_broken(outcomes)}


def describe_broken(outcomes: Sequence[Outcome]) -> str:
    """Which claims did not hold, on one line; empty if all did."""
    return "; ".join(
        f"request {outcome.request.number} ({outcome.request.title}): not so: {claim.text}"
        for outcome in outcomes
        for claim in outcome.broken_claims
    )
