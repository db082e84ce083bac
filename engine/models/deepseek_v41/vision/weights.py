"""The weights of the vision encoder, their published names and shapes.

The released checkpoint has them at its top level, beside the text model, in BF16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ....errors import InvalidRequest
from ..config import DeepseekV41Config, VisionConfig

TENSORS_SHOWN = 8
"""Tensors named in a message about tensors that do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionBlockWeights:
    """`qkv` [3 E, E]: queries, keys, values; `gate_up` [2 F, E]: gate, then up; `down` [E, F]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlignerWeights:
    """`first` [hidden, E x downsample^2], `second` [hidden, hidden]; hidden of the text model."""

    first: torch.Tensor
    first_bias: torch.Tensor
    second: torch.Tensor
    second_bias: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionWeights:
    """`patch` [E, 3 x patch x patch]; the delimiters of a span are [hidden of the text model]."""

    patch: torch.Tensor
    patch_bias: torch.Tensor
    blocks: tuple[VisionBlockWeights, ...]
    norm: torch.Tensor
    aligner: AlignerWeights
    image_start: torch.Tensor
    image_newline: torch.Tensor
    image_end: torch.Tensor


def vision_schema(config: DeepseekV41Config) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of every tensor of the vision encoder; none for a text-only model."""
    vision = config.vision
    if vision is None:
        return {}
    schema: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (vision.hidden, 3 * vision.patch_pixels**2),
        "vision.patch_embed.proj.bias": (vision.hidden,),
    }
    for index in range(vision.layers):
        schema |= _block_schema(f"vision.blocks.{index}.", vision)
    schema["vision.norm.weight"] = (vision.hidden,)
    schema["aligner.w1.weight"] = (config.hidden, vision.hidden * vision.downsample**2)
    schema["aligner.w1.bias"] = (config.hidden,)
    schema["aligner.w2.weight"] = (config.hidden, config.hidden)
    schema["aligner.w2.bias"] = (config.hidden,)
    for name in ("image_start", "image_end", "image_newline"):
        schema[name] = (config.hidden,)
    return schema


def _block_schema(prefix: str, vision: VisionConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = vision.hidden, vision.intermediate
    return {
        f"{prefix}norm1.weight": (hidden,),
        f"{prefix}attn.wqkv.weight": (3 * hidden, hidden),
        f"{prefix}attn.wqkv.bias": (3 * hidden,),
        f"{prefix}attn.wo.weight": (hidden, hidden),
        f"{prefix}attn.wo.bias": (hidden,),
        f"{prefix}norm2.weight": (hidden,),
        f"{prefix}mlp.w1.weight": (2 * intermediate, hidden),
        f"{prefix}mlp.w2.weight": (hidden, intermediate),
    }


def find_tensor_problems(
    schema: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Every tensor of the schema that is missing or has another shape; others are no concern."""
    found = []
    for name, shape in schema.items():
        if name not in tensors:
            found.append(f"{name} is missing")
        elif tuple(tensors[name].shape) != shape:
            found.append(f"{name} is {list(tensors[name].shape)}, not {list(shape)}")
    return found


def build_vision_weights(
    config: DeepseekV41Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> VisionWeights:
    """Weights of `dtype` from tensors by published name.

    InvalidRequest names every tensor that is missing or misshapen.
    """
    assert config.vision is not None, "a text-only model has no vision encoder"
    problems = find_tensor_problems(vision_schema(config), tensors)
    if problems:
        rest = len(problems) - TENSORS_SHOWN
        shown = problems[:TENSORS_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise InvalidRequest("vision tensors", given="; ".join(shown), expected="vision_schema")

    def take(name: str) -> torch.Tensor:
        return tensors[name].to(dtype)

    blocks = range(config.vision.layers)
    return VisionWeights(
        patch=take("vision.patch_embed.proj.weight"),
        patch_bias=take("vision.patch_embed.proj.bias"),
        blocks=tuple(_build_block(f"vision.blocks.{i}.", tensors, dtype) for i in blocks),
        norm=take("vision.norm.weight"),
        aligner=AlignerWeights(
            first=take("aligner.w1.weight"),
            first_bias=take("aligner.w1.bias"),
            second=take("aligner.w2.weight"),
            second_bias=take("aligner.w2.bias"),
        ),
        image_start=take("image_start"),
        image_newline=take("image_newline"),
        image_end=take("image_end"),
    )


def _build_block(
    prefix: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> VisionBlockWeights:
    def take(name: str) -> torch.Tensor:
        return tensors[prefix + name].to(dtype)

    return VisionBlockWeights(
        attention_norm=take("norm1.weight"),
        qkv=take("attn.wqkv.weight"),
        qkv_bias=take("attn.wqkv.bias"),
        out=take("attn.wo.weight"),
        out_bias=take("attn.wo.bias"),
        feed_forward_norm=take("norm2.weight"),
        gate_up=take("mlp.w1.weight"),
        down=take("mlp.w2.weight"),
    )
