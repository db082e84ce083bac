"""config.json of a released model, in Hugging Face's nesting, to and from `DeepseekV41Config`.

Every key that is missing, of another JSON type or of a value this architecture does not have is
reported at once, then every rule of `config_rules`. Keys that no one here reads are no problem: the
file serves other programs too.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ...errors import ModelFileError
from .config import DeepseekV41Config, DraftConfig, EngramConfig, VisionConfig, YarnScaling
from .config_rules import find_problems
from .json_file import JsonSection, read_json

CONFIG_NAME = "config.json"
CONFIG_BYTES_MAX = 1 << 20
MODEL_TYPE = "deepseek_v41"

FIXED_TEXT_VALUES: Mapping[str, object] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""What the formulas of this architecture are; another value would be another architecture."""

QUANTISATION: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""The `quantization_config` of a folder with quantised tensors."""

VISION_NORM_EPSILON = 1e-6
"""Not among the released keys; written, as `rms_norm_eps`, only where it differs."""


def read_config(path: str | Path) -> DeepseekV41Config:
    """The sizes in a config.json. Raises MissingModel or ModelFileError with all problems."""
    path = Path(path)
    config, problems = parse_config(read_json(path, bytes_max=CONFIG_BYTES_MAX))
    if config is None:
        raise ModelFileError(path, problems)
    return config


def parse_config(document: object) -> tuple[DeepseekV41Config | None, list[str]]:
    """The sizes in a parsed config.json, or None with every problem of it.

    Rules among the sizes are looked at once each size has its type: before, they would only repeat
    what is wrong already.
    """
    problems: list[str] = []
    root = JsonSection("", document, problems)
    root.equals("model_type", MODEL_TYPE)
    if root.has("quantization_config"):
        quantisation = root.section("quantization_config")
        for key, value in QUANTISATION.items():
            quantisation.equals(key, value)
    text = root.section("text_config")
    for key, value in FIXED_TEXT_VALUES.items():
        text.equals(key, value)
    config = _read_sizes(root, text)
    text.equals_integers("index_k_source_layer_ids", config.kv_source_ids)
    if not problems:
        problems = find_problems(config)
    return (None if problems else config), problems


def _read_sizes(root: JsonSection, text: JsonSection) -> DeepseekV41Config:
    return DeepseekV41Config(
        vocabulary=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        layers=text.integer("num_hidden_layers"),
        heads=text.integer("num_attention_heads"),
        head_dim=text.integer("head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        q_rank=text.integer("q_lora_rank"),
        output_groups=text.integer("o_groups"),
        output_rank=text.integer("o_lora_rank"),
        window=text.integer("sliding_window"),
        compress_ratios=text.integers("compress_ratios"),
        kv_source_ids=text.integers("kv_source_layer_ids"),
        index_source_ids=text.integers("index_source_layer_ids"),
        index_heads=text.integer("index_n_heads"),
        index_dim=text.integer("index_head_dim"),
        index_topk=text.integer("index_topk"),
        candidate_source_id=text.integer("candidate_source_layer_id"),
        candidate_blocks=text.integer("candidate_topk_blocks"),
        candidate_block_entries=text.integer("candidate_block_size"),
        rope_theta=text.number("rope_theta"),
        compress_rope_theta=text.number("compress_rope_theta"),
        yarn=_read_yarn(text.section("rope_scaling")) if text.has("rope_scaling") else None,
        positions_max=text.integer("max_position_embeddings"),
        experts=text.integer("n_routed_experts"),
        experts_per_token=text.integer("num_experts_per_tok"),
        shared_experts=text.integer("n_shared_experts"),
        expert_intermediate=text.integer("moe_intermediate_size"),
        routed_scaling=text.number("routed_scaling_factor"),
        swiglu_limit=text.number("swiglu_limit"),
        streams=text.integer("hc_mult"),
        sinkhorn_iterations=text.integer("hc_sinkhorn_iters"),
        stream_epsilon=text.number("hc_eps"),
        norm_epsilon=text.number("rms_norm_eps"),
        engram=_read_engram(text) if text.has("engram_layer_ids") else None,
        draft=_read_draft(text),
        vision=_read_vision(root.section("vision_config")) if root.has("vision_config") else None,
        bos_token_id=root.integer("bos_token_id"),
        eos_token_id=root.integer("eos_token_id"),
        pad_token_id=root.integer("pad_token_id"),
        image_token_id=root.integer("image_token_id") if root.has("image_token_id") else None,
    )


def _read_yarn(scaling: JsonSection) -> YarnScaling:
    scaling.equals("rope_type", "yarn")
    return YarnScaling(
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_positions=scaling.integer("original_max_position_embeddings"),
    )


def _read_engram(text: JsonSection) -> EngramConfig | None:
    layer_ids = text.integers("engram_layer_ids")
    if not layer_ids:
        return None
    return EngramConfig(
        layer_ids=layer_ids,
        table_rows=text.integers("engram_num_embeddings"),
        ngram_max=text.integer("engram_max_ngram_size"),
        base_rows=text.integer("engram_vocab_size"),
        heads=text.integer("engram_n_heads"),
        head_dim=text.integer("engram_head_dim"),
        pad_token_id=text.integer("engram_pad_token_id"),
        compressed_vocabulary=text.integer("engram_compressed_vocab_size"),
    )


def _read_draft(text: JsonSection) -> DraftConfig:
    return DraftConfig(
        stages=text.integer("num_nextn_predict_layers"),
        block_tokens=text.integer("dspark_block_size"),
        noise_token_id=text.integer("dspark_noise_token_id"),
        target_layer_ids=text.integers("dspark_target_layer_ids"),
        markov_rank=text.integer("dspark_markov_rank"),
        experts=text.integer("dspark_n_routed_experts"),
        experts_per_token=text.integer("dspark_num_experts_per_tok"),
    )


def _read_vision(vision: JsonSection) -> VisionConfig:
    vision.equals("model_type", "deepseek_v41_vision")
    epsilon, ratio = "rms_norm_eps", "max_wh_ratio"
    return VisionConfig(
        layers=vision.integer("num_hidden_layers"),
        hidden=vision.integer("hidden_size"),
        heads=vision.integer("num_attention_heads"),
        intermediate=vision.integer("intermediate_size"),
        patch_pixels=vision.integer("patch_size"),
        downsample=vision.integer("downsample_ratio"),
        tokens_max=vision.integer("max_image_tokens"),
        pixels_min=vision.integer("min_pixels"),
        norm_epsilon=vision.number(epsilon) if vision.has(epsilon) else VISION_NORM_EPSILON,
        rope_theta=vision.number("rope_theta"),
        aspect_ratio_max=vision.number(ratio) if vision.has(ratio) else None,
    )


def config_document(config: DeepseekV41Config, *, quantised: bool) -> dict[str, object]:
    """The config.json of these sizes; `parse_config` of it gives them back, equal."""
    document: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if config.image_token_id is not None:
        document["image_token_id"] = config.image_token_id
    if quantised:
        document["quantization_config"] = dict(QUANTISATION)
    document["text_config"] = {
        **FIXED_TEXT_VALUES,
        **_text_values(config),
        **(_engram_values(config.engram) if config.engram else {"engram_layer_ids": []}),
        **_draft_values(config.draft),
    }
    if config.vision:
        document["vision_config"] = _vision_values(config.vision)
    return document


def config_text(config: DeepseekV41Config, *, quantised: bool) -> str:
    return json.dumps(config_document(config, quantised=quantised), indent=2) + "\n"


def _text_values(config: DeepseekV41Config) -> dict[str, object]:
    yarn = config.yarn
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "moe_intermediate_size": config.expert_intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "head_dim": config.head_dim,
        "qk_rope_head_dim": config.rope_dim,
        "q_lora_rank": config.q_rank,
        "o_lora_rank": config.output_rank,
        "o_groups": config.output_groups,
        "swiglu_limit": config.swiglu_limit,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.positions_max,
        "rope_theta": config.rope_theta,
        "rope_scaling": _yarn_values(yarn) if yarn else None,
        "n_routed_experts": config.experts,
        "n_shared_experts": config.shared_experts,
        "num_experts_per_tok": config.experts_per_token,
        "routed_scaling_factor": config.routed_scaling,
        "sliding_window": config.window,
        "compress_ratios": list(config.compress_ratios),
        "compress_rope_theta": config.compress_rope_theta,
        "kv_source_layer_ids": list(config.kv_source_ids),
        "index_source_layer_ids": list(config.index_source_ids),
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_dim,
        "index_topk": config.index_topk,
        "candidate_source_layer_id": config.candidate_source_id,
        "candidate_topk_blocks": config.candidate_blocks,
        "candidate_block_size": config.candidate_block_entries,
        "hc_mult": config.streams,
        "hc_sinkhorn_iters": config.sinkhorn_iterations,
        "hc_eps": config.stream_epsilon,
    }


def _yarn_values(yarn: YarnScaling) -> dict[str, object]:
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "original_max_position_embeddings": yarn.original_positions,
    }


def _engram_values(engram: EngramConfig) -> dict[str, object]:
    return {
        "engram_layer_ids": list(engram.layer_ids),
        "engram_num_embeddings": list(engram.table_rows),
        "engram_max_ngram_size": engram.ngram_max,
        "engram_vocab_size": engram.base_rows,
        "engram_n_heads": engram.heads,
        "engram_head_dim": engram.head_dim,
        "engram_pad_token_id": engram.pad_token_id,
        "engram_compressed_vocab_size": engram.compressed_vocabulary,
    }


def _draft_values(draft: DraftConfig) -> dict[str, object]:
    return {
        "num_nextn_predict_layers": draft.stages,
        "dspark_block_size": draft.block_tokens,
        "dspark_noise_token_id": draft.noise_token_id,
        "dspark_target_layer_ids": list(draft.target_layer_ids),
        "dspark_markov_rank": draft.markov_rank,
        "dspark_n_routed_experts": draft.experts,
        "dspark_num_experts_per_tok": draft.experts_per_token,
    }


def _vision_values(vision: VisionConfig) -> dict[str, object]:
    values: dict[str, object] = {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": vision.layers,
        "hidden_size": vision.hidden,
        "num_attention_heads": vision.heads,
        "intermediate_size": vision.intermediate,
        "patch_size": vision.patch_pixels,
        "rope_theta": vision.rope_theta,
        "downsample_ratio": vision.downsample,
        "max_image_tokens": vision.tokens_max,
        "min_pixels": vision.pixels_min,
        "max_wh_ratio": vision.aspect_ratio_max,
    }
    if vision.norm_epsilon != VISION_NORM_EPSILON:
        values["rms_norm_eps"] = vision.norm_epsilon
    return values
