"""The value of `--dir`, as `cachalot up` and `cachalot down` take it."""

from pathlib import Path

import typer


def parse_folder(text: str) -> Path:
    """The folder of a cluster. Raises BadParameter for an empty value.

    A path without words is the current folder, so that a shell variable that was never set would
    let `down --wipe` work there.
    """
    if not text.strip():
        raise typer.BadParameter("given an empty value, expected a folder")
    return Path(text)
