"""DeepSeek-ViT: an image in, the embeddings of its span out.

An image is always encoded whole and alone, so its embeddings do not depend on what else is in a
batch or on how the prompt around it is cut into chunks; hence no row tiles here. How the text model
treats the positions of a span (routing bias, Engram mask) is not done here.

Letters: P patches, E hidden of the vision encoder, H heads, D head dim, R half of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.reference.norm import rms_norm

from ..config import DeepseekV41Config, VisionConfig
from .aligner import align_patches
from .image_size import Grid, choose_image_size, patch_grid, token_grid
from .image_span import fill_span, plan_span
from .pixels import check_image, fit_image, normalise, patchify
from .weights import VisionBlockWeights, VisionWeights, build_vision_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageEmbeddings:
    """`embeddings` [span, hidden of the text model]; `parts` int64 [span]: `SpanPart` of each.

    `tokens`: rows and columns of image tokens, from which the length of the span follows.
    """

    embeddings: torch.Tensor
    parts: torch.Tensor
    tokens: Grid


class VisionEncoder:
    """Encodes one image at a time; holds the weights and nothing else."""

    def __init__(self, vision: VisionConfig, weights: VisionWeights) -> None:
        self.vision = vision
        self.weights = weights

    @torch.no_grad()
    def encode(self, image_HWC: torch.Tensor) -> ImageEmbeddings:
        """Embed an RGB image [height, width, 3] of bytes, or of floats in 0..1.

        Sizes are those of `choose_image_size`. InvalidRequest if it is no such image.
        """
        check_image(image_HWC)
        vision, weights = self.vision, self.weights
        size = choose_image_size(image_HWC.shape[0], image_HWC.shape[1], vision)
        patches = patch_grid(size, vision)
        tokens = token_grid(patches, vision)
        pixels = normalise(fit_image(image_HWC, size, vision))
        x_PE = encode_patches(patchify(pixels, vision.patch_pixels), patches, vision, weights)
        embeddings = fill_span(
            align_patches(x_PE, patches, weights.aligner, vision.downsample),
            tokens,
            start_E=weights.image_start,
            newline_E=weights.image_newline,
            end_E=weights.image_end,
        )
        return ImageEmbeddings(embeddings=embeddings, parts=plan_span(tokens), tokens=tokens)


def build_vision(
    config: DeepseekV41Config,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> VisionEncoder:
    """The encoder from tensors by published name (`vision_schema`), computing in `dtype`.

    InvalidRequest names every tensor that is missing or misshapen; further tensors are left alone.
    """
    assert config.vision is not None, "a text-only model has no vision encoder"
    return VisionEncoder(config.vision, build_vision_weights(config, tensors, dtype))


def encode_patches(
    patches_PK: torch.Tensor, patches: Grid, vision: VisionConfig, weights: VisionWeights
) -> torch.Tensor:
    """Hidden states [P, E] of the patches [P, 3 x patch x patch] of one image."""
    x_PE = F.linear(patches_PK.to(weights.patch), weights.patch, weights.patch_bias)
    cos_PR, sin_PR = (table.to(x_PE.device) for table in axis_tables(patches, vision))
    for block in weights.blocks:
        x_PE = _run_block(x_PE, cos_PR, sin_PR, vision, block)
    return rms_norm(x_PE, weights.norm, vision.norm_epsilon)


def axis_tables(patches: Grid, vision: VisionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [P, D / 2] of the angles: D / 4 for a patch's row, then D / 4 for its column.

    Each axis has the frequencies theta^(-2 i / (D / 2)) of a RoPE of D / 2 channels.
    """
    axis_dim = vision.hidden // vision.heads // 2
    exponents = torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim
    frequencies = 1.0 / vision.rope_theta**exponents
    row_angles = torch.arange(patches.rows, dtype=torch.float32)[:, None] * frequencies
    column_angles = torch.arange(patches.columns, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat(
        [
            row_angles.repeat_interleave(patches.columns, dim=0),
            column_angles.repeat(patches.rows, 1),
        ],
        dim=-1,
    )
    return angles.cos(), angles.sin()


def rotate_halves(x_HPD: torch.Tensor, cos_PR: torch.Tensor, sin_PR: torch.Tensor) -> torch.Tensor:
    """Turn channel i with channel i + D / 2 by the angle i of the patch, in float32 or wider."""
    wide = torch.promote_types(x_HPD.dtype, torch.float32)
    first, second = x_HPD.to(wide).chunk(2, dim=-1)
    turned = torch.cat([first * cos_PR - second * sin_PR, second * cos_PR + first * sin_PR], dim=-1)
    return turned.to(x_HPD.dtype)


def _run_block(
    x_PE: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    vision: VisionConfig,
    weights: VisionBlockWeights,
) -> torch.Tensor:
    normed = rms_norm(x_PE, weights.attention_norm, vision.norm_epsilon)
    x_PE = x_PE + _attend(normed, cos_PR, sin_PR, vision.heads, weights)
    normed = rms_norm(x_PE, weights.feed_forward_norm, vision.norm_epsilon)
    gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
    return x_PE + F.linear(F.silu(gate) * up, weights.down)


def _attend(
    x_PE: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    heads: int,
    weights: VisionBlockWeights,
) -> torch.Tensor:
    """Every patch of the image sees every other; the scale is D^-0.5."""
    qkv = F.linear(x_PE, weights.qkv, weights.qkv_bias)
    # The batch dimension of 1 makes torch take its kernel that never holds all P x P scores.
    q, k, v = qkv.view(len(x_PE), 3, heads, -1).permute(1, 2, 0, 3)[:, None]
    q, k = rotate_halves(q, cos_PR, sin_PR), rotate_halves(k, cos_PR, sin_PR)
    o_1HPD = F.scaled_dot_product_attention(q, k, v)
    return F.linear(o_1HPD[0].transpose(0, 1).flatten(1), weights.out, weights.out_bias)
