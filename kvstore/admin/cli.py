"""The entry point of `cachalot`: from a command line to an exit status.

Whatever a user can cause ends here as one line on stderr. A traceback means a mistake of ours.
"""

import sys

from ..errors import StoreError, describe_os_error
from ..identity import check_package_identity
from .exit_codes import ExitCode


def main() -> None:
    """Run the command line of this process, and end it."""
    check_package_identity()
    sys.exit(run())


def run() -> int | str | None:
    """Run the command line of this process; what to give to `sys.exit`."""
    # After the check: the modules behind this may not be the ones that were meant.
    from .commands import app
    from .output import NAME, write_remark

    try:
        app(prog_name=NAME)
    except SystemExit as end:
        return end.code
    except StoreError as error:
        write_remark(str(error))
        return error.exit_code
    except OSError as error:
        write_remark(describe_os_error(error))
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    raise AssertionError("typer ends every command line by SystemExit")


if __name__ == "__main__":
    main()
