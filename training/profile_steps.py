"""How long training steps of several sizes take, and on what: to choose a size before a run."""

from collections.abc import Callable, Sequence

import torch

from .batches import TokenStream
from .steps import DraftStep, Geometry, Runner, TargetStep

SIZES = ((8, 1_024), (32, 1_024), (64, 1_024), (16, 2_048), (32, 2_048))
"""Sequences of a step, and tokens of each."""
TIMED_RUNS = 8
KERNELS_SHOWN = 25


def profile_steps(
    parameters: dict[str, torch.Tensor],
    geometry_of: Callable[[int, int], Geometry],
    stream: TokenStream,
    *,
    clock: Callable[[], float],
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> None:
    """Print, for each size, call by call and captured, the time of a step of either part.

    The parameters move as in training.
    """
    generator = torch.Generator().manual_seed(0)
    for batch, tokens in sizes:
        for step_of in (TargetStep, DraftStep):
            step = step_of(geometry_of(batch, tokens), parameters)
            step.optimiser.set_rate(0.1)
            step.prepare(stream.sample(batch, tokens + 1, generator), generator)
            for captures in (False, True) if step.ids.is_cuda else (False,):
                line = _time_runs(Runner(step.run, captures=captures), batch * tokens, clock)
                how = "graph" if captures else "eager"
                print(f"{step_of.__name__:10} {batch:3} x {tokens:5} {how}: {line}", flush=True)
            del step
            _empty_cache()
    _print_kernels(parameters, geometry_of, stream, generator)


def _time_runs(runner: Runner, tokens: int, clock: Callable[[], float]) -> str:
    started_s = clock()
    # The first runs initialise, the fourth captures.
    for _ in range(5 if torch.cuda.is_available() else 1):
        metrics = runner().tolist()
    warm_s = clock() - started_s
    started_s = clock()
    runs = TIMED_RUNS if torch.cuda.is_available() else 1
    for _ in range(runs):
        metrics = runner()
    metrics = metrics.tolist()
    step_s = (clock() - started_s) / runs
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return (
        f"{step_s * 1e3:8.1f} ms a step, {tokens / step_s / 1e3:8.1f} k tokens/s, "
        f"first runs {warm_s:.1f} s, {peak:.1f} GiB, loss {metrics[0]:.4f}"
    )


def _print_kernels(
    parameters: dict[str, torch.Tensor],
    geometry_of: Callable[[int, int], Geometry],
    stream: TokenStream,
    generator: torch.Generator,
) -> None:
    """What a step of the middle size spends its time on, call by call."""
    if not torch.cuda.is_available():
        return
    batch, tokens = 32, 1_024
    step = TargetStep(geometry_of(batch, tokens), parameters)
    step.prepare(stream.sample(batch, tokens + 1, generator), generator)
    step.run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step.run()
        torch.cuda.synchronize()
    averages = profile.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=KERNELS_SHOWN))


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
