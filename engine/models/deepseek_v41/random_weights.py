"""Tensors of a model that was never trained: a start for training, and something to test with.

Scales are chosen so that every path carries values of order one and logits differ clearly. Nothing
here draws by itself: the generator is the caller's.
"""

import math

import torch

from .build_weights import build_weights
from .checkpoint.tensor_schema import Storage, TensorSpec, tensor_schema
from .config import DeepseekV41Config
from .weights import ModelWeights

STREAM_SCALE = 0.01
STREAM_BASE = 3.0
"""mHC starts as plain residual streams (facts of the release: bases of +3 and -3): site l reads
stream l mod n, and writes to every stream; streams hardly mix."""
GAIN_SPREAD = 0.1
"""Norm weights differ a little, so that one that is left out shows."""
BIAS_SPREAD = 0.1


def random_weights(config: DeepseekV41Config, generator: torch.Generator) -> ModelWeights:
    """Weights of `random_tensors`, in float32, on the generator's device."""
    return build_weights(config, random_tensors(config, generator), device=generator.device)


def random_tensors(
    config: DeepseekV41Config, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Every tensor of `tensor_schema`: FLOAT32 ones in float32, all others in bfloat16.

    Equal generators give equal tensors, on their device. All values are finite.
    """
    tensors = {}
    for name, spec in tensor_schema(config).items():
        values = _draw(config, name, spec, generator)
        is_float32 = spec.storage is Storage.FLOAT32
        tensors[name] = values if is_float32 else values.to(torch.bfloat16)
    return tensors


def _draw(
    config: DeepseekV41Config, name: str, spec: TensorSpec, generator: torch.Generator
) -> torch.Tensor:
    normal = torch.randn(spec.shape, generator=generator, device=generator.device)
    if name.endswith(("hc_attn_scale", "hc_ffn_scale")):
        return torch.full_like(normal, STREAM_SCALE)
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return stream_base(config.streams, int(name.split(".")[1])).to(normal.device)
    if _is_gain(name):
        return 1 + GAIN_SPREAD * normal
    if name.endswith((".bias", ".bias_vl")):
        return BIAS_SPREAD * normal
    is_table = name.endswith("embed.weight")
    if is_table or len(spec.shape) == 1:
        return normal
    return normal / math.sqrt(spec.shape[-1])


def _is_gain(name: str) -> bool:
    is_norm = name.removesuffix(".weight").endswith(("norm", "norm1", "norm2"))
    return is_norm or name.endswith((".q_weight", ".k_weight"))


def stream_base(streams: int, layer: int) -> torch.Tensor:
    """The initial mHC `base` [(2 + n) n]: pre, post, then comb row by row."""
    pre = torch.full((streams,), -STREAM_BASE)
    pre[layer % streams] = STREAM_BASE
    comb = torch.full((streams, streams), -STREAM_BASE)
    comb.fill_diagonal_(STREAM_BASE)
    return torch.cat([pre, torch.zeros(streams), comb.flatten()])
