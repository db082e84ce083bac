"""The attention sublayer for whole sequences: projections, compressed entries, indexer, output.

Nothing is cached: every row and entry of the sequences is made anew, rounded as the cache would
keep it. What an owner makes is handed to the layers that use it by `Shared`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.models.deepseek_v41.config import DeepseekV41Config, LayerKind, LayerRole
from kernels.reference.compressor import compress_groups
from kernels.reference.norm import rms_norm

from .index_loss import attention_mass, index_divergence
from .masked_selection import mark_pool, mark_topk
from .positions import Positions, RopeTable
from .rounding import round_index_entries, round_main_entries, round_window_rows
from .window_attention import Attended, attend, cut_pieces

Parameters = Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class Shared:
    """What later layers take from earlier ones in one pass."""

    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    """Main entries [B, G, D] of each owner."""
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index keys [B, G, J] of each owner."""
    is_chosen_BTG: torch.Tensor | None = None
    """The latest top-k."""
    is_pool_BTG: torch.Tensor | None = None
    """The candidate pool."""
    index_losses: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class BatchedAttention:
    config: DeepseekV41Config
    positions: Positions

    def run(
        self,
        role: LayerRole,
        p: Parameters,
        x_BTE: torch.Tensor,
        shared: Shared,
        sampled_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """Output [B, T, E]. With `sampled_R`, queries of each window piece, index losses are
        added to `shared`."""
        config = self.config
        prefix = f"layers.{role.index}.attn"
        rope = self.positions.rope_of(role.ratio)
        latent_BTQ = query_latents(config, p, prefix, x_BTE)
        q_BTHD = queries(config, p, prefix, latent_BTQ, rope)
        rows_BTD = window_rows(config, p, prefix, x_BTE, rope)
        if role.owns_kv:
            self._make_entries(role, p, x_BTE, shared)
        is_source = role.kind in (LayerKind.FULL, LayerKind.REINDEX)
        if is_source:
            self._choose(role, p, latent_BTQ.detach(), x_BTE.detach(), shared)
        attended = attend(
            q_BTHD,
            rows_BTD,
            self.positions.is_seen_CWK,
            shared.entries[role.kv_owner] if role.kv_owner is not None else None,
            shared.is_chosen_BTG if role.ratio else None,
            p[f"{prefix}.attn_sink"],
            config.softmax_scale,
        )
        if is_source and sampled_R is not None and attended.entry_logits is not None:
            loss = self._index_loss(
                role, p, latent_BTQ.detach(), x_BTE.detach(), shared, attended, sampled_R
            )
            shared.index_losses.append(loss)
        return project_output(config, p, prefix, attended.output, rope)

    def _make_entries(
        self, role: LayerRole, p: Parameters, x_BTE: torch.Tensor, shared: Shared
    ) -> None:
        config, prefix = self.config, f"layers.{role.index}.attn"
        groups = x_BTE.shape[1] // role.ratio
        x = x_BTE[:, : groups * role.ratio]
        content = _grouped(F.linear(x, p[f"{prefix}.compressor.wkv.weight"]), role.ratio)
        gate = None
        if role.ratio > 1:
            gate = _grouped(F.linear(x, p[f"{prefix}.compressor.wgate.weight"]), role.ratio)
        latent = rms_norm(
            compress_groups(gate, content),
            p[f"{prefix}.compressor.norm.weight"],
            config.norm_epsilon,
        )
        rope = self.positions.rope_of_entries(role.ratio)
        shared.entries[role.index] = round_main_entries(rope.turn(latent))
        # The indexer learns from its own loss only.
        key = rms_norm(
            F.linear(latent.detach(), p[f"{prefix}.indexer.wk.weight"]),
            p[f"{prefix}.indexer.k_norm.weight"],
            config.norm_epsilon,
        )
        shared.keys[role.index] = round_index_entries(rope.turn(key))

    @torch.no_grad()
    def _choose(
        self,
        role: LayerRole,
        p: Parameters,
        latent_BTQ: torch.Tensor,
        x_BTE: torch.Tensor,
        shared: Shared,
    ) -> None:
        config = self.config
        assert role.kv_owner is not None
        is_visible = self.positions.is_visible(role.ratio)
        keys = shared.keys[role.kv_owner]
        if not keys.shape[1]:
            shared.is_chosen_BTG = is_visible.expand(len(x_BTE), -1, -1)
            return
        rope = self.positions.rope_of(role.ratio)
        scores = self._scores(role, p, latent_BTQ, x_BTE, rope, keys)
        scores = scores.masked_fill(~is_visible, float("-inf"))
        if role.is_candidate_source:
            shared.is_pool_BTG = mark_pool(
                scores, is_visible, config.candidate_block_entries, config.candidate_blocks
            )
        if role.kind is LayerKind.REINDEX:
            assert shared.is_pool_BTG is not None
            scores = scores.masked_fill(~shared.is_pool_BTG, float("-inf"))
        shared.is_chosen_BTG = mark_topk(scores, config.index_topk)

    def _scores(
        self,
        role: LayerRole,
        p: Parameters,
        latent: torch.Tensor,
        x: torch.Tensor,
        rope: RopeTable,
        keys_BGJ: torch.Tensor,
    ) -> torch.Tensor:
        """Index scores [B, T, G]: sum over heads of w ReLU(q . k)."""
        config, prefix = self.config, f"layers.{role.index}.attn.indexer"
        q = F.linear(latent, p[f"{prefix}.wq_b.weight"])
        q = q.unflatten(-1, (config.index_heads, config.index_dim))
        q = round_index_entries(rope.turn(q))
        weights = F.linear(x, p[f"{prefix}.weights_proj.weight"]) * config.index_scale
        products = (q.flatten(1, 2) @ keys_BGJ.mT).relu()
        products = products.view(*q.shape[:3], -1)
        return (weights.unsqueeze(-2) @ products).squeeze(-2)

    def _index_loss(
        self,
        role: LayerRole,
        p: Parameters,
        latent_BTQ: torch.Tensor,
        x_BTE: torch.Tensor,
        shared: Shared,
        attended: Attended,
        sampled_R: torch.Tensor,
    ) -> torch.Tensor:
        window = self.config.window
        is_visible_CWG = self.positions.is_visible_CWG(role.ratio)
        sink = p[f"layers.{role.index}.attn.attn_sink"]
        mass = attention_mass(attended, self.positions.is_seen_CWK, is_visible_CWG, sink, sampled_R)
        sampled = [
            cut_pieces(x, window).index_select(2, sampled_R).flatten(1, 2)
            for x in (latent_BTQ, x_BTE)
        ]
        rope = self.positions.rope_of(role.ratio)
        rows = [
            cut_pieces(table.unsqueeze(0), window)[0].index_select(1, sampled_R).flatten(0, 1)
            for table in (rope.cos, rope.sin)
        ]
        assert role.kv_owner is not None
        latent, x = sampled
        keys = shared.keys[role.kv_owner]
        scores = self._scores(role, p, latent, x, RopeTable(*rows), keys)
        may_be_chosen = is_visible_CWG.index_select(1, sampled_R).flatten(0, 1)
        if role.kind is LayerKind.REINDEX:
            assert shared.is_pool_BTG is not None
            pool = cut_pieces(shared.is_pool_BTG, window).index_select(2, sampled_R)
            may_be_chosen = may_be_chosen & pool.flatten(1, 2)
        return index_divergence(scores, mass.flatten(1, 2), may_be_chosen.expand_as(scores))


def query_latents(
    config: DeepseekV41Config, p: Parameters, prefix: str, x: torch.Tensor
) -> torch.Tensor:
    """[..., q rank], shared by the queries of attention and of the indexer."""
    latent = F.linear(x, p[f"{prefix}.wq_a.weight"])
    return rms_norm(latent, p[f"{prefix}.q_norm.weight"], config.norm_epsilon)


def queries(
    config: DeepseekV41Config, p: Parameters, prefix: str, latent: torch.Tensor, rope: RopeTable
) -> torch.Tensor:
    """[..., H, D] after RoPE, without a norm by head."""
    q = F.linear(latent, p[f"{prefix}.wq_b.weight"])
    return rope.turn(q.unflatten(-1, (config.heads, config.head_dim)))


def window_rows(
    config: DeepseekV41Config, p: Parameters, prefix: str, x: torch.Tensor, rope: RopeTable
) -> torch.Tensor:
    """[..., D]: the latent row of each token, as a window ring keeps it."""
    kv = F.linear(x, p[f"{prefix}.wkv.weight"])
    kv = rms_norm(kv, p[f"{prefix}.kv_norm.weight"], config.norm_epsilon)
    return round_window_rows(rope.turn(kv))


def project_output(
    config: DeepseekV41Config, p: Parameters, prefix: str, o: torch.Tensor, rope: RopeTable
) -> torch.Tensor:
    """[..., E] of values [..., H, D]: turned back, then the grouped low-rank output."""
    o = rope.turn(o, inverse=True).flatten(-2)
    grouped = o.unflatten(-1, (config.output_groups, -1)).unsqueeze(-2)
    weights = p[f"{prefix}.wo_a.weight"].unflatten(0, (config.output_groups, config.output_rank))
    low_rank = torch.cat(
        [F.linear(part, weights[group]) for group, part in enumerate(grouped.unbind(-3))], dim=-1
    )
    return F.linear(low_rank.squeeze(-2), p[f"{prefix}.wo_b.weight"])


def _grouped(x: torch.Tensor, ratio: int) -> torch.Tensor:
    return x.unflatten(1, (-1, ratio))
