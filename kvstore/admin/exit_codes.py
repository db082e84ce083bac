"""What the exit status of `cachalot` says. The codes of errors stand on the errors themselves."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Every exit status of `cachalot`; scripts may rely on the numbers."""

    DONE = 0
    FAILED = 1
    WRONG_ARGUMENT = 2
    CLUSTER_MAP = 3
    NODE = 4
    TARGET = 5
    NODES_DOWN = 6
    NOT_WHOLE = 7
    NOT_DONE = 8
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed for another reason, which is on stderr",
    ExitCode.WRONG_ARGUMENT: "an argument is wrong, or differs from the cluster that is there",
    ExitCode.CLUSTER_MAP: "the cluster map is missing or has mistakes",
    ExitCode.NODE: "a node did not start, stop or answer",
    ExitCode.TARGET: "a node refused its folder: in use, damaged, or not this cluster's",
    ExitCode.NODES_DOWN: "status: nodes, entrypoints or engines are down, or targets are lost",
    ExitCode.NOT_WHOLE: "verify, inspect: a block is not whole, or not there",
    ExitCode.NOT_DONE: "drain, gc run: not done in time; it goes on by itself",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.OUTPUT_CLOSED: "whoever read the output went away",
}


def describe_exit_codes() -> str:
    """One line for each code, for the end of `cachalot --help`."""
    return "\n".join(f"{code.value:>5}  {meaning}" for code, meaning in MEANINGS.items())
