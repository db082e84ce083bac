"""From named tensors, plain or as a checkpoint stores them, to the weights of a model.

Every matrix is dequantised into the asked type; n-gram tables stay as stored, and are dequantised
row by row as tokens ask for them. Where the tensors come from is not known here, nor are they
checked: `checkpoint.tensor_checks` does that first.
"""

from collections.abc import Mapping

import torch

from kernels.reference import weight_formats

from .checkpoint.tensor_schema import Storage, TensorSpec, scale_name, tensor_schema
from .config import DeepseekV41Config, LayerKind, LayerRole, plan_layers
from .weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    ExpertsWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    RowTable,
    StreamMixWeights,
)

Tensors = Mapping[str, torch.Tensor]


def build_weights(
    config: DeepseekV41Config,
    tensors: Tensors,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
) -> ModelWeights:
    """The model's weights by published names, on `device`. Raises KeyError if a tensor is not
    there.

    Matrices and norms in `dtype`; what the formulas keep in float32 (mHC, sinks, routing biases) in
    float32 always. Tensors that have their type and place already are used as they are, not copied,
    but for routed experts, which are stacked.
    """
    reader = _Reader(config, tensors, dtype, torch.device(device))
    return ModelWeights(
        embedding=reader.read("embed.weight"),
        layers=tuple(_model_layer(config, reader, role) for role in plan_layers(config)),
        norm=reader.read("norm.weight"),
        head=reader.read("head.weight"),
        draft=_draft(config, reader) if config.draft.stages else None,
    )


def dequantise(spec: TensorSpec, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 of a tensor as its storage packs it; exact."""
    if spec.storage is Storage.FP8_BLOCKS:
        return weight_formats.dequantise_fp8_blocks(data, scales)
    if spec.storage is Storage.FP4_ROWS:
        return weight_formats.dequantise_fp4_rows(data, scales)
    assert spec.storage is Storage.FP8_ROWS, spec
    return weight_formats.dequantise_fp8_rows(data, scales)


class _Reader:
    def __init__(
        self, config: DeepseekV41Config, tensors: Tensors, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._schema = tensor_schema(config)
        self._tensors = tensors
        self._dtype = dtype
        self._device = device

    def read(self, name: str) -> torch.Tensor:
        spec = self._schema[name]
        # Packed, as it is stored, it is on its way sooner.
        tensor = self._tensors[name].to(self._device)
        if scale_name(name) in self._tensors:
            tensor = dequantise(spec, tensor, self._tensors[scale_name(name)].to(self._device))
        is_float32 = spec.storage is Storage.FLOAT32
        return tensor.to(torch.float32 if is_float32 else self._dtype).contiguous()

    def read_table(self, name: str) -> RowTable:
        scales = self._tensors.get(scale_name(name))
        return RowTable(
            rows=self._tensors[name].to(self._device),
            scales=None if scales is None else scales.to(self._device),
        )


def _model_layer(config: DeepseekV41Config, reader: _Reader, role: LayerRole) -> LayerWeights:
    prefix = f"layers.{role.index}"
    has_indexer = role.kind in (LayerKind.FULL, LayerKind.REINDEX)
    return _layer(
        reader,
        prefix,
        experts=config.experts,
        compressor=_compressor(reader, f"{prefix}.attn.compressor", role) if role.owns_kv else None,
        indexer=_indexer(reader, f"{prefix}.attn.indexer", role) if has_indexer else None,
        engram=None if role.engram is None else _engram(reader, f"{prefix}.engram"),
    )


def _layer(
    reader: _Reader,
    prefix: str,
    *,
    experts: int,
    compressor: CompressorWeights | None = None,
    indexer: IndexerWeights | None = None,
    engram: EngramWeights | None = None,
) -> LayerWeights:
    """What layers of the model and draft stages have in common, around what only some have."""
    return LayerWeights(
        attention_mix=_stream_mix(reader, f"{prefix}.hc_attn"),
        attention_norm=reader.read(f"{prefix}.attn_norm.weight"),
        attention=_attention(reader, f"{prefix}.attn", compressor, indexer),
        experts_mix=_stream_mix(reader, f"{prefix}.hc_ffn"),
        experts_norm=reader.read(f"{prefix}.ffn_norm.weight"),
        experts=_experts(reader, f"{prefix}.ffn", experts),
        engram=engram,
    )


def _stream_mix(reader: _Reader, prefix: str) -> StreamMixWeights:
    return StreamMixWeights(
        projection=reader.read(f"{prefix}_fn"),
        base=reader.read(f"{prefix}_base"),
        scale=reader.read(f"{prefix}_scale"),
    )


def _attention(
    reader: _Reader,
    prefix: str,
    compressor: CompressorWeights | None,
    indexer: IndexerWeights | None,
) -> AttentionWeights:
    return AttentionWeights(
        q_a=reader.read(f"{prefix}.wq_a.weight"),
        q_norm=reader.read(f"{prefix}.q_norm.weight"),
        q_b=reader.read(f"{prefix}.wq_b.weight"),
        kv=reader.read(f"{prefix}.wkv.weight"),
        kv_norm=reader.read(f"{prefix}.kv_norm.weight"),
        out_a=reader.read(f"{prefix}.wo_a.weight"),
        out_b=reader.read(f"{prefix}.wo_b.weight"),
        sink=reader.read(f"{prefix}.attn_sink"),
        compressor=compressor,
        indexer=indexer,
    )


def _compressor(reader: _Reader, prefix: str, role: LayerRole) -> CompressorWeights:
    return CompressorWeights(
        content=reader.read(f"{prefix}.wkv.weight"),
        gate=reader.read(f"{prefix}.wgate.weight") if role.ratio > 1 else None,
        norm=reader.read(f"{prefix}.norm.weight"),
    )


def _indexer(reader: _Reader, prefix: str, role: LayerRole) -> IndexerWeights:
    return IndexerWeights(
        query=reader.read(f"{prefix}.wq_b.weight"),
        head_weights=reader.read(f"{prefix}.weights_proj.weight"),
        key=reader.read(f"{prefix}.wk.weight") if role.owns_kv else None,
        key_norm=reader.read(f"{prefix}.k_norm.weight") if role.owns_kv else None,
    )


def _experts(reader: _Reader, prefix: str, experts: int) -> ExpertsWeights:
    def stack(part: str) -> torch.Tensor:
        names = (f"{prefix}.experts.{index}.{part}.weight" for index in range(experts))
        return torch.stack([reader.read(name) for name in names])

    return ExpertsWeights(
        router=reader.read(f"{prefix}.gate.weight"),
        bias=reader.read(f"{prefix}.gate.bias"),
        bias_image=reader.read(f"{prefix}.gate.bias_vl"),
        gate=stack("w1"),
        up=stack("w3"),
        down=stack("w2"),
        shared_gate=reader.read(f"{prefix}.shared_experts.w1.weight"),
        shared_up=reader.read(f"{prefix}.shared_experts.w3.weight"),
        shared_down=reader.read(f"{prefix}.shared_experts.w2.weight"),
    )


def _engram(reader: _Reader, prefix: str) -> EngramWeights:
    return EngramWeights(
        table=reader.read_table(f"{prefix}.embed.weight"),
        kv=reader.read(f"{prefix}.wkv.weight"),
        query_scale=reader.read(f"{prefix}.q_weight"),
        key_scale=reader.read(f"{prefix}.k_weight"),
    )


def _draft(config: DeepseekV41Config, reader: _Reader) -> DraftWeights:
    last = f"mtp.{config.draft.stages - 1}"
    return DraftWeights(
        stages=tuple(
            _layer(reader, f"mtp.{stage}", experts=config.draft.experts)
            for stage in range(config.draft.stages)
        ),
        context_projection=reader.read("mtp.0.main_proj.weight"),
        context_norm=reader.read("mtp.0.main_norm.weight"),
        norm=reader.read(f"{last}.norm.weight"),
        markov_embedding=reader.read(f"{last}.markov_head.embed.weight"),
        markov_head=reader.read(f"{last}.markov_head.head.weight"),
        confidence=reader.read(f"{last}.confidence_head.proj.weight"),
    )
