"""The llama architecture: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Runs tokens of one block at a time over a paged KV cache. It does not choose which tokens to run,
allocate blocks or sample. Shape letters: T tokens of this call, N tokens of context, H query heads,
K kv heads, D head dimension, E hidden, F intermediate, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..paged_kv import PagedKV
from .llama_config import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """Weights of one layer; norms in float32, matrices in the compute dtype, rows = outputs."""

    attention_norm_E: torch.Tensor
    qkv: torch.Tensor
    """[(H + 2K) D, E]: q, k and v in one matrix, one call instead of three."""
    attention_output: torch.Tensor
    feed_forward_norm_E: torch.Tensor
    gate_up: torch.Tensor
    """[2 F, E]: gate, then up."""
    down: torch.Tensor


class LlamaModel:
    """A llama model in memory. Matrices run in `compute_dtype`, the residual stream in float32.

    Rounding only what enters a matrix product keeps the error of bfloat16 to that of its inputs;
    a residual in bfloat16 was measured a third worse for no time saved.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        embedding_VE: torch.Tensor,
        layers: list[LlamaLayer],
        output_norm_E: torch.Tensor,
        output_VE: torch.Tensor,
    ) -> None:
        assert len(layers) == config.layers, (len(layers), config.layers)
        self.config = config
        self.geometry = config.geometry
        self.compute_dtype = output_VE.dtype
        self._embedding_VE = embedding_VE
        self._layers = layers
        self._output_norm_E = output_norm_E
        self._output_VE = output_VE
        self._cos_N1D, self._sin_N1D = rope_tables(config)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        kv: PagedKV,
        start: int,
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Run the tokens at positions start .. start + T - 1; write their K and V into `kv`.

        All T positions lie in one block. The context of a layer must be in `kv` once
        `before_layer` was called with its number: nothing of it is read or written before. Returns
        the hidden state of the last token, float32 [E].
        """
        config = self.config
        end = start + len(token_ids_T)
        hidden_TE = F.embedding(token_ids_T, self._embedding_VE).float()
        cos_T1D, sin_T1D = self._cos_N1D[start:end], self._sin_N1D[start:end]
        mask_TN = causal_mask(start, end, self.compute_dtype)
        for index, layer in enumerate(self._layers):
            before_layer(index)
            x_TE = self._norm(hidden_TE, layer.attention_norm_E)
            qkv = F.linear(x_TE, layer.qkv).view(
                -1, config.heads + 2 * config.kv_heads, config.head_dim
            )
            qk, v_TKD = qkv.split([config.heads + config.kv_heads, config.kv_heads], dim=1)
            qk = rotate(qk.float(), cos_T1D, sin_T1D)
            q_THD, k_TKD = qk.split([config.heads, config.kv_heads], dim=1)
            kv.write(index, start, k_TKD, v_TKD)
            # Read back what was written: a token sees the same rounded K and V whether its context
            # was computed here or came from a store.
            k_KND, v_KND = kv.read(index, end, self.compute_dtype)
            q_HTD = q_THD.to(self.compute_dtype).transpose(0, 1)
            mixed_HTD = F.scaled_dot_product_attention(
                q_HTD[None], k_KND[None], v_KND[None], attn_mask=mask_TN, enable_gqa=True
            )[0]
            mixed = mixed_HTD.transpose(0, 1).reshape(-1, config.q_rows)
            hidden_TE = hidden_TE + F.linear(mixed, layer.attention_output)
            x_TE = self._norm(hidden_TE, layer.feed_forward_norm_E)
            gate_TF, up_TF = F.linear(x_TE, layer.gate_up).chunk(2, dim=1)
            hidden_TE = hidden_TE + F.linear(F.silu(gate_TF) * up_TF, layer.down)
        return hidden_TE[-1]

    def logits(self, hidden_E: torch.Tensor) -> torch.Tensor:
        """Logits of the token after the one whose hidden state is given, float32 [V]."""
        x_1E = self._norm(hidden_E[None], self._output_norm_E)
        return F.linear(x_1E, self._output_VE)[0].float()

    def _norm(self, hidden_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32, given back in the compute dtype (Zhang and Sennrich, 2019)."""
        size = (self.config.hidden,)
        normed = F.rms_norm(hidden_TE, size, weight_E, self.config.norm_epsilon)
        return normed.to(self.compute_dtype)


def rope_tables(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x base^(-2i / D), float32 [N, 1, D / 2] (Su et al., 2021).

    The angles are computed in float64: at position 8,000 a float32 angle is off by 5e-4.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.context_tokens, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_base**-exponents).unsqueeze(1)
    return angles.cos().float(), angles.sin().float()


def rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D / 2) of each head by the angle of its position."""
    a, b = x_THD.chunk(2, dim=-1)
    return torch.cat((a * cos_T1D - b * sin_T1D, b * cos_T1D + a * sin_T1D), dim=-1)


def causal_mask(start: int, end: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Additive mask [T, N] of one block of queries at most; None for one query, which sees all."""
    tokens = end - start
    if tokens == 1:
        return None
    mask_TN = torch.zeros(tokens, end, dtype=dtype)
    mask_TN[:, start:] = torch.full((tokens, tokens), -math.inf, dtype=dtype).triu(1)
    return mask_TN
