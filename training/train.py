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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .batched_model import BatchedModel
from .batches import TokenStream, read_streams
from .compressed_ids import read_compressed_ids
from .export import read_parameters
from .mini_config import mini_config
from .optimiser import learning_rate_factor
from .parameters import count_parameters, initialise, storages_of
from .positions import Positions
from .profile_steps import profile_steps
from .rounding import round_weights
from .steps import DraftStep, Geometry, Runner, TargetStep
from .training_log import TrainingLog

STATE_FILE, LOG_FILE = "state.pt", "log.jsonl"
VALIDATION_WINDOWS = 64
DRAFT_SEED = 1_000_003
"""Added to the seed for the second part, so that it does not see the first one's order again."""

Clock = Callable[[], float]
Step = TargetStep | DraftStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is: `minutes` of each part by its name; `steps` ends a part earlier, if not 0."""

    seed: int
    batch: int
    tokens: int
    target_minutes: float
    draft_minutes: float
    steps: int
    log_every: int
    validate_every_s: float
    validation_windows: int
    captures: bool
    dropout: float

    def minutes(self, part: str) -> float:
        return self.target_minutes if part == "target" else self.draft_minutes


@dataclass(slots=True)
class Progress:
    """Of one part: what of it is done, in earlier processes too."""

    step: int = 0
    elapsed_s: float = 0.0
    is_finished: bool = False

    def share(self, settings: Settings, part: str) -> float:
        """Done of the part, 0 to 1, by time or by steps, whichever is further."""
        by_time = self.elapsed_s / max(settings.minutes(part) * 60, 1e-9)
        by_steps = self.step / settings.steps if settings.steps else 0.0
        return min(max(by_time, by_steps), 1.0)


class Training:
    """One run of both parts in one process."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        parameters: dict[str, torch.Tensor],
        streams: tuple[TokenStream, TokenStream],
        out: Path,
        clock: Clock,
    ) -> None:
        self._settings, self._geometry = settings, geometry
        self._parameters = parameters
        self._training, self._held_out = streams
        self._out, self._clock = out, clock
        self._log = TrainingLog(out / LOG_FILE)
        self._progress = {"target": Progress(), "draft": Progress()}
        self._optimiser_state: dict[str, Any] | None = None
        self._generator_state: torch.Tensor | None = None

    def resume(self) -> None:
        """Take over what an earlier process left; raises FileNotFoundError if it left nothing."""
        state = torch.load(self._out / STATE_FILE, map_location="cpu", weights_only=True)
        for name, parameter in self._parameters.items():
            parameter.data.copy_(state["parameters"][name])
        for part, values in state["progress"].items():
            self._progress[part] = Progress(**values)
        self._optimiser_state = state["optimiser"]
        self._generator_state = state["generator"]

    def run(self) -> None:
        """Both parts, each until its time or its steps are over."""
        settings = asdict(self._settings)
        total = count_parameters(self._geometry.config)
        device = torch.cuda.get_device_name() if self._geometry.device.type == "cuda" else "cpu"
        self._log.write("run", "settings", parameters=total, device=device, **settings)
        for part, progress in self._progress.items():
            if not progress.is_finished and self._settings.minutes(part) > 0:
                self._run_part(part, self._step_of(part), progress)

    def _step_of(self, part: str) -> Step:
        if part == "draft":
            return DraftStep(self._geometry, self._parameters)
        return TargetStep(self._geometry, self._parameters, dropout=self._settings.dropout)

    def _run_part(self, part: str, step: Step, progress: Progress) -> None:
        settings, batch = self._settings, self._settings.batch
        generator = torch.Generator().manual_seed(
            settings.seed + (DRAFT_SEED if part == "draft" else 0)
        )
        self._take_over(step, generator)
        runner = Runner(step.run, captures=settings.captures)
        started_s = self._clock() - progress.elapsed_s
        validated_s = progress.elapsed_s
        while (share := progress.share(settings, part)) < 1.0:
            step.optimiser.set_rate(learning_rate_factor(share))
            step.prepare(self._training.sample(batch, settings.tokens + 1, generator), generator)
            metrics = runner()
            progress.step += 1
            if progress.step % settings.log_every and progress.step != settings.steps:
                continue
            # Reading the numbers waits for the device: only then is the time that of the work.
            values = dict(zip(step.metrics, metrics.tolist(), strict=True))
            progress.elapsed_s = self._clock() - started_s
            self._log_step(part, progress, values, learning_rate_factor(share))
            if progress.elapsed_s - validated_s >= settings.validate_every_s:
                validated_s = progress.elapsed_s
                self._validate(part, step, progress)
                self._save(step, generator)
        progress.is_finished = True
        self._validate(part, step, progress)
        self._save(step, generator)

    def _take_over(self, step: Step, generator: torch.Generator) -> None:
        """The state of a part that an earlier process began; nothing for a new part."""
        if self._optimiser_state is not None and self._generator_state is not None:
            step.optimiser.load_state(self._optimiser_state)
            generator.set_state(self._generator_state)
        self._optimiser_state = self._generator_state = None

    def _log_step(
        self, part: str, progress: Progress, values: dict[str, float], rate: float
    ) -> None:
        if values["loss"] != values["loss"]:
            raise FloatingPointError(f"{part} step {progress.step}: the loss is not a number")
        tokens = progress.step * self._settings.batch * self._settings.tokens
        self._log.write(
            part,
            "step",
            step=progress.step,
            elapsed_s=round(progress.elapsed_s, 2),
            tokens=tokens,
            rate=round(rate, 5),
            **{name: round(value, 5) for name, value in values.items()},
        )

    def _validate(self, part: str, step: Step, progress: Progress) -> None:
        if isinstance(step, TargetStep):
            values = {"bits_per_byte": self._bits_per_byte()}
        else:
            values = self._judge_drafts(step)
        self._log.write(
            part,
            "validation",
            step=progress.step,
            elapsed_s=round(progress.elapsed_s, 2),
            **{name: round(value, 5) for name, value in values.items()},
        )

    @torch.no_grad()
    def _bits_per_byte(self) -> float:
        """Of held-out text in windows from position 0, with weights as a checkpoint keeps them."""
        geometry = self._geometry
        model = BatchedModel(geometry.config, geometry.positions)
        p = round_weights(self._parameters, storages_of(geometry.config))
        nats = []
        for ids in self._validation_windows():
            logits = model.logits(p, model.forward(p, ids[:, :-1]).hidden_BTE)
            nats.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
        return self._held_out.bits_per_byte(sum(nats) / len(nats))

    @torch.no_grad()
    def _judge_drafts(self, step: DraftStep) -> dict[str, float]:
        """The draft losses on held-out text, always at the same places."""
        generator = torch.Generator().manual_seed(self._settings.seed)
        parts = []
        for ids in self._validation_windows():
            step.prepare(ids, generator)
            loss, _ = step.loss()
            parts.append(torch.stack([loss.cross_entropy, loss.variation, loss.confidence]))
        mean = torch.stack(parts).mean(0).tolist()
        return dict(zip(("cross_entropy", "variation", "confidence_loss"), mean, strict=True))

    def _validation_windows(self) -> list[torch.Tensor]:
        """Whole batches, so that shapes are those of training."""
        batch = self._settings.batch
        count = max(self._settings.validation_windows // batch, 1) * batch
        return list(self._held_out.spread(count, self._settings.tokens + 1).split(batch))

    def _save(self, step: Step, generator: torch.Generator) -> None:
        """Replace the state file; the old one stays whole until the new one is."""
        partial = self._out / (STATE_FILE + ".partial")
        finished = all(
            progress.is_finished or not progress.step for progress in self._progress.values()
        )
        state = {
            "parameters": {n: p.detach().cpu() for n, p in self._parameters.items()},
            "progress": {part: asdict(progress) for part, progress in self._progress.items()},
            # Between two parts there is nothing to take over.
            "optimiser": None if finished else step.optimiser.state(),
            "generator": None if finished else generator.get_state(),
        }
        torch.save(state, partial)
        partial.replace(self._out / STATE_FILE)


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
    settings = Settings(
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
    training = Training(
        settings,
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
