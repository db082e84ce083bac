"""How commands speak: results on stdout, remarks on stderr, a drawn table only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from .exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

NAME = "cachalot"


def write_result(text: str) -> None:
    """Write lines to stdout. Ends the command quietly if whoever read it went away."""
    try:
        sys.stdout.write(text + "\n")
        # Here, and not at the interpreter's end, where a closed pipe can only be complained about.
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        raise typer.Exit(ExitCode.OUTPUT_CLOSED) from None


def write_json(value: object) -> None:
    """Write one JSON document to stdout, on one line."""
    write_result(json.dumps(value))


def write_remark(text: str) -> None:
    """Write a line to stderr, so that it never mixes with a result."""
    print(f"{NAME}: {text}", file=sys.stderr)


def is_terminal() -> bool:
    """Whether a person looks at stdout."""
    return sys.stdout.isatty()


def silence_stdout() -> None:
    """Let stdout lead nowhere: the interpreter flushes it once more when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def write_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left_columns: frozenset[str]
) -> None:
    """A table: drawn on a terminal, aligned columns otherwise. Other columns are set right."""
    if is_terminal():
        write_result(draw_table(header, rows, left_columns))
    else:
        write_result(align_columns(header, rows, left_columns))


def align_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], left_columns: frozenset[str]
) -> str:
    """Plain text with two spaces between columns."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if name in left_columns else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def draw_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left_columns: frozenset[str]
) -> str:
    """The same with the colours of a terminal; wider than that rather than cut short."""
    from rich.console import Console

    table = make_table(header, rows, left_columns)
    plain = align_columns(header, rows, left_columns)
    needed = max(len(line) for line in plain.splitlines())
    console = Console()
    console.width = max(console.width, needed)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


def make_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left_columns: frozenset[str]
) -> Table:
    """The table that `draw_table` draws, for whoever draws it in place."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in header:
        table.add_column(name, justify="left" if name in left_columns else "right", no_wrap=True)
    for row in rows:
        style = "red" if any(cell == "down" or cell.endswith("lost") for cell in row) else ""
        # Text, not markup: a name in square brackets is a name.
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


class Progress:
    """How far long work has come; drawn on a terminal only, and on stderr."""

    def __init__(self, advance: Callable[[int, str], None] | None = None) -> None:
        self._advance = advance

    def show(self, done: int, text: str = "") -> None:
        """So much of the whole is done; `text` says what is at hand."""
        if self._advance is not None:
            self._advance(done, text)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Progress]:
    """A bar from 0 to `total` while the block runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)

        def advance(done: int, text: str) -> None:
            bars.update(task, completed=done, description=f"{what} {text}".rstrip())

        yield Progress(advance)
