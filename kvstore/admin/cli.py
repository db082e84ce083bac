"""The entry point of `cachalot`: from a command line to an exit status.

Whatever a user can cause ends here as one line on stderr. A traceback means a mistake of ours.
"""

import sys

from ..early_interrupt import end_at_interrupt, raise_at_interrupt
from ..errors import StoreError, describe_os_error, shorten_lines
from .exit_codes import ExitCode


def main() -> None:
    """Run the command line of this process, and end it."""
    end_at_interrupt()
    # After that: it takes a moment.
    from ..identity import check_package_identity

    check_package_identity()
    sys.exit(run())


def run() -> int | str | None:
    """Run the command line of this process; what to give to `sys.exit`."""
    # After the check: the modules behind this may not be the ones that were meant.
    import typer

    from .commands import app
    from .output import NAME, write_remark

    try:
        raise_at_interrupt()
        code: int | None = app(prog_name=NAME, standalone_mode=False)
        return code
    except SystemExit as end:
        return end.code
    except typer.TyperException as error:
        # As typer would show it, but for words of any length.
        error.message = shorten_lines(error.message)
        error.show()  # type: ignore[attr-defined]
        return error.exit_code
    except typer.Abort:
        write_remark("aborted")
        return ExitCode.FAILED
    except StoreError as error:
        write_remark(str(error))
        return error.exit_code
    except OSError as error:
        write_remark(describe_os_error(error))
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    main()
