"""The model proper as one differentiable function of its parameters, for sequences from position 0.

No caches and no chunks: what `engine.models.deepseek_v41` computes token by token, computed for all
tokens at once. The numbers are the same up to the order of sums.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.models.deepseek_v41.config import DeepseekV41Config, LayerRole, plan_layers
from kernels.reference.engram import gate_engram
from kernels.reference.norm import rms_norm

from .batched_attention import BatchedAttention, Shared
from .batched_feed_forward import run_feed_forward
from .positions import Positions
from .residual_streams import Mix, begin_streams, collapse, mix_streams, write_back

Parameters = Mapping[str, torch.Tensor]
Observer = Callable[[str, int, torch.Tensor], None]


def ignore(what: str, layer: int, tensor: torch.Tensor) -> None:
    """Observe nothing."""


@dataclass(slots=True, eq=False)
class Forward:
    """`hidden_BTE`, final and normed; `targets_BTF`, what the draft stages see of each token.

    `index_losses`: one a layer with a top-k of its own. `expert_counts`: by the layer's prefix.
    """

    hidden_BTE: torch.Tensor
    targets_BTF: torch.Tensor
    index_losses: list[torch.Tensor]
    expert_counts: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """Streams [..., n, E], and the gates [..., n] with which the next sublayer reads them."""

    streams: torch.Tensor
    pre: torch.Tensor


def enter(config: DeepseekV41Config, p: Parameters, name: str, residual: Residual) -> torch.Tensor:
    """Normed input of the next sublayer, [..., E]."""
    u = collapse(residual.streams, residual.pre)
    return rms_norm(u, p[f"{name}.weight"], config.norm_epsilon)


def site_mix(config: DeepseekV41Config, p: Parameters, prefix: str, streams: torch.Tensor) -> Mix:
    """The gates of the site `prefix` (layers.N.hc_attn), from the streams that come in."""
    return mix_streams(
        streams,
        p[f"{prefix}_fn"],
        p[f"{prefix}_base"],
        p[f"{prefix}_scale"],
        iterations=config.sinkhorn_iterations,
        eps=config.stream_epsilon,
        norm_eps=config.norm_epsilon,
    )


class BatchedModel:
    """The formulas for one config and one length; parameters come with each call.

    `dropout`: the share of each sublayer's output channels that is left out at random (and the rest
    scaled up), against learning a small corpus by heart; 0 for anything but training.
    """

    def __init__(
        self, config: DeepseekV41Config, positions: Positions, *, dropout: float = 0.0
    ) -> None:
        self.config, self.positions = config, positions
        self._dropout = dropout
        self._roles = plan_layers(config)
        self._attention = BatchedAttention(config, positions)

    def forward(
        self,
        p: Parameters,
        ids_BT: torch.Tensor,
        *,
        sampled_R: torch.Tensor | None = None,
        observe: Observer = ignore,
    ) -> Forward:
        """Run token ids int64 [B, T]. `sampled_R`: queries of each window that the indexers learn
        from, int64; None for no index losses."""
        config, shared = self.config, Shared()
        embedding = p["embed.weight"].index_select(0, ids_BT.flatten()).view(*ids_BT.shape, -1)
        residual = Residual(*begin_streams(embedding, config.streams))
        targets: list[torch.Tensor] = []
        counts: dict[str, torch.Tensor] = {}
        for role in self._roles:
            if role.engram is not None:
                residual = self._add_ngrams(role, p, ids_BT, residual)
                observe("engram_out", role.index, residual.streams)
            if role.index in config.draft.target_layer_ids:
                targets.append(residual.streams.mean(-2))
            residual = self._attend(role, p, residual, shared, sampled_R)
            residual, counts[f"layers.{role.index}.ffn"] = self._feed_forward(role, p, residual)
            observe("streams", role.index, residual.streams)
        return Forward(
            enter(config, p, "norm", residual),
            torch.cat(targets, dim=-1),
            shared.index_losses,
            counts,
        )

    def logits(self, p: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] of normed hidden [..., E]."""
        return F.linear(hidden, p["head.weight"])

    def _attend(
        self,
        role: LayerRole,
        p: Parameters,
        residual: Residual,
        shared: Shared,
        sampled_R: torch.Tensor | None,
    ) -> Residual:
        prefix = f"layers.{role.index}"
        mix = site_mix(self.config, p, f"{prefix}.hc_attn", residual.streams)
        x = enter(self.config, p, f"{prefix}.attn_norm", residual)
        y = drop_out(self._attention.run(role, p, x, shared, sampled_R), self._dropout)
        return Residual(write_back(residual.streams, y, mix), mix.pre)

    def _feed_forward(
        self, role: LayerRole, p: Parameters, residual: Residual
    ) -> tuple[Residual, torch.Tensor]:
        return feed_forward_site(
            self.config,
            p,
            f"layers.{role.index}",
            residual,
            self.config.experts_per_token,
            dropout=self._dropout,
        )

    def _add_ngrams(
        self, role: LayerRole, p: Parameters, ids_BT: torch.Tensor, residual: Residual
    ) -> Residual:
        assert role.engram is not None
        prefix = f"layers.{role.index}.engram"
        index = self.positions.ngram_rows(role.engram, ids_BT)
        rows = p[f"{prefix}.embed.weight"].index_select(0, index.flatten())
        rows = rows.view(*ids_BT.shape, -1)
        streams = gate_engram(
            residual.streams,
            F.linear(rows, p[f"{prefix}.wkv.weight"]),
            p[f"{prefix}.q_weight"],
            p[f"{prefix}.k_weight"],
            None,
            self.config.norm_epsilon,
        )
        return Residual(streams, residual.pre)


def drop_out(y: torch.Tensor, share: float) -> torch.Tensor:
    """y with a share of its channels at 0 and the others scaled up."""
    return F.dropout(y, share) if share else y


def feed_forward_site(
    config: DeepseekV41Config,
    p: Parameters,
    prefix: str,
    residual: Residual,
    k: int,
    *,
    dropout: float = 0.0,
) -> tuple[Residual, torch.Tensor]:
    """The second site of a layer or draft stage, and how many tokens each expert got."""
    mix = site_mix(config, p, f"{prefix}.hc_ffn", residual.streams)
    x = enter(config, p, f"{prefix}.ffn_norm", residual)
    routed = run_feed_forward(
        p,
        f"{prefix}.ffn",
        x,
        k=k,
        scaling=config.routed_scaling,
        limit=config.swiglu_limit,
    )
    y = drop_out(routed.output, dropout)
    return Residual(write_back(residual.streams, y, mix), mix.pre), routed.counts
