"""One training step of the model proper, or of its draft stages, and how it is run on a device.

A step reads its input from tensors that stay where they are, and looks at no number on the host: so
that after a few runs it can be captured as one CUDA graph, which replaces some ten thousand
launches by one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.models.deepseek_v41.config import DeepseekV41Config

from .batched_feed_forward import balance_experts
from .batched_model import BatchedModel
from .draft_model import DraftLoss, DraftModel, draft_loss
from .optimiser import Optimiser
from .parameters import names_of_draft, names_of_target, storages_of
from .positions import Positions
from .rounding import round_weights

INDEX_LOSS_WEIGHT = 1.0
"""It has gradients of its own only: what it takes from the language loss is a part of the common
norm when gradients are clipped."""
GRADIENT_NORM_MAX = 1.0
SAMPLED_SHARE = 8
"""The indexers learn from one query in so many."""
ANCHORS_SHARE = 16
"""The drafts are trained at one place in so many."""

Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Geometry:
    """Everything of a run that has one size for all steps."""

    config: DeepseekV41Config
    positions: Positions
    batch: int

    @property
    def tokens(self) -> int:
        return self.positions.tokens

    @property
    def device(self) -> torch.device:
        return self.positions.device


class TargetStep:
    """Trains the model proper. `metrics`: names of what `run` returns."""

    metrics = ("loss", "index_loss", "gradient_norm", "busiest_expert_share")

    def __init__(self, geometry: Geometry, parameters: Parameters, *, dropout: float = 0.0) -> None:
        self._geometry, self._parameters = geometry, parameters
        self._storages = storages_of(geometry.config)
        self.trained = {name: parameters[name] for name in names_of_target(parameters)}
        self.optimiser = Optimiser(self.trained)
        self._model = BatchedModel(geometry.config, geometry.positions, dropout=dropout)
        device = geometry.device
        self.ids = torch.zeros(geometry.batch, geometry.tokens + 1, dtype=torch.long, device=device)
        queries = max(geometry.config.window // SAMPLED_SHARE, 1)
        self._sampled_R = torch.zeros(queries, dtype=torch.long, device=device)

    def prepare(self, ids: torch.Tensor, generator: torch.Generator) -> None:
        """Set the input of the next run: ids int64 [B, T + 1]."""
        self.ids.copy_(ids)
        order = torch.randperm(self._geometry.config.window, generator=generator)
        self._sampled_R.copy_(order[: len(self._sampled_R)])

    def run(self) -> torch.Tensor:
        """One step with what was prepared; the metrics, float32 on the device."""
        self.optimiser.clear_gradients()
        p = round_weights(self._parameters_of_target(), self._storages)
        forward = self._model.forward(p, self.ids[:, :-1], sampled_R=self._sampled_R)
        logits = self._model.logits(p, forward.hidden_BTE)
        loss = F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())
        index_losses = torch.stack(forward.index_losses)
        (loss + INDEX_LOSS_WEIGHT * index_losses.sum()).backward()
        norm = self.optimiser.clip_gradients(GRADIENT_NORM_MAX)
        self.optimiser.step()
        busiest = _balance(self._parameters, forward.expert_counts)
        return torch.stack([loss.detach(), index_losses.detach().mean(), norm, busiest])

    def _parameters_of_target(self) -> Parameters:
        return {n: p for n, p in self._parameters.items() if not n.startswith("mtp.")}


class DraftStep:
    """Trains the draft stages; the model proper is frozen, as a checkpoint would hold it."""

    metrics = (
        "loss",
        "cross_entropy",
        "variation",
        "confidence_loss",
        "gradient_norm",
        "busiest_expert_share",
    )

    def __init__(self, geometry: Geometry, parameters: Parameters) -> None:
        self._geometry, self._parameters = geometry, parameters
        self._storages = storages_of(geometry.config)
        self.trained = {name: parameters[name] for name in names_of_draft(parameters)}
        self.optimiser = Optimiser(self.trained)
        self._target = BatchedModel(geometry.config, geometry.positions)
        self._draft = DraftModel(geometry.config, geometry.positions)
        frozen = {n: p.detach() for n, p in parameters.items() if not n.startswith("mtp.")}
        self._frozen = round_weights(frozen, self._storages)
        device = geometry.device
        self.ids = torch.zeros(geometry.batch, geometry.tokens + 1, dtype=torch.long, device=device)
        anchors = max(geometry.tokens // ANCHORS_SHARE, 1)
        self._anchors_A = torch.zeros(anchors, dtype=torch.long, device=device)

    def prepare(self, ids: torch.Tensor, generator: torch.Generator) -> None:
        """Set the input of the next run: ids int64 [B, T + 1], with anchors drawn at random."""
        self.ids.copy_(ids)
        last = self._geometry.tokens - self._geometry.config.draft.block_tokens
        self._anchors_A.copy_(torch.randint(last, self._anchors_A.shape, generator=generator))

    def run(self) -> torch.Tensor:
        """One step with what was prepared; the metrics, float32 on the device."""
        self.optimiser.clear_gradients()
        loss, counts = self.loss()
        loss.total.backward()
        norm = self.optimiser.clip_gradients(GRADIENT_NORM_MAX)
        self.optimiser.step()
        busiest = _balance(self._parameters, counts)
        parts = (loss.total, loss.cross_entropy, loss.variation, loss.confidence)
        return torch.stack([*(part.detach() for part in parts), norm, busiest])

    def loss(self) -> tuple[DraftLoss, dict[str, torch.Tensor]]:
        """The loss of what was prepared, and how many tokens each expert got."""
        own = {n: p for n, p in self._parameters.items() if n.startswith("mtp.")}
        p = self._frozen | round_weights(own, self._storages)
        block = self._geometry.config.draft.block_tokens
        steps_K = torch.arange(1, block + 1, device=self.ids.device)
        places_AK = self._anchors_A.unsqueeze(-1) + steps_K
        with torch.no_grad():
            forward = self._target.forward(p, self.ids[:, :-1])
            hidden = _at(forward.hidden_BTE, places_AK)
            target_logits = self._target.logits(p, hidden)
        drafts = self._draft.forward(
            p, forward.targets_BTF, self._anchors_A, _at(self.ids, places_AK)
        )
        loss = draft_loss(drafts, target_logits, _at(self.ids, places_AK + 1))
        return loss, drafts.expert_counts


def _at(x: torch.Tensor, places_AK: torch.Tensor) -> torch.Tensor:
    """[B, A, K, ...] of x [B, T, ...]."""
    return x.index_select(1, places_AK.flatten()).unflatten(1, places_AK.shape)


def _balance(parameters: Parameters, counts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Move every router's bias; the largest share of one expert in any layer, 1 being fair."""
    shares = []
    for prefix, count in counts.items():
        balance_experts(parameters[f"{prefix}.gate.bias"], count)
        shares.append(count.max() / count.mean())
    return torch.stack(shares).max()


WARM_UP_RUNS = 3
"""Before a capture: lazy initialisation and the first sizes of the allocator are over by then."""


class Runner:
    """Runs a step again and again: as a graph on a CUDA device if asked for, else call by call."""

    def __init__(self, run: Callable[[], torch.Tensor], *, captures: bool) -> None:
        self._run, self._captures = run, captures
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._metrics = torch.empty(0)

    def __call__(self) -> torch.Tensor:
        """The metrics of this run; the next one may overwrite them."""
        if not self._captures:
            return self._run()
        self._runs += 1
        if self._runs <= WARM_UP_RUNS:
            return self._run_aside()
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        return self._metrics

    def _run_aside(self) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            metrics = self._run()
        torch.cuda.current_stream().wait_stream(stream)
        return metrics

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._metrics = self._run()
