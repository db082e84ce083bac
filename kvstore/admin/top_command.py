"""`cachalot top`: what the nodes of a cluster do right now, again and again."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .control_options import ClusterOption, ControlOption, JsonOption, TokenFileOption
from .output import is_terminal, write_json, write_result, write_table

if TYPE_CHECKING:
    from ..client import StoreClient
    from .top_view import Look, TopFrame


@dataclass(frozen=True, slots=True)
class _Asked:
    """The cluster, and how its workers are reached."""

    path: Path
    token_file: Path | None
    control: str | None


def top(
    cluster: ClusterOption,
    interval_s: Annotated[
        float,
        typer.Option("--interval-s", help="Between two looks.", metavar="S", min=0.1, max=3600.0),
    ] = 2.0,
    count: Annotated[
        int | None,
        typer.Option(help="End after so many looks (on a terminal: at Ctrl-C).", min=1),
    ] = None,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show live what each node does: fill, hits, rates.

    On a terminal the table stays in place until Ctrl-C. Elsewhere one look is shown, or --count
    looks; with --json each is one line.
    """
    import asyncio
    from contextlib import suppress

    is_live = is_terminal() and not is_json
    asked = _Asked(cluster, token_file, control)
    looks_max = count if count is not None or is_live else 1
    # Ctrl-C is how one leaves it.
    with suppress(KeyboardInterrupt):
        if is_live:
            _show_live(asked, interval_s, looks_max)
        else:
            write = _write_json if is_json else _write_plain
            asyncio.run(_run(asked, interval_s, looks_max, write))


async def _run(
    asked: _Asked,
    interval_s: float,
    looks_max: int | None,
    write: "Callable[[TopFrame], None]",
) -> None:
    async for frame in _frames(asked, interval_s, looks_max):
        write(frame)


async def _frames(
    asked: _Asked, interval_s: float, looks_max: int | None
) -> "AsyncIterator[TopFrame]":
    """A frame every `interval_s`; each look takes so long at most too."""
    import asyncio

    from ..client import StoreClient
    from .top_view import compare_looks

    async with StoreClient.connect(asked.path) as store:
        before, shown = await _look(store, asked, interval_s), 0
        while looks_max is None or shown < looks_max:
            await asyncio.sleep(interval_s)
            after = await _look(store, asked, interval_s)
            yield compare_looks(before, after)
            before, shown = after, shown + 1


async def _look(store: "StoreClient", asked: _Asked, interval_s: float) -> "Look":
    import asyncio
    import time

    from .cluster_status import describe_cluster
    from .top_view import Look
    from .worker_status import ask_workers

    deadline_s = max(min(interval_s, 2.0), 0.5)
    reports, workers = await asyncio.gather(
        store.node_reports(deadline_s=deadline_s),
        ask_workers(store.map, asked.path, asked.token_file, deadline_s, asked.control),
    )
    status = describe_cluster(store.map, reports).with_usage(workers)
    return Look(
        at_s=time.monotonic(),
        reports=reports,
        status=status,
        workers=workers.seen_beside(status.alive, status.silent_targets),
    )


def _show_live(asked: _Asked, interval_s: float, looks_max: int | None) -> None:
    """The table of a terminal, drawn in place."""
    import asyncio

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from .output import make_table
    from .top_view import COLUMNS, LEFT_COLUMNS, render_lines, render_rows

    with Live(Text("asking ..."), auto_refresh=False, screen=looks_max is None) as live:

        def draw(frame: "TopFrame") -> None:
            table = make_table(COLUMNS, render_rows(frame), LEFT_COLUMNS)
            lines = Text("\n".join(["", *render_lines(frame)]))
            live.update(Group(table, lines), refresh=True)

        asyncio.run(_run(asked, interval_s, looks_max, draw))


def _write_json(frame: "TopFrame") -> None:
    from .top_view import render_json

    write_json(render_json(frame))


def _write_plain(frame: "TopFrame") -> None:
    from .top_view import COLUMNS, LEFT_COLUMNS, render_lines, render_rows

    write_table(COLUMNS, render_rows(frame), left_columns=LEFT_COLUMNS)
    write_result("\n".join(["", *render_lines(frame), ""]))
