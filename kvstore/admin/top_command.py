"""`cachalot top`: what the nodes of a cluster do right now, again and again."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .control_options import ClusterOption, JsonOption, TokenFileOption
from .output import is_terminal, write_json, write_result, write_table

if TYPE_CHECKING:
    from ..client import StoreClient
    from .top_view import Look, TopFrame


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
    looks_max = count if count is not None or is_live else 1
    # Ctrl-C is how one leaves it.
    with suppress(KeyboardInterrupt):
        if is_live:
            _show_live(cluster, interval_s, looks_max, token_file)
        else:
            write = _write_json if is_json else _write_plain
            asyncio.run(_run(cluster, interval_s, looks_max, token_file, write))


async def _run(
    path: Path,
    interval_s: float,
    looks_max: int | None,
    token_file: Path | None,
    write: "Callable[[TopFrame], None]",
) -> None:
    async for frame in _frames(path, interval_s, looks_max, token_file):
        write(frame)


async def _frames(
    path: Path, interval_s: float, looks_max: int | None, token_file: Path | None
) -> "AsyncIterator[TopFrame]":
    """A frame every `interval_s`; each look takes so long at most too."""
    import asyncio

    from ..client import StoreClient
    from .top_view import compare_looks

    async with StoreClient.connect(path) as store:
        before, shown = await _look(store, path, token_file, interval_s), 0
        while looks_max is None or shown < looks_max:
            await asyncio.sleep(interval_s)
            after = await _look(store, path, token_file, interval_s)
            yield compare_looks(before, after)
            before, shown = after, shown + 1


async def _look(
    store: "StoreClient", path: Path, token_file: Path | None, interval_s: float
) -> "Look":
    import asyncio
    import time

    from .cluster_status import describe_cluster
    from .top_view import Look
    from .worker_status import ask_workers

    deadline_s = max(min(interval_s, 2.0), 0.5)
    reports, workers = await asyncio.gather(
        store.node_reports(deadline_s=deadline_s),
        asyncio.to_thread(ask_workers, store.map, path, token_file, deadline_s),
    )
    return Look(
        at_s=time.monotonic(),
        reports=reports,
        status=describe_cluster(store.map, reports),
        workers=workers,
    )


def _show_live(
    path: Path, interval_s: float, looks_max: int | None, token_file: Path | None
) -> None:
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

        asyncio.run(_run(path, interval_s, looks_max, token_file, draw))


def _write_json(frame: "TopFrame") -> None:
    from .top_view import render_json

    write_json(render_json(frame))


def _write_plain(frame: "TopFrame") -> None:
    from .top_view import COLUMNS, LEFT_COLUMNS, render_lines, render_rows

    write_table(COLUMNS, render_rows(frame), left_columns=LEFT_COLUMNS)
    write_result("\n".join(["", *render_lines(frame), ""]))
