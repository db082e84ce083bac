"""`python -m engine.worker`, the process behind `cachalot engine`: from a command line to an exit
status.

Exit codes, with one line on stderr: 0 after a drain or an interrupt; 1 failed; 2 a wrong argument,
or a model that cannot be used. An agent that is away costs hits and hand-overs until it is there.
The tensor library is loaded after the arguments have been read.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Before the imports, which take a while.
    from kvstore.early_interrupt import end_at_interrupt

    end_at_interrupt()

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import StoreError, shorten_lines
from kvstore.identity import check_package_identity

from ..errors import EngineError, describe_in_one_line
from ..given_paths import check_model_path
from ..scheduler.cost import read_cost
from ..threads import prepare_environment
from .address import parse_address
from .options import Role, WorkerOptions, parse_memory_bytes, read_ticket_key

NAME = "cachalot engine"
USER_ERROR = 2

EXIT_CODES = """\b
Exit codes:
    0  ended by SIGTERM, after a drain, or by Ctrl-C
    1  failed for another reason, which is on stderr
    2  a wrong argument, or a file or model that cannot be used"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


RoleOption = Annotated[
    Role,
    typer.Option(
        help="prefill: computes prompts, and hands them over; decode: goes on with them; both:"
        " answers alone"
    ),
]
ModelOption = Annotated[
    Path, typer.Option(help="GGUF file, or folder with config.json", metavar="PATH")
]
ListenOption = Annotated[
    str,
    typer.Option(
        help="where clients connect: the path of a Unix socket, which is made with mode 0600, or"
        " HOST:PORT, which anybody can use who can reach it",
        metavar="ADDRESS",
    ),
]
AgentOption = Annotated[
    Path | None,
    typer.Option(help="socket of this host's agent; needed but for `both`", metavar="PATH"),
]
NameOption = Annotated[str, typer.Option(help="what logs and status call it")]
PoolBlocksOption = Annotated[
    int | None, typer.Option(min=1, help="blocks of 128 tokens in memory (256)")
]
PoolMemoryOption = Annotated[
    str | None, typer.Option(help="the same as bytes, in its place", metavar="SIZE")
]
SequencesOption = Annotated[
    int, typer.Option(min=1, max=4096, help="sequences that are computed at one time")
]
QueueOption = Annotated[
    int, typer.Option(min=1, max=100_000, help="requests that may wait; more are refused")
]
StepBudgetOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="seconds of a step, of which prompts get what answers leave (0.2)"),
]
CostOption = Annotated[
    Path | None, typer.Option(help="file that engine.fit_cost wrote", metavar="FILE")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="of the CPU (1 for models below 512 MiB, else one a core)"),
]
DeviceOption = Annotated[
    str, typer.Option(help="where the model runs: cpu, cuda or cuda:1", metavar="DEVICE")
]
MustPinOption = Annotated[
    bool,
    typer.Option(
        "--must-pin", help="with a GPU: do not start if the agent's arena cannot be page-locked"
    ),
]
GraceOption = Annotated[
    float, typer.Option(min=0.0, max=86_400.0, help="seconds after SIGTERM until the rest moves")
]
ReadDeadlineOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        max=86_400.0,
        help="seconds that a client may be behind with reading its answer; it is let go then (30)",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(help="serve /metrics for Prometheus there, without a token", metavar="HOST:PORT"),
]
TicketKeyOption = Annotated[
    Path | None,
    typer.Option(
        help="file with the secret of all engines that hand over to each other; without it whoever"
        " speaks to a worker can put other tokens to a hand-over",
        metavar="FILE",
    ),
]
CheckOnlyOption = Annotated[
    bool,
    typer.Option("--check-only", help="check the options and where the model is to be, and end"),
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", help="write each log line as a JSON object")
]


@app.command(
    help="Run an engine worker until SIGTERM, which drains it, or Ctrl-C. Once it serves, one JSON"
    " line on stdout has its engine, role, listen and pid.",
    epilog=EXIT_CODES,
)
def engine(
    role: RoleOption,
    model: ModelOption,
    listen: ListenOption,
    agent: AgentOption = None,
    name: NameOption = "engine",
    pool_blocks: PoolBlocksOption = None,
    pool_memory: PoolMemoryOption = None,
    sequences: SequencesOption = 16,
    queue: QueueOption = 64,
    step_budget: StepBudgetOption = None,
    cost: CostOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    must_pin: MustPinOption = False,
    grace: GraceOption = 60.0,
    read_deadline: ReadDeadlineOption = None,
    metrics: MetricsOption = None,
    ticket_key: TicketKeyOption = None,
    is_log_json: LogJsonOption = False,
    is_check: CheckOnlyOption = False,
) -> None:
    options = WorkerOptions(
        role=role,
        model=model,
        listen=parse_address(listen, "--listen"),
        agent=agent,
        name=name,
        pool_blocks=pool_blocks,
        pool_bytes=None
        if pool_memory is None
        else parse_memory_bytes("--pool-memory", pool_memory),
        sequences=sequences,
        queue=queue,
        step_budget_s=step_budget,
        cost=None if cost is None else read_cost(cost),
        threads=threads,
        device=device,
        must_pin=must_pin,
        grace_s=grace,
        read_deadline_s=read_deadline,
        metrics=metrics,
        ticket_key=b"" if ticket_key is None else read_ticket_key(ticket_key),
        is_log_json=is_log_json,
    )
    if is_check:
        check_model_path(model)
        return
    prepare_environment()
    # Only now: it brings libraries that look at the environment.
    from .main import run_worker

    raise typer.Exit(run_worker(options))


def main() -> None:
    """Run the command line of this process, and end it."""
    check_package_identity()
    try:
        sys.exit(app(prog_name=NAME, standalone_mode=False))
    except typer.TyperException as error:
        # As typer would show it, but for words of any length.
        error.message = shorten_lines(error.message)
        error.show()  # type: ignore[attr-defined]
        sys.exit(error.exit_code)
    except (EngineError, StoreError, OSError) as error:
        sys.stderr.write(f"{NAME}: {describe_in_one_line(error)}\n")
        # An OSError is about a file or an address that the user named.
        sys.exit(error.exit_code if isinstance(error, EngineError | StoreError) else USER_ERROR)


if __name__ == "__main__":
    main()
