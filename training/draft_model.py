"""The draft stages (DSpark) for many places at once, and what they are trained to do.

A place ("anchor") is a position p whose token and all before it are committed, with the token at
p + 1 known. A draft there guesses the tokens at p + 2 .. p + 1 + block in one pass. The target
model is frozen; what it says of those tokens is what the draft should say.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.models.deepseek_v41.config import DeepseekV41Config
from kernels.reference.norm import rms_norm

from .batched_attention import project_output, queries, query_latents, window_rows
from .batched_model import Residual, enter, feed_forward_site, site_mix
from .positions import Positions, RopeTable
from .residual_streams import begin_streams, collapse, write_back

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Of each anchor a block: `logits` [B, A, K, V] with the Markov bias, `confidence` [B, A, K]
    before a temperature and the sigmoid; `expert_counts` by the stage's prefix."""

    logits: torch.Tensor
    confidence: torch.Tensor
    expert_counts: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLoss:
    """`total` is what is trained; the others are means over all places, for the log."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    variation: torch.Tensor
    """Half the L1 distance of the two distributions: the share of guesses that is refused."""
    confidence: torch.Tensor


class DraftModel:
    """The formulas of all stages; parameters come with each call."""

    def __init__(self, config: DeepseekV41Config, positions: Positions) -> None:
        assert config.draft.stages, "the config has no draft stages"
        self.config, self.positions = config, positions
        self._last = f"mtp.{config.draft.stages - 1}"

    def forward(
        self,
        p: Parameters,
        targets_BTF: torch.Tensor,
        anchors_A: torch.Tensor,
        known_BAK: torch.Tensor,
    ) -> Drafts:
        """Draft at `anchors_A` (int64, the same positions in each sequence).

        `targets_BTF`: what the target shows of each token. `known_BAK`: the tokens at p + 1 ..
        p + block; the stages see the first only, the Markov head of each guess the one before it.
        """
        config = self.config
        block = config.draft.block_tokens
        context_BTE = self._context(p, targets_BTF)
        index_AW = anchors_A.unsqueeze(-1) + torch.arange(
            1 - config.window, 1, device=anchors_A.device
        )
        block_AK = torch.ones(len(anchors_A), block, dtype=torch.bool, device=anchors_A.device)
        is_seen_AS = torch.cat([index_AW >= 0, block_AK], dim=-1)
        index_AK = anchors_A.unsqueeze(-1) + torch.arange(1, block + 1, device=anchors_A.device)
        rope = self.positions.window_rope.rows(index_AK)
        residual = Residual(*begin_streams(self._embed(p, known_BAK), config.streams))
        counts = {}
        for stage in range(config.draft.stages):
            prefix = f"mtp.{stage}"
            rows_BTD = window_rows(
                config, p, f"{prefix}.attn", context_BTE, self.positions.rope_of(0)
            )
            before_BAWD = rows_BTD.index_select(1, index_AW.clamp(min=0).flatten()).unflatten(
                1, index_AW.shape
            )
            residual = self._attend(p, prefix, residual, before_BAWD, is_seen_AS, rope)
            residual, counts[f"{prefix}.ffn"] = feed_forward_site(
                config, p, prefix, residual, config.draft.experts_per_token
            )
        hidden = collapse(residual.streams, residual.pre)
        markov = _rows(p[f"{self._last}.markov_head.embed.weight"], known_BAK)
        return Drafts(self._logits(p, hidden, markov), self._confidence(p, hidden, markov), counts)

    def _context(self, p: Parameters, targets_BTF: torch.Tensor) -> torch.Tensor:
        """[B, T, E]: what every stage makes its window rows of."""
        projected = F.linear(targets_BTF, p["mtp.0.main_proj.weight"])
        return rms_norm(projected, p["mtp.0.main_norm.weight"], self.config.norm_epsilon)

    def _embed(self, p: Parameters, known_BAK: torch.Tensor) -> torch.Tensor:
        first = torch.arange(known_BAK.shape[-1], device=known_BAK.device) == 0
        ids = torch.where(first, known_BAK, self.config.draft.noise_token_id)
        return _rows(p["embed.weight"], ids)

    def _attend(
        self,
        p: Parameters,
        prefix: str,
        residual: Residual,
        before_BAWD: torch.Tensor,
        is_seen_AS: torch.Tensor,
        rope: RopeTable,
    ) -> Residual:
        """Every guess sees the window up to p and the whole block."""
        config = self.config
        mix = site_mix(config, p, f"{prefix}.hc_attn", residual.streams)
        x = enter(config, p, f"{prefix}.attn_norm", residual)
        q = queries(
            config, p, f"{prefix}.attn", query_latents(config, p, f"{prefix}.attn", x), rope
        )
        own = window_rows(config, p, f"{prefix}.attn", x, rope)
        keys_BASD = torch.cat([before_BAWD, own], dim=-2)
        logits = (q.flatten(-3, -2) @ keys_BASD.mT) * config.softmax_scale
        logits = logits.masked_fill(~is_seen_AS.unsqueeze(-2), float("-inf"))
        sink = p[f"{prefix}.attn.attn_sink"].repeat(q.shape[-3]).unsqueeze(-1)
        logits = torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1)
        probabilities = torch.softmax(logits, dim=-1)[..., :-1]
        o = (probabilities @ keys_BASD).view_as(q)
        y = project_output(config, p, f"{prefix}.attn", o, rope)
        return Residual(write_back(residual.streams, y, mix), mix.pre)

    def _logits(self, p: Parameters, hidden: torch.Tensor, markov: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden, p[f"{self._last}.norm.weight"], self.config.norm_epsilon)
        bias = F.linear(markov, p[f"{self._last}.markov_head.head.weight"])
        return F.linear(normed, p["head.weight"]) + bias

    def _confidence(
        self, p: Parameters, hidden: torch.Tensor, markov: torch.Tensor
    ) -> torch.Tensor:
        features = torch.cat([hidden, markov], dim=-1)
        return F.linear(features, p[f"{self._last}.confidence_head.proj.weight"]).squeeze(-1)


def _rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, ids.flatten()).view(*ids.shape, -1)


POSITION_DECAY = 4.0
"""gamma of the weights exp(-(k - 1) / gamma) of guess k: it counts only if all before it hold."""
CROSS_ENTROPY_WEIGHT, VARIATION_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0


def draft_loss(drafts: Drafts, target_logits: torch.Tensor, next_BAK: torch.Tensor) -> DraftLoss:
    """0.1 cross entropy + 0.9 total variation + 1.0 binary cross entropy of the confidence.

    `target_logits` [B, A, K, V] of the frozen model at the same places, `next_BAK` the tokens that
    came. Confidence is to say the probability that a guess is accepted: 1 - total variation.
    """
    target = torch.softmax(target_logits, dim=-1)
    log_draft = torch.log_softmax(drafts.logits, dim=-1)
    variation = 0.5 * (log_draft.exp() - target).abs().sum(-1)
    cross_entropy = -log_draft.gather(-1, next_BAK.unsqueeze(-1)).squeeze(-1)
    confidence = F.binary_cross_entropy_with_logits(
        drafts.confidence, 1 - variation.detach(), reduction="none"
    )
    places = torch.arange(next_BAK.shape[-1], device=next_BAK.device)
    weights = torch.exp(-places / POSITION_DECAY)
    weights = weights / weights.mean()
    each = (
        CROSS_ENTROPY_WEIGHT * cross_entropy
        + VARIATION_WEIGHT * variation
        + CONFIDENCE_WEIGHT * confidence
    )
    return DraftLoss(
        total=(each * weights).mean(),
        cross_entropy=cross_entropy.mean(),
        variation=variation.mean(),
        confidence=confidence.mean(),
    )
