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
from pathlib import Path

import torch

from .batches import read_streams
from .compressed_ids import read_compressed_ids
from .export import read_parameters
from .mini_config import mini_config
from .parameters import initialise
from .positions import Positions
from .profile_steps import profile_steps
from .steps import Geometry
from .training_run import Settings, Training

VALIDATION_WINDOWS = 64


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train v41-mini.")
    parser.add_argument("--data", type=Path, required=True, help="folder with corpus.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log and the state")
    parser.add_argument("--target-minutes", type=float, default=7.0)
    parser.add_argument("--draft-minutes", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=0, help="end a part after so many steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=2_048, help="of a sequence")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=20, help="steps between log records")
    parser.add_argument("--validate-every-s", type=float, default=30.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--start-from", type=Path, help="folder of a model to begin with")
    parser.add_argument("--profile", action="store_true", help="only measure steps")
    return parser.parse_args()


def settings_of(arguments: argparse.Namespace, device: torch.device) -> Settings:
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
        captures=device.type == "cuda" and not arguments.eager,
        dropout=arguments.dropout,
    )


def main() -> None:
    arguments = read_arguments()
    device = torch.device(arguments.device)
    # Products of activations and rounded weights lose nothing that matters; streams are excepted.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    compressed_ids = read_compressed_ids(arguments.data)
    config = mini_config(int(compressed_ids.max()) + 1)
    generator = torch.Generator().manual_seed(arguments.seed)
    # Dropout draws from the device's own generator.
    torch.manual_seed(arguments.seed)
    if arguments.start_from is None:
        initial = initialise(config, generator)
    else:
        initial = read_parameters(arguments.start_from, config)
    parameters = {name: tensor.to(device).requires_grad_() for name, tensor in initial.items()}
    streams = read_streams(arguments.data / "corpus.npz", device)

    def geometry(batch: int, tokens: int) -> Geometry:
        positions = Positions(config, tokens, device, compressed_ids)
        return Geometry(config=config, positions=positions, batch=batch)

    if arguments.profile:
        profile_steps(parameters, geometry, streams[0], clock=time.perf_counter)
        return
    training = Training(
        settings_of(arguments, device),
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
