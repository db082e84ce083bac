"""`cachalot verify`: reads random blocks from all nodes and checks every byte."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .control_options import (
    ClusterOption,
    ControlOption,
    JsonOption,
    TokenFileOption,
    open_control,
)
from .exit_codes import ExitCode
from .output import progress_bar, write_json, write_remark, write_result, write_table
from .quantities import count_of, format_size

if TYPE_CHECKING:
    from ..errors import StoreError
    from .control_client import Answer, ControlEndpoint, ControlPlane

PART_BLOCKS_MAX = 100_000
"""What the API takes in one request (`control.changes.VerifyBody`). A node is asked only once: two
requests would draw the same block twice."""
AWAKE_DEADLINE_S = 15.0
"""A worker loads its API when it is asked for the first time."""
PART_DEADLINE_S = 300.0
SLACK_S = 20.0
"""For the answer of a request that used all of its time."""
COLUMNS = ("key", "shard", "node", "what")
LEFT_COLUMNS = frozenset({"key", "node", "what"})
PROBLEMS_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks that one worker is asked to verify in one request."""

    endpoint: "ControlEndpoint"
    sample: int


def verify(
    cluster: ClusterOption,
    sample: Annotated[
        int,
        typer.Option(help="Blocks to check, over all nodes.", metavar="N", min=1, max=1_000_000),
    ] = 100,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    is_json: JsonOption = False,
) -> None:
    """Read random blocks and check every byte.

    No node draws a block twice; two nodes may draw the same one, which is said.
    Each is read from every node that holds a shard of it. Renews nothing and repairs nothing;
    damaged shards are reported to their nodes. Ends with exit code 7 if not every block is whole.
    """
    _, plane = open_control(cluster, control, token_file)
    awake, absent = find_awake(plane)
    parts = plan_parts(awake, sample)
    answers = _ask_all(plane, parts)
    found, silent = sum_up([*answers, *absent])
    if len(silent) == len(answers) + len(absent):
        raise explain_silence([*answers, *absent], are_all_asked=len(parts) == len(awake))
    for problem in sorted(set(silent)):
        write_remark(problem)
    if is_json:
        write_json(found)
    else:
        _write(found)
    if found["whole"] < found["verified"] or silent:
        raise typer.Exit(ExitCode.NOT_WHOLE)


def explain_silence(
    answers: "Sequence[Answer | StoreError]", *, are_all_asked: bool
) -> "StoreError":
    """The error of a command that no worker gave an answer. Pure."""
    from .control_client import ControlRefused, no_worker

    errors = [answer for answer in answers if not isinstance(answer, dict)]
    # A refusal, as of the token, says itself who has to act.
    refused = [error for error in errors if isinstance(error, ControlRefused)]
    if refused:
        return refused[0]
    # For a small sample some that are awake were not asked: nothing is said of those.
    return no_worker(sorted(set(map(str, errors)))) if are_all_asked else errors[0]


def find_awake(plane: "ControlPlane") -> "tuple[list[ControlEndpoint], list[StoreError]]":
    """Whose worker answers, and what is the matter with the others: their share of the sample goes
    to those, as a node is asked for blocks only once."""
    from .control_client import ControlUnreachable

    answers = plane.ask_each("GET", "/healthz", deadline_s=AWAKE_DEADLINE_S)
    absent = {
        node: answer for node, answer in answers.items() if isinstance(answer, ControlUnreachable)
    }
    return [one for one in plane.endpoints if one.node not in absent], [*absent.values()]


def plan_parts(endpoints: Sequence["ControlEndpoint"], sample: int) -> list[Part]:
    """As many blocks of each node as fall to it, in one request. Pure."""
    parts = []
    for number, endpoint in enumerate(endpoints):
        share = sample // len(endpoints) + (number < sample % len(endpoints))
        if share:
            parts.append(Part(endpoint, min(share, PART_BLOCKS_MAX)))
    return parts


def _ask_all(plane: "ControlPlane", parts: list[Part]) -> "list[Answer | StoreError]":
    """Every part's answer or error. All nodes are asked side by side."""
    from ..errors import StoreError

    def ask(part: Part) -> "Answer | StoreError":
        body = {"sample": part.sample, "deadline_s": PART_DEADLINE_S}
        deadline_s = PART_DEADLINE_S + SLACK_S
        answer: Answer | StoreError
        try:
            answer = plane.ask(
                part.endpoint, "POST", "/api/verify", body=body, deadline_s=deadline_s
            )
        except StoreError as error:
            answer = error
        done.append(part.sample)
        bar.show(sum(done), f"{part.endpoint.node} is done")
        return answer

    done: list[int] = []
    with progress_bar("verifying", sum(part.sample for part in parts)) as bar:
        return plane.run_side_by_side([partial(ask, part) for part in parts])


def sum_up(answers: "Sequence[Answer | StoreError]") -> tuple[dict[str, Any], list[str]]:
    """The sum of what workers found, as JSON shows it, and the problems of those that did not."""
    silent = [str(answer) for answer in answers if not isinstance(answer, dict)]
    given = [answer for answer in answers if isinstance(answer, dict)]
    shards: Counter[str] = Counter()
    problems: list[dict[str, Any]] = []
    for answer in given:
        shards.update(answer.get("shards") or {})
        problems += answer.get("problems") or []
    names = ("asked", "verified", "good", "whole", "bytes")
    found: dict[str, Any] = {
        name: sum(int(answer.get(name, 0)) for answer in given) for name in names
    }
    found["is_time_up"] = not all(answer.get("is_complete", True) for answer in given)
    found["is_complete"] = not found["is_time_up"] and not silent
    keys = {str(key) for answer in given for key in answer.get("keys") or []}
    found["distinct"] = len(keys)
    found["shards"] = dict(shards)
    found["problems"] = problems
    found["unreachable"] = silent
    return found, silent


def _write(found: dict[str, Any]) -> None:
    problems = found["problems"]
    if problems:
        rows = [[str(one.get(name, "?")) for name in COLUMNS] for one in problems]
        write_table(COLUMNS, rows[:PROBLEMS_SHOWN_MAX], left_columns=LEFT_COLUMNS)
        hidden = len(problems) - PROBLEMS_SHOWN_MAX
        write_result(f"... and {hidden} more (--json lists all)\n" if hidden > 0 else "")
    write_result("\n".join(describe(found)))


def describe(found: dict[str, Any]) -> list[str]:
    """What was found, in a few lines."""
    verified, good, whole = found["verified"], found["good"], found["whole"]
    if not verified:
        return ["no block was found to verify"]
    distinct = found["distinct"]
    drawn = f" ({distinct:,} distinct, others by several nodes)" if distinct < verified else ""
    lines = [
        f"{count_of(verified, 'block')} verified{drawn}, {format_size(found['bytes'])} read:"
        f" {whole:,} whole, {good - whole:,} readable but not whole, {verified - good:,} unreadable"
    ]
    bad = {state: count for state, count in found["shards"].items() if state != "good"}
    if bad:
        listed = ", ".join(f"{count:,} {state}" for state, count in sorted(bad.items()))
        lines.append(f"shards that are not good: {listed}")
    reasons = ["the time was up"] if found["is_time_up"] else []
    silent = len(found["unreachable"])
    reasons += [f"{count_of(silent, 'worker')} did not answer"] if silent else []
    if reasons:
        lines.append(f"not complete: {', and '.join(reasons)}")
    return lines
