"""Train `v41-mini`: the model proper first, then its draft stages with the model frozen.

    python -m training.train --data FOLDER --out FOLDER --target-minutes 7 --draft-minutes 2.5

`--data`: corpus.npz (`training.pack`) and compressed_ids.npz (`training.compressed_ids`). Into
`--out` go log.jsonl and state.pt; with `--resume` a run goes on from there, and a part that was
finished is not run again. `--start-from` takes the weights of a model's folder to begin with. The
same seed gives the same data in the same order; how many steps fit into the minutes is the
machine's. `--profile` measures steps of several sizes instead. It needs torch, numpy and
safetensors only.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .batches import read_streams
from .command import ending_in_one_line, not_negative, share, whole_number
from .compressed_ids import read_compressed_ids
from .export import read_parameters
from .mini_config import POSITIONS_MAX, config_of_ids
from .parameters import initialise
from .positions import Positions
from .profile_steps import SIZES, profile_steps
from .steps import Geometry
from .training_run import Settings, Training

VALIDATION_WINDOWS = 64
TOKENS_MIN = 16
"""A draft block and every ratio of compression have room in so many."""
BATCH_MAX = 4_096
SEED_MAX = 2**62


def read_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train v41-mini.")
    parser.add_argument("--data", type=Path, required=True, help="folder with corpus.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log and the state")
    minutes = "0 leaves the part out"
    parser.add_argument("--target-minutes", type=not_negative, default=7.0, help=minutes)
    parser.add_argument("--draft-minutes", type=not_negative, default=2.5, help=minutes)
    parser.add_argument(
        "--steps", type=whole_number(0), default=0, help="end a part after so many steps"
    )
    parser.add_argument(
        "--batch", type=whole_number(1, BATCH_MAX), default=16, help="sequences of a step"
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(TOKENS_MIN, POSITIONS_MAX),
        default=2_048,
        help="of a sequence",
    )
    parser.add_argument("--dropout", type=share, default=0.1)
    parser.add_argument("--seed", type=whole_number(0, SEED_MAX), default=1)
    parser.add_argument(
        "--log-every", type=whole_number(1), default=20, help="steps between log records"
    )
    parser.add_argument("--validate-every-s", type=not_negative, default=30.0)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usable_device, default=default_device)
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--start-from", type=Path, help="folder of a model to begin with")
    parser.add_argument("--profile", action="store_true", help="only measure steps")
    arguments = parser.parse_args(given)
    if not arguments.target_minutes and not arguments.draft_minutes:
        parser.error("--target-minutes, --draft-minutes: given 0 for both, expected one above 0")
    return arguments


def usable_device(text: str) -> torch.device:
    """For an option: a device that holds a tensor."""
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
        is_known = device.type in ("cpu", "cuda")
    except (AssertionError, RuntimeError):
        # AssertionError: the library was built without that kind of device.
        is_known = False
    if not is_known:
        raise argparse.ArgumentTypeError(
            f"given {text}, expected cpu or a CUDA device that is here"
        )
    return device


def settings_of(arguments: argparse.Namespace) -> Settings:
    return Settings(
        seed=arguments.seed,
        batch=arguments.batch,
        tokens=arguments.tokens,
        target_minutes=arguments.target_minutes,
        draft_minutes=arguments.draft_minutes,
        steps=arguments.steps,
        log_every=arguments.log_every,
        validate_every_s=arguments.validate_every_s,
        validation_windows=VALIDATION_WINDOWS,
        captures=arguments.device.type == "cuda" and not arguments.eager,
        dropout=arguments.dropout,
    )


@ending_in_one_line()
def main(given: Sequence[str] | None = None) -> None:
    arguments = read_arguments(given)
    device = arguments.device
    # Products of activations and rounded weights lose nothing that matters; streams are excepted.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    compressed_ids = read_compressed_ids(arguments.data)
    config = config_of_ids(compressed_ids)
    longest = max(tokens for _, tokens in SIZES) if arguments.profile else arguments.tokens
    streams = read_streams(
        arguments.data / "corpus.npz",
        device,
        vocabulary=config.vocabulary,
        tokens_min=longest + 1,
    )
    generator = torch.Generator().manual_seed(arguments.seed)
    # Dropout draws from the device's own generator.
    torch.manual_seed(arguments.seed)
    if arguments.start_from is None:
        initial = initialise(config, generator)
    else:
        initial = read_parameters(arguments.start_from, config)
    parameters = {name: tensor.to(device).requires_grad_() for name, tensor in initial.items()}

    def geometry(batch: int, tokens: int) -> Geometry:
        positions = Positions(config, tokens, device, compressed_ids)
        return Geometry(config=config, positions=positions, batch=batch)

    if arguments.profile:
        profile_steps(parameters, geometry, streams[0], clock=time.perf_counter)
        return
    training = Training(
        settings_of(arguments),
        geometry(arguments.batch, arguments.tokens),
        parameters,
        streams,
        arguments.out,
        time.monotonic,
    )
    if arguments.resume:
        training.resume()
    training.run()


if __name__ == "__main__":
    main()
