"""`python -m demo`: seven requests to a real model whose KV cache lives on twelve storage nodes."""

import sys

from kvstore.early_interrupt import INTERRUPTED, end_at_interrupt, raise_at_interrupt


def main() -> None:
    """Run the command line of this process, and end it."""
    end_at_interrupt()
    # After that: it takes a moment.
    from kvstore.identity import check_package_identity

    check_package_identity()
    try:
        # After the check: the modules behind this may not be the ones that were meant.
        from .command import app

        raise_at_interrupt()
        app(prog_name="demo")
    except KeyboardInterrupt:
        # So early that there is nothing to clean up yet.
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
