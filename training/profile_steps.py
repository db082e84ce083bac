"""How long training steps of several sizes take, and on what: to choose a size before a run."""

from collections.abc import Callable, Sequence

import torch

from .batches import TokenStream
from .steps import WARM_UP_RUNS, DraftStep, Geometry, Runner, TargetStep

SIZES = ((16, 1_024), (32, 1_024), (16, 2_048), (32, 2_048))
"""Sequences of a step, and tokens of each."""
DRAFT_SIZE = (16, 2_048)
TIMED_RUNS = 6
WARM_RUNS = WARM_UP_RUNS + 1
KERNELS_SHOWN = 30


def profile_steps(
    parameters: dict[str, torch.Tensor],
    geometry_of: Callable[[int, int], Geometry],
    stream: TokenStream,
    *,
    clock: Callable[[], float],
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> None:
    """Print, for each size, call by call and captured, the time of a step.

    The parameters move as in training.
    """
    generator = torch.Generator().manual_seed(0)
    for batch, tokens in sizes:
        for step_of in (TargetStep, DraftStep) if (batch, tokens) == DRAFT_SIZE else (TargetStep,):
            step = step_of(geometry_of(batch, tokens), parameters)
            step.optimiser.set_rate(0.1)
            step.prepare(stream.sample(batch, tokens + 1, generator), generator)
            for captures in (False, True) if step.ids.is_cuda else (False,):
                line = _time_runs(Runner(step.run, captures=captures), batch * tokens, clock)
                how = "graph" if captures else "eager"
                print(f"{step_of.__name__:10} {batch:3} x {tokens:5} {how}: {line}", flush=True)
            # They would keep the memory of the graph.
            step.optimiser.clear_gradients()
            del step
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    if torch.cuda.is_available():
        _print_kernels(parameters, geometry_of, stream, generator)


def _time_runs(runner: Runner, tokens: int, clock: Callable[[], float]) -> str:
    on_device = torch.cuda.is_available()
    started_s = clock()
    for _ in range(WARM_RUNS if on_device else 1):
        runner().tolist()
    warm_s = clock() - started_s
    runs = TIMED_RUNS if on_device else 1
    started_s = clock()
    for _ in range(runs):
        metrics = runner()
    loss = metrics[0].item()
    step_s = (clock() - started_s) / runs
    peak = torch.cuda.max_memory_reserved() / 2**30 if on_device else 0.0
    return (
        f"{step_s * 1e3:8.1f} ms a step, {tokens / step_s / 1e3:8.1f} k tokens/s, "
        f"first {WARM_RUNS} runs {warm_s:.1f} s, {peak:.1f} GiB, loss {loss:.4f}"
    )


def _print_kernels(
    parameters: dict[str, torch.Tensor],
    geometry_of: Callable[[int, int], Geometry],
    stream: TokenStream,
    generator: torch.Generator,
) -> None:
    """What a step of the middle size spends its time on, call by call."""
    batch, tokens = DRAFT_SIZE
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
