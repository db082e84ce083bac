"""One training run of both parts: steps, log, validation, and a state that a run can go on from."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .batched_model import BatchedModel
from .batches import TokenStream
from .command import InvalidInput
from .optimiser import learning_rate_factor
from .parameters import count_parameters, storages_of
from .rounding import round_weights
from .state_file import read_state, write_state
from .steps import DraftStep, Geometry, Runner, TargetStep
from .training_log import TrainingLog

STATE_FILE, LOG_FILE = "state.pt", "log.jsonl"
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
        self._begun: dict[str, Any] | None = None
        """Of the part that an earlier process broke off: see `_save`."""

    def resume(self) -> None:
        """Take over what an earlier process left; raises InvalidInput if it left nothing sound."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        state = read_state(self._out / STATE_FILE, shapes)
        for name, parameter in self._parameters.items():
            parameter.data.copy_(state["parameters"][name])
        for part, values in state["progress"].items():
            self._progress[part] = Progress(**values)
        self._begun = state["begun"]

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
        self._take_over(part, step, generator)
        runner = Runner(step.run, captures=settings.captures)
        started_s = self._clock() - progress.elapsed_s
        validated_s = progress.elapsed_s
        while (share := progress.share(settings, part)) < 1.0:
            step.optimiser.set_rate(learning_rate_factor(share))
            step.prepare(self._training.sample(batch, settings.tokens + 1, generator), generator)
            metrics = runner()
            progress.step += 1
            is_logged = not progress.step % settings.log_every or progress.step == settings.steps
            # The rate of the first steps rises from 0 by the clock, which so has to be read.
            if not is_logged and progress.step > settings.log_every:
                continue
            # Reading the numbers waits for the device: only then is the time that of the work.
            values = dict(zip(step.metrics, metrics.tolist(), strict=True))
            progress.elapsed_s = self._clock() - started_s
            if not is_logged:
                continue
            self._log_step(part, progress, values, learning_rate_factor(share))
            if progress.elapsed_s - validated_s >= settings.validate_every_s:
                validated_s = progress.elapsed_s
                self._validate(part, step, progress)
                self._save(part, step, generator)
        progress.is_finished = True
        self._validate(part, step, progress)
        self._save(part, step, generator)

    def _take_over(self, part: str, step: Step, generator: torch.Generator) -> None:
        """The state of a part that an earlier process began; nothing for a new part."""
        begun, self._begun = self._begun, None
        if begun is not None and begun["part"] == part:
            step.optimiser.load_state(begun["optimiser"])
            generator.set_state(begun["data_order"])
            _set_device_random_state(self._geometry.device, begun["dropout"])

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

    def _save(self, part: str, step: Step, generator: torch.Generator) -> None:
        begun = {
            "part": part,
            "optimiser": step.optimiser.state(),
            "data_order": generator.get_state(),
            "dropout": _device_random_state(self._geometry.device),
        }
        state = {
            "parameters": {n: p.detach().cpu() for n, p in self._parameters.items()},
            "progress": {part: asdict(progress) for part, progress in self._progress.items()},
            # Of a part that is finished there is nothing to take over.
            "begun": None if self._progress[part].is_finished else begun,
        }
        write_state(self._out / STATE_FILE, state)


def _device_random_state(device: torch.device) -> torch.Tensor:
    """Of the generator that dropout draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_device_random_state(device: torch.device, state: torch.Tensor) -> None:
    if len(state) != len(_device_random_state(device)):
        given = f"one from another kind of device than {device.type}"
        raise InvalidInput("state to go on from", given=given, expected="the same kind")
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
