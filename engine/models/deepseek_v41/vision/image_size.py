"""The size in pixels to which an image is brought before it is cut into patches.

The rule is that of the image processor released with DeepSeek-V4.1-Flash: the aspect ratio is kept,
small images grow, large ones shrink until their span fits. Which pixels then stand where is
`pixels`.
"""

import math
from dataclasses import dataclass

from ..config import VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """Pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Patches of an image, or its image tokens, in rows."""

    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns


def patch_grid(size: ImageSize, vision: VisionConfig) -> Grid:
    """Patches of an image of `size`, whose sides are multiples of the patch."""
    return Grid(rows=size.height // vision.patch_pixels, columns=size.width // vision.patch_pixels)


def token_grid(patches: Grid, vision: VisionConfig) -> Grid:
    """Image tokens: squares of `downsample` x `downsample` patches, at the edges parts of them."""
    return Grid(
        rows=-(-patches.rows // vision.downsample), columns=-(-patches.columns // vision.downsample)
    )


def span_tokens(tokens: Grid) -> int:
    """Positions that an image takes: each row ends with a newline; a start and an end around."""
    return tokens.rows * (tokens.columns + 1) + 2


def choose_image_size(height: int, width: int, vision: VisionConfig) -> ImageSize:
    """The size for an image of `height` x `width` pixels; both sides are multiples of the patch.

    The whole span, newlines and delimiters included, has at most `tokens_max` positions. An image
    of fewer than `pixels_min` pixels grows to about so many: sides are cut to whole pixels, then
    rounded up to whole patches. Where the two disagree, `tokens_max` wins. An image wider than
    `aspect_ratio_max` times its height counts as just so wide (V4.1-Flash sets no such limit).
    """
    if vision.aspect_ratio_max is not None:
        width = min(width, int(height * vision.aspect_ratio_max))
    area = height * width
    if area < vision.pixels_min:
        growth = (vision.pixels_min / area) ** 0.5
        height, width = int(height * growth), int(width * growth)
    patch = vision.patch_pixels
    size = ImageSize(height=-(-height // patch) * patch, width=-(-width // patch) * patch)
    if span_tokens(token_grid(patch_grid(size, vision), vision)) <= vision.tokens_max:
        return size
    return _shrink(height, width, vision)


def _shrink(height: int, width: int, vision: VisionConfig) -> ImageSize:
    """The largest size of this aspect ratio whose span fits.

    With real numbers for the grid, `ratio` c^2 + `ratio` c + 2 = `tokens_max` gives c columns; the
    scale is what brings the image into the whole numbers below. The order of the floating point
    operations is part of the rule: it decides which side of a patch's border a product falls on.
    """
    ratio = height / width
    columns = math.sqrt((vision.tokens_max - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    patch = vision.patch_pixels
    cell = patch * vision.downsample
    if columns < 1.0:
        return ImageSize(height=(vision.tokens_max - 2) // 2 * cell, width=cell)
    if rows < 1.0:
        return ImageSize(height=cell, width=(vision.tokens_max - 3) * cell)
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    # Without downsampling, a side may come out below one patch.
    return ImageSize(
        height=max(math.floor(height * scale / patch), 1) * patch,
        width=max(math.floor(width * scale / patch), 1) * patch,
    )
