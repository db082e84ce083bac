"""What the server that forks workers has in memory: an import of the tensor library takes a second,
which each worker of a test would take again. Not for the tests' own process."""

from engine.threads import prepare_environment

prepare_environment()

import engine.worker.assembly  # noqa: E402 - only now: the tensor library reads the environment
import engine.worker.main  # noqa: E402, F401
