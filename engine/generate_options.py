"""Who helps `engine.generate` to answer, and for how long it waits for them: its options, and which
of them go together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .errors import InvalidRequest

NO_CLUSTER = "none"

WAIT_OPTIONS = {
    "first_token_s": "--first-token-deadline",
    "between_tokens_s": "--token-deadline",
    "waiting_s": "--waiting-deadline",
    "patience_s": "--patience",
}
WAIT_MAX_S = 86_400.0

AgentOption = Annotated[
    Path | None,
    typer.Option(help="socket of this host's agent, in place of --cluster", metavar="<path>"),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        help="cluster map of a store that is used without an agent, or none", metavar="<path>"
    ),
]
EnginesOption = Annotated[
    str | None,
    typer.Option(
        help="ask engine workers: a folder of their sockets, or the address of one",
        metavar="<path>",
    ),
]
FirstTokenOption = Annotated[
    float | None,
    typer.Option(
        WAIT_OPTIONS["first_token_s"],
        min=0.001,
        max=WAIT_MAX_S,
        help="seconds without a word of a worker before its first token, after which it is left for"
        " another one (120)",
        metavar="<s>",
    ),
]
BetweenTokensOption = Annotated[
    float | None,
    typer.Option(
        WAIT_OPTIONS["between_tokens_s"],
        min=0.001,
        max=WAIT_MAX_S,
        help="the same from one token to the next (30)",
        metavar="<s>",
    ),
]
WaitingOption = Annotated[
    float | None,
    typer.Option(
        WAIT_OPTIONS["waiting_s"],
        min=0.001,
        max=WAIT_MAX_S,
        help="seconds without a token, in line or not, before it is given up (3600)",
        metavar="<s>",
    ),
]
PatienceOption = Annotated[
    float | None,
    typer.Option(
        WAIT_OPTIONS["patience_s"],
        min=0.0,
        max=WAIT_MAX_S,
        help="seconds that all workers may be lost, busy or draining before it is given up (60)",
        metavar="<s>",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who helps to answer: a block store, behind an agent's socket or on the nodes of a map; or
    engine workers; or nobody."""

    agent: Path | None = None
    cluster: Path | None = None
    engines: str | None = None


def choose_place(*, agent: Path | None, cluster: str, engines: str | None) -> Place:
    """Where the options say that help is. Raises InvalidRequest if they name two places."""
    named = [
        option
        for option, is_named in (
            ("--agent", agent is not None),
            ("--cluster", cluster != NO_CLUSTER),
            ("--engines", engines is not None),
        )
        if is_named
    ]
    if len(named) > 1:
        raise InvalidRequest(
            "store", given=f"both {' and '.join(named)}", expected="one of them, or none"
        )
    return Place(
        agent=agent, cluster=None if cluster == NO_CLUSTER else Path(cluster), engines=engines
    )


def choose_waits(place: Place, **waits_s: float | None) -> dict[str, float]:
    """How long workers are waited for, by the names of `ClientDeadlines`: what was said of it.

    Raises InvalidRequest if there are none to wait for.
    """
    said = {name: wait_s for name, wait_s in waits_s.items() if wait_s is not None}
    if said and place.engines is None:
        raise InvalidRequest(
            WAIT_OPTIONS[min(said)],
            given="without --engines",
            expected="with it: a model in this process is not waited for",
        )
    return said


def check_max_tokens(max_tokens: int) -> None:
    """Before a model is loaded for nothing. Raises InvalidRequest."""
    if max_tokens < 1:
        raise InvalidRequest("--max-tokens", given=max_tokens, expected="1 or more")
