"""Speed and memory of the DeepSeek-V4.1 model on a CPU with the reference operations.

For each context length a line: prefill in chunks, then decode steps of one token, with the time
split into what by its nature grows with the context (scores of the index, choices among them) and
everything else, in microseconds a token. What is not by nature has to stay flat.

    python -m benchmarks.deepseek_v41 --model models/v41-mini

Without a folder: v41-nano with random weights.
"""

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from engine.threads import prepare_environment, set_thread_count

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
CHUNK_TOKENS = 512
THREADS_MAX = 1024
DECODE_STEPS = 32
GROWS_WITH_CONTEXT = frozenset(
    {
        "score_entries",
        "score_candidates",
        "select_topk",
        "select_candidate_blocks",
        "candidate_entries",
        "topk_of_candidates",
    }
)
ATTENTION = frozenset({"sparse_attention", "dequantise_window_rows"})


class Stopwatch:
    """Seconds spent in each operation of a table; calls inside a call count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._is_inside = False

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - begun
                self._is_inside = False

        return timed

    def take(self, wall_s: float, tokens: int) -> dict[str, float]:
        """Microseconds a token since the last call, by kind."""
        spent = dict(self.seconds)
        self.seconds.clear()
        choosing = sum(s for name, s in spent.items() if name in GROWS_WITH_CONTEXT)
        attention = sum(s for name, s in spent.items() if name in ATTENTION)
        per_token = 1e6 / tokens
        return {
            "us_per_token": round(wall_s * per_token, 1),
            "choosing_us_per_token": round(choosing * per_token, 1),
            "attention_us_per_token": round(attention * per_token, 1),
            "rest_us_per_token": round((wall_s - choosing - attention) * per_token, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with config.json, weights and tokenizer.json")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: all)")
    parser.add_argument("--longest", type=int, default=4096, help="longest context (default 4096)")
    arguments = parser.parse_args()
    if arguments.longest < LENGTHS[0]:
        parser.error(f"--longest: given {arguments.longest}, expected {LENGTHS[0]} or more")
    if arguments.threads is not None and not 1 <= arguments.threads <= THREADS_MAX:
        parser.error(f"--threads: given {arguments.threads}, expected 1 to {THREADS_MAX}")
    prepare_environment()
    set_thread_count(arguments.threads)
    from engine.errors import EngineError

    try:
        run(arguments.model, arguments.longest)
    except EngineError as error:
        print(f"benchmarks.deepseek_v41: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def load(path: str | None) -> Any:  # noqa: ANN401
    """The folder's model, or v41-nano with an id of its own for each token in Engram."""
    import torch

    from engine.models.deepseek_v41.load import LoadedModel, load_model
    from engine.models.deepseek_v41.random_weights import random_weights
    from engine.models.deepseek_v41.shipped import shipped_config

    if path is not None:
        return load_model(path)
    config = shipped_config("v41-nano")
    weights = random_weights(config, torch.Generator().manual_seed(1))
    return LoadedModel(config, weights, torch.arange(config.vocabulary))


def run(path: str | None, longest: int) -> None:
    import torch

    from engine.block_pool import BlockPool
    from engine.models.deepseek_v41.layout import block_layout
    from engine.models.deepseek_v41.state import StatePool
    from kernels.operations import REFERENCE

    watch = Stopwatch()
    operations = dataclasses.replace(
        REFERENCE,
        **{
            field.name: watch.wrap(field.name, getattr(REFERENCE, field.name))
            for field in dataclasses.fields(REFERENCE)
        },
    )
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loaded = load(path)
    config = loaded.config
    fits = config.positions_max - DECODE_STEPS
    lengths = [n for n in LENGTHS if n <= min(longest, fits)]
    if lengths[-1] < longest:
        note = f"contexts up to {lengths[-1]} are measured: powers of two that leave {DECODE_STEPS}"
        print(f"{note} of the model's {config.positions_max} positions", file=sys.stderr)
    layout = block_layout(config)
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=2 * max(lengths) // 128 + 2)
    states = StatePool(config, slots=1)
    model = loaded.build(pool, operations)
    after_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    emit(
        what="memory",
        loaded_bytes=after_bytes - before_bytes,
        block_bytes=layout.block_bytes,
        block_bytes_per_token=layout.block_bytes / 128,
        state_bytes=states.offsets.state_bytes,
        threads=torch.get_num_threads(),
    )
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        measure(model, pool, states, length, generator, watch)
    emit(what="peak", peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def measure(
    model: Any,  # noqa: ANN401
    pool: Any,  # noqa: ANN401
    states: Any,  # noqa: ANN401
    length: int,
    generator: Any,  # noqa: ANN401
    watch: Stopwatch,
) -> None:
    import torch

    from engine.models.deepseek_v41.rows import Chunk

    ids = torch.randint(3, model.config.vocabulary - 2, (length,), generator=generator).tolist()
    state = states.allocate()
    state.block_ids = pool.allocate(-(-(length + DECODE_STEPS) // 128))
    watch.seconds.clear()
    begun = time.perf_counter()
    for first in range(0, length, CHUNK_TOKENS):
        model.forward([Chunk(state=state, token_ids=ids[first : first + CHUNK_TOKENS])])
    wall_s = time.perf_counter() - begun
    emit(
        what="prefill",
        context_tokens=length,
        tokens_per_s=round(length / wall_s, 1),
        **watch.take(wall_s, length),
    )
    begun = time.perf_counter()
    for step in range(DECODE_STEPS):
        model.forward([Chunk(state=state, token_ids=[ids[step]])])
    wall_s = time.perf_counter() - begun
    emit(
        what="decode",
        context_tokens=length,
        tokens_per_s=round(DECODE_STEPS / wall_s, 1),
        **watch.take(wall_s, DECODE_STEPS),
    )
    pool.release(state.block_ids)
    states.release(state)


def emit(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
