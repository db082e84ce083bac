"""Runs `gc_worker` and kills it the moment a step of an eviction is done.

python -m tests.gc_worker.killed_worker STEP --cluster FILE --node NAME
"""

import os
import signal
import sys

from gc_worker.main import main


def kill_at(wanted: str, step: str) -> None:
    if step == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], on_step=lambda step: kill_at(sys.argv[1], step)))
