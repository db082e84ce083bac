"""Published names of a model's tensors, the shape of each and the ways it may be stored.

Shapes are logical ones, [outputs, inputs] for matrices, whatever the storage packs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ..config import DeepseekV41Config, EngramConfig, LayerKind, LayerRole, plan_layers
from ..vision.weights import vision_schema

Shape = tuple[int, ...]
Named = tuple[str, "TensorSpec"]

SCALE_CHANNELS = 32
"""Channels, and in FP8 blocks rows too, that share a UE8M0 scale."""


class Storage(Enum):
    """How the released files keep a tensor. All but FLOAT32 may be plain BF16 or F32 instead."""

    FLOAT32 = "F32"
    PLAIN = "BF16 or F32"
    FP8_BLOCKS = "e4m3, a UE8M0 scale for each 32 x 32 block"
    FP4_ROWS = "e2m1, two to a byte, a UE8M0 scale for each 32 channels of a row"
    FP8_ROWS = "e4m3, a UE8M0 scale for each 32 channels of a row"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: Shape
    storage: Storage

    @property
    def may_be_quantised(self) -> bool:
        return self.storage not in (Storage.FLOAT32, Storage.PLAIN)

    @property
    def packed_shape(self) -> Shape:
        """The shape of the quantised tensor; FP4 has two channels to a byte."""
        rows, channels = self.shape
        return (rows, channels // 2) if self.storage is Storage.FP4_ROWS else self.shape

    @property
    def scale_shape(self) -> Shape:
        rows, channels = self.shape
        if self.storage is Storage.FP8_BLOCKS:
            rows = -(-rows // SCALE_CHANNELS)
        return (rows, -(-channels // SCALE_CHANNELS))

    @property
    def fits_quantised(self) -> bool:
        """Whether the channels can be cut as the storage wants it."""
        is_whole = self.shape[-1] % SCALE_CHANNELS == 0
        return self.may_be_quantised and (is_whole or self.storage is Storage.FP8_BLOCKS)


def scale_name(name: str) -> str:
    """`.scale` beside `.weight`."""
    return name.removesuffix(".weight") + ".scale"


def tensor_schema(config: DeepseekV41Config) -> dict[str, TensorSpec]:
    """Every tensor of such a model, in the order of the model; scales are not among them."""
    schema: dict[str, TensorSpec] = {}
    vocabulary, hidden = config.vocabulary, config.hidden
    schema["embed.weight"] = TensorSpec((vocabulary, hidden), Storage.PLAIN)
    for role in plan_layers(config):
        schema.update(_layer(config, role))
    schema["norm.weight"] = TensorSpec((hidden,), Storage.PLAIN)
    schema["head.weight"] = TensorSpec((vocabulary, hidden), Storage.PLAIN)
    if config.draft.stages:
        schema.update(_draft(config))
    for name, shape in vision_schema(config).items():
        schema[name] = TensorSpec(shape, Storage.PLAIN)
    return schema


def _layer(config: DeepseekV41Config, role: LayerRole) -> Iterator[Named]:
    prefix = f"layers.{role.index}"
    if role.engram is not None:
        assert config.engram is not None
        yield from _engram(config, config.engram, f"{prefix}.engram", role.engram)
    yield from _stream_mix(config, f"{prefix}.hc_attn")
    yield f"{prefix}.attn_norm.weight", TensorSpec((config.hidden,), Storage.PLAIN)
    yield from _attention(config, f"{prefix}.attn")
    if role.owns_kv:
        yield from _compressor(config, f"{prefix}.attn.compressor", role.ratio)
    if role.kind in (LayerKind.FULL, LayerKind.REINDEX):
        yield from _indexer(config, f"{prefix}.attn.indexer", role)
    yield from _stream_mix(config, f"{prefix}.hc_ffn")
    yield f"{prefix}.ffn_norm.weight", TensorSpec((config.hidden,), Storage.PLAIN)
    yield from _experts(config, f"{prefix}.ffn", config.experts)


def _stream_mix(config: DeepseekV41Config, prefix: str) -> Iterator[Named]:
    rows = (2 + config.streams) * config.streams
    yield f"{prefix}_fn", TensorSpec((rows, config.streams * config.hidden), Storage.FLOAT32)
    yield f"{prefix}_base", TensorSpec((rows,), Storage.FLOAT32)
    yield f"{prefix}_scale", TensorSpec((3,), Storage.FLOAT32)


def _attention(config: DeepseekV41Config, prefix: str) -> Iterator[Named]:
    hidden, q_rank, head_dim = config.hidden, config.q_rank, config.head_dim
    q_rows = config.heads * head_dim
    out_rows = config.output_groups * config.output_rank
    yield f"{prefix}.attn_sink", TensorSpec((config.heads,), Storage.FLOAT32)
    yield f"{prefix}.wq_a.weight", TensorSpec((q_rank, hidden), Storage.FP8_BLOCKS)
    yield f"{prefix}.q_norm.weight", TensorSpec((q_rank,), Storage.PLAIN)
    yield f"{prefix}.wq_b.weight", TensorSpec((q_rows, q_rank), Storage.FP8_BLOCKS)
    yield f"{prefix}.wkv.weight", TensorSpec((head_dim, hidden), Storage.FP8_BLOCKS)
    yield f"{prefix}.kv_norm.weight", TensorSpec((head_dim,), Storage.PLAIN)
    group_columns = q_rows // config.output_groups
    yield f"{prefix}.wo_a.weight", TensorSpec((out_rows, group_columns), Storage.FP8_BLOCKS)
    yield f"{prefix}.wo_b.weight", TensorSpec((hidden, out_rows), Storage.FP8_BLOCKS)


def _compressor(config: DeepseekV41Config, prefix: str, ratio: int) -> Iterator[Named]:
    matrix = TensorSpec((config.head_dim, config.hidden), Storage.PLAIN)
    yield f"{prefix}.wkv.weight", matrix
    if ratio > 1:
        yield f"{prefix}.wgate.weight", matrix
    yield f"{prefix}.norm.weight", TensorSpec((config.head_dim,), Storage.PLAIN)


def _indexer(config: DeepseekV41Config, prefix: str, role: LayerRole) -> Iterator[Named]:
    heads, dim = config.index_heads, config.index_dim
    yield f"{prefix}.wq_b.weight", TensorSpec((heads * dim, config.q_rank), Storage.FP8_BLOCKS)
    yield f"{prefix}.weights_proj.weight", TensorSpec((heads, config.hidden), Storage.PLAIN)
    if role.owns_kv:
        yield f"{prefix}.wk.weight", TensorSpec((dim, config.head_dim), Storage.PLAIN)
        yield f"{prefix}.k_norm.weight", TensorSpec((dim,), Storage.PLAIN)


def _experts(config: DeepseekV41Config, prefix: str, experts: int) -> Iterator[Named]:
    hidden, inner = config.hidden, config.expert_intermediate
    yield f"{prefix}.gate.weight", TensorSpec((experts, hidden), Storage.PLAIN)
    yield f"{prefix}.gate.bias", TensorSpec((experts,), Storage.FLOAT32)
    yield f"{prefix}.gate.bias_vl", TensorSpec((experts,), Storage.FLOAT32)
    for expert in range(experts):
        yield from _expert(f"{prefix}.experts.{expert}", hidden, inner, Storage.FP4_ROWS)
    shared = inner * config.shared_experts
    yield from _expert(f"{prefix}.shared_experts", hidden, shared, Storage.FP8_BLOCKS)


def _expert(prefix: str, hidden: int, inner: int, storage: Storage) -> Iterator[Named]:
    yield f"{prefix}.w1.weight", TensorSpec((inner, hidden), storage)
    yield f"{prefix}.w2.weight", TensorSpec((hidden, inner), storage)
    yield f"{prefix}.w3.weight", TensorSpec((inner, hidden), storage)


def _engram(
    config: DeepseekV41Config, engram: EngramConfig, prefix: str, table: int
) -> Iterator[Named]:
    rows = engram.table_rows[table]
    yield f"{prefix}.embed.weight", TensorSpec((rows, engram.head_dim), Storage.FP8_ROWS)
    outputs = (config.streams + 1) * config.hidden
    inputs = engram.columns * engram.head_dim
    yield f"{prefix}.wkv.weight", TensorSpec((outputs, inputs), Storage.FP8_BLOCKS)
    for name in ("q_weight", "k_weight"):
        yield f"{prefix}.{name}", TensorSpec((config.streams, config.hidden), Storage.PLAIN)


def _draft(config: DeepseekV41Config) -> Iterator[Named]:
    draft, hidden = config.draft, config.hidden
    norm = TensorSpec((hidden,), Storage.PLAIN)
    for stage in range(draft.stages):
        prefix = f"mtp.{stage}"
        if stage == 0:
            context = TensorSpec((hidden, len(draft.target_layer_ids) * hidden), Storage.FP8_BLOCKS)
            yield f"{prefix}.main_proj.weight", context
            yield f"{prefix}.main_norm.weight", norm
        yield from _stream_mix(config, f"{prefix}.hc_attn")
        yield f"{prefix}.attn_norm.weight", norm
        yield from _attention(config, f"{prefix}.attn")
        yield from _stream_mix(config, f"{prefix}.hc_ffn")
        yield f"{prefix}.ffn_norm.weight", norm
        yield from _experts(config, f"{prefix}.ffn", draft.experts)
    last = f"mtp.{draft.stages - 1}"
    markov = TensorSpec((config.vocabulary, draft.markov_rank), Storage.PLAIN)
    yield f"{last}.norm.weight", norm
    yield f"{last}.markov_head.embed.weight", markov
    yield f"{last}.markov_head.head.weight", markov
    confidence = TensorSpec((1, hidden + draft.markov_rank), Storage.PLAIN)
    yield f"{last}.confidence_head.proj.weight", confidence
