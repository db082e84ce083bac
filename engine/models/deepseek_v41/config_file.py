"""config.json of a released model, in Hugging Face's nesting, to and from `DeepseekV41Config`.

Every key that is missing, of another JSON type or of a value this architecture does not have is
reported at once, then every rule of `config_rules`. Keys that no one here reads are no problem: the
file serves other programs too.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelFileError
from .config import DeepseekV41Config, DraftConfig, EngramConfig, VisionConfig, YarnScaling
from .config_rules import find_problems
from .json_file import JsonSection, read_json

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

YARN_TYPE = "yarn"
VISION_TYPE = "deepseek_v41_vision"


@dataclass(frozen=True, slots=True)
class _Key:
    """A field of a config, the key it has in the file, and how its value is read there."""

    field: str
    key: str
    read: Callable[[JsonSection, str], object] = JsonSection.integer


_TEXT_KEYS = (
    _Key("vocabulary", "vocab_size"),
    _Key("hidden", "hidden_size"),
    _Key("expert_intermediate", "moe_intermediate_size"),
    _Key("layers", "num_hidden_layers"),
    _Key("heads", "num_attention_heads"),
    _Key("head_dim", "head_dim"),
    _Key("rope_dim", "qk_rope_head_dim"),
    _Key("q_rank", "q_lora_rank"),
    _Key("output_rank", "o_lora_rank"),
    _Key("output_groups", "o_groups"),
    _Key("swiglu_limit", "swiglu_limit", JsonSection.number),
    _Key("norm_epsilon", "rms_norm_eps", JsonSection.number),
    _Key("positions_max", "max_position_embeddings"),
    _Key("rope_theta", "rope_theta", JsonSection.number),
    _Key("experts", "n_routed_experts"),
    _Key("shared_experts", "n_shared_experts"),
    _Key("experts_per_token", "num_experts_per_tok"),
    _Key("routed_scaling", "routed_scaling_factor", JsonSection.number),
    _Key("window", "sliding_window"),
    _Key("compress_ratios", "compress_ratios", JsonSection.integers),
    _Key("compress_rope_theta", "compress_rope_theta", JsonSection.number),
    _Key("kv_source_ids", "kv_source_layer_ids", JsonSection.integers),
    _Key("index_source_ids", "index_source_layer_ids", JsonSection.integers),
    _Key("index_heads", "index_n_heads"),
    _Key("index_dim", "index_head_dim"),
    _Key("index_topk", "index_topk"),
    _Key("candidate_source_id", "candidate_source_layer_id"),
    _Key("candidate_blocks", "candidate_topk_blocks"),
    _Key("candidate_block_entries", "candidate_block_size"),
    _Key("streams", "hc_mult"),
    _Key("sinkhorn_iterations", "hc_sinkhorn_iters"),
    _Key("stream_epsilon", "hc_eps", JsonSection.number),
)
_YARN_KEYS = (
    _Key("factor", "factor", JsonSection.number),
    _Key("beta_fast", "beta_fast", JsonSection.number),
    _Key("beta_slow", "beta_slow", JsonSection.number),
    _Key("original_positions", "original_max_position_embeddings"),
)
_ENGRAM_KEYS = (
    _Key("layer_ids", "engram_layer_ids", JsonSection.integers),
    _Key("table_rows", "engram_num_embeddings", JsonSection.integers),
    _Key("ngram_max", "engram_max_ngram_size"),
    _Key("base_rows", "engram_vocab_size"),
    _Key("heads", "engram_n_heads"),
    _Key("head_dim", "engram_head_dim"),
    _Key("pad_token_id", "engram_pad_token_id"),
    _Key("compressed_vocabulary", "engram_compressed_vocab_size"),
)
_DRAFT_KEYS = (
    _Key("stages", "num_nextn_predict_layers"),
    _Key("block_tokens", "dspark_block_size"),
    _Key("noise_token_id", "dspark_noise_token_id"),
    _Key("target_layer_ids", "dspark_target_layer_ids", JsonSection.integers),
    _Key("markov_rank", "dspark_markov_rank"),
    _Key("experts", "dspark_n_routed_experts"),
    _Key("experts_per_token", "dspark_num_experts_per_tok"),
)
_VISION_KEYS = (
    _Key("layers", "num_hidden_layers"),
    _Key("hidden", "hidden_size"),
    _Key("heads", "num_attention_heads"),
    _Key("intermediate", "intermediate_size"),
    _Key("patch_pixels", "patch_size"),
    _Key("rope_theta", "rope_theta", JsonSection.number),
    _Key("downsample", "downsample_ratio"),
    _Key("tokens_max", "max_image_tokens"),
    _Key("pixels_min", "min_pixels"),
)
_TOKEN_KEYS = (
    _Key("bos_token_id", "bos_token_id"),
    _Key("eos_token_id", "eos_token_id"),
    _Key("pad_token_id", "pad_token_id"),
)


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


def _fields(section: JsonSection, keys: tuple[_Key, ...]) -> dict[str, Any]:
    return {key.field: key.read(section, key.key) for key in keys}


def _values(sizes: object, keys: tuple[_Key, ...]) -> dict[str, object]:
    values = {key.key: getattr(sizes, key.field) for key in keys}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def _read_sizes(root: JsonSection, text: JsonSection) -> DeepseekV41Config:
    return DeepseekV41Config(
        **_fields(root, _TOKEN_KEYS),
        **_fields(text, _TEXT_KEYS),
        yarn=_read_yarn(text.section("rope_scaling")) if text.has("rope_scaling") else None,
        engram=_read_engram(text) if text.has("engram_layer_ids") else None,
        draft=DraftConfig(**_fields(text, _DRAFT_KEYS)),
        vision=_read_vision(root.section("vision_config")) if root.has("vision_config") else None,
        image_token_id=root.integer("image_token_id") if root.has("image_token_id") else None,
    )


def _read_yarn(scaling: JsonSection) -> YarnScaling:
    for key in ("rope_type", "type"):
        scaling.equals(key, YARN_TYPE)
    return YarnScaling(**_fields(scaling, _YARN_KEYS))


def _read_engram(text: JsonSection) -> EngramConfig | None:
    # Written so where there is none.
    if text.integers("engram_layer_ids") == ():
        return None
    return EngramConfig(**_fields(text, _ENGRAM_KEYS))


def _read_vision(vision: JsonSection) -> VisionConfig:
    vision.equals("model_type", VISION_TYPE)
    epsilon, ratio = "rms_norm_eps", "max_wh_ratio"
    return VisionConfig(
        **_fields(vision, _VISION_KEYS),
        norm_epsilon=vision.number(epsilon) if vision.has(epsilon) else VISION_NORM_EPSILON,
        aspect_ratio_max=vision.number(ratio) if vision.has(ratio) else None,
    )


def config_document(config: DeepseekV41Config, *, quantised: bool) -> dict[str, object]:
    """The config.json of these sizes; `parse_config` of it gives them back, equal."""
    document: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        **_values(config, _TOKEN_KEYS),
    }
    if config.image_token_id is not None:
        document["image_token_id"] = config.image_token_id
    if quantised:
        document["quantization_config"] = dict(QUANTISATION)
    document["text_config"] = {
        **FIXED_TEXT_VALUES,
        **_values(config, _TEXT_KEYS),
        "rope_scaling": _yarn_values(config.yarn) if config.yarn else None,
        **(_values(config.engram, _ENGRAM_KEYS) if config.engram else {"engram_layer_ids": []}),
        **_values(config.draft, _DRAFT_KEYS),
    }
    if config.vision:
        document["vision_config"] = _vision_values(config.vision)
    return document


def config_text(config: DeepseekV41Config, *, quantised: bool) -> str:
    return json.dumps(config_document(config, quantised=quantised), indent=2) + "\n"


def _yarn_values(yarn: YarnScaling) -> dict[str, object]:
    return {"rope_type": YARN_TYPE, **_values(yarn, _YARN_KEYS)}


def _vision_values(vision: VisionConfig) -> dict[str, object]:
    values = {"model_type": VISION_TYPE, **_values(vision, _VISION_KEYS)}
    values["max_wh_ratio"] = vision.aspect_ratio_max
    if vision.norm_epsilon != VISION_NORM_EPSILON:
        values["rms_norm_eps"] = vision.norm_epsilon
    return values
