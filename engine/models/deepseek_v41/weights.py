"""The weights of a model in memory, part by part.

Matrices have outputs as rows. Built from named tensors by `build_weights`; where the tensors come
from (a folder, a random source, training) is not known here.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamMixWeights:
    """mHC of one site: `projection` [(2 + n) n, n E], `base` [(2 + n) n], `scale` [3]; float32."""

    projection: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompressorWeights:
    """`gate` is None where every token is an entry of its own (ratio 1)."""

    content: torch.Tensor
    gate: torch.Tensor | None
    norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexerWeights:
    """Queries and head weights of a layer with a top-k of its own.

    `key` [J, D] and `key_norm` [J] are there where the layer also owns the entries.
    """

    query: torch.Tensor
    head_weights: torch.Tensor
    key: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionWeights:
    """`q_a` [Q, E], `q_b` [H D, Q], `kv` [D, E], `out_a` [groups x rank, H D / groups],
    `out_b` [E, groups x rank], `sink` [H] float32."""

    q_a: torch.Tensor
    q_norm: torch.Tensor
    q_b: torch.Tensor
    kv: torch.Tensor
    kv_norm: torch.Tensor
    out_a: torch.Tensor
    out_b: torch.Tensor
    sink: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertsWeights:
    """`router` [X, E]; `bias`, `bias_image` [X] float32, for the choice only; experts stacked:
    `gate`, `up` [X, F, E], `down` [X, E, F]; the shared expert: the same without X."""

    router: torch.Tensor
    bias: torch.Tensor
    bias_image: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    shared_gate: torch.Tensor
    shared_up: torch.Tensor
    shared_down: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTable:
    """Rows as stored: float [rows, channels], or e4m3 with UE8M0 `scales` [rows, channels / 32]."""

    rows: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngramWeights:
    """`table`: n-gram rows; `kv` [(n + 1) E, columns x C]: n keys, then the value;
    `query_scale`, `key_scale` [n, E]."""

    table: RowTable
    kv: torch.Tensor
    query_scale: torch.Tensor
    key_scale: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    attention_mix: StreamMixWeights
    attention_norm: torch.Tensor
    attention: AttentionWeights
    experts_mix: StreamMixWeights
    experts_norm: torch.Tensor
    experts: ExpertsWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftWeights:
    """DSpark: `stages` are layers without compressor, indexer and Engram.

    `context_projection` [E, 3 E] and `context_norm` make the context of all stages; `norm`,
    `markov_embedding`, `markov_head` [V, rank] and `confidence` [1, E + rank] end the last one.
    """

    stages: tuple[LayerWeights, ...]
    context_projection: torch.Tensor
    context_norm: torch.Tensor
    norm: torch.Tensor
    markov_embedding: torch.Tensor
    markov_head: torch.Tensor
    confidence: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    """`embedding`, `head` [V, E]."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    draft: DraftWeights | None
