"""The commands of `cachalot`, put together. What each does is in its own module.

To add one: a module `<name>_command.py` with a function whose parameters are its options, and a
line at the end of this file. Heavy imports belong inside the function, so that `--help` is quick.
"""

from typing import Annotated

import typer

from .bench_command import bench
from .down_command import down
from .exit_codes import describe_exit_codes
from .output import NAME, write_result
from .status_command import status
from .up_command import up

# "\b" keeps the lines of the list apart.
EPILOG = f"\b\nExit codes:\n{describe_exit_codes()}"

# Plain help: it is drawn without rich, which would take as long to load as everything else.
app = typer.Typer(
    name=NAME,
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import PackageNotFoundError, version

        from ..identity import DISTRIBUTION

        try:
            write_result(f"{NAME} {version(DISTRIBUTION)}")
        except PackageNotFoundError:
            write_result(f"{NAME} (not installed, run from its source)")
        raise typer.Exit


@app.callback()
def cachalot(
    is_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Keeps the KV cache of language models on storage nodes."""


app.command("up")(up)
app.command("down")(down)
app.command("status")(status)
app.command("bench")(bench)
