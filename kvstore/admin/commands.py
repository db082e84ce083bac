"""The commands of `cachalot`, put together. What each does is in its own module.

To add one: a module `<name>_command.py` with a function whose parameters are its options, and a
line at the end of this file. Heavy imports belong inside the function, so that `--help` is quick.
"""

from typing import Annotated

import typer

from .agent_command import agent
from .bench_command import bench
from .down_command import down
from .drain_command import drain
from .engine_command import engine
from .exit_codes import describe_exit_codes
from .gc_command import app as gc_app
from .inspect_command import inspect
from .output import NAME, write_result
from .policy_command import app as policy_app
from .settings_command import app as settings_app
from .status_command import status
from .top_command import top
from .ttl_command import app as ttl_app
from .up_command import up
from .verify_command import verify
from .watermark_command import app as watermark_app

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
app.command("top")(top)
app.add_typer(ttl_app, name="ttl")
app.add_typer(watermark_app, name="watermark")
app.add_typer(policy_app, name="policy")
app.add_typer(settings_app, name="settings")
app.add_typer(gc_app, name="gc")
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("drain")(drain)
app.command("bench")(bench)
app.command("agent")(agent)
app.command(
    "engine",
    # All of it is the worker's, --help too.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(engine)
