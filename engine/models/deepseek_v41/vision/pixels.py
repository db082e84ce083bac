"""From an RGB image of any size to patches of normalised pixels.

As the released image processor does it: the image is scaled, its aspect ratio kept, into the chosen
size; what it leaves free is gray on both sides; pixels are mapped from 0..1 to -1..1. Scaling is
bicubic (a = -0.5) with a support that grows with the reduction, first along rows, bytes as bytes:
what Pillow 11.3 does, but for 1 or 2 levels of 255 in less than a hundredth of the pixels. (Pillow
13 takes whichever pass is cheaper first, so that the released processor itself depends on its
version where bytes saturate.) Decoding image files is not done here.
"""

import torch
import torch.nn.functional as F

from ....errors import InvalidRequest
from ..config import VisionConfig
from .image_size import ImageSize

PIXELS_MAX = 1 << 26
"""Pixels of an image that is accepted (8,192 x 8,192); bounds the memory a request can ask for."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types that torch can compare and scale; it can do neither with floats of 8 bits."""
PADDING = 127
"""Gray around an image whose aspect ratio is not that of its size, as a byte."""
MEAN = 0.5
DEVIATION = 0.5


def check_image(image_HWC: torch.Tensor) -> None:
    """Raise InvalidRequest unless it is RGB, [height, width, 3], bytes or finite floats in 0..1."""
    if not isinstance(image_HWC, torch.Tensor):
        raise InvalidRequest("image", given=type(image_HWC).__name__, expected="a torch.Tensor")
    shape = list(image_HWC.shape)
    if len(shape) != 3 or shape[2] != 3:
        raise InvalidRequest("image shape", given=shape, expected="[height, width, 3], RGB last")
    if image_HWC.dtype not in (torch.uint8, *FLOATS):
        raise InvalidRequest("image type", given=image_HWC.dtype, expected="uint8 or float")
    pixels = shape[0] * shape[1]
    if not 1 <= pixels <= PIXELS_MAX:
        raise InvalidRequest(
            "image size", given=f"{shape[0]} x {shape[1]}", expected=f"1 to {PIXELS_MAX} pixels"
        )
    if image_HWC.dtype == torch.uint8:
        return
    low, high = (float(bound) for bound in torch.aminmax(image_HWC))
    # A NaN anywhere makes both bounds NaN, and no comparison with it is true.
    if not (low >= 0.0 and high <= 1.0):
        raise InvalidRequest(
            "image values", given=f"{low:g} to {high:g}", expected="0 to 1 (floats), none NaN"
        )


def fit_image(image_HWC: torch.Tensor, size: ImageSize, vision: VisionConfig) -> torch.Tensor:
    """Pixels [3, height, width] of the image inside `size`: uint8, or float32 for floats."""
    inner = choose_inner_size(image_HWC.shape[0], image_HWC.shape[1], size, vision)
    is_bytes = image_HWC.dtype == torch.uint8
    source = image_HWC if is_bytes else image_HWC.to(torch.float32)
    scaled = _scale(source.permute(2, 0, 1), inner)
    gray = PADDING if is_bytes else PADDING / 255
    canvas = scaled.new_full((3, size.height, size.width), gray)
    # Halves are rounded to the even pixel, as Python and the released processor do.
    top = round((size.height - inner.height) * 0.5)
    left = round((size.width - inner.width) * 0.5)
    canvas[:, top : top + inner.height, left : left + inner.width] = scaled
    return canvas


def choose_inner_size(height: int, width: int, size: ImageSize, vision: VisionConfig) -> ImageSize:
    """The largest size of the aspect ratio `height` : `width` inside `size`, 1 pixel at least.

    An image of `aspect_ratio_max` or wider fills all of `size`: it is squeezed, not bordered.
    """
    ratio_max = vision.aspect_ratio_max
    if ratio_max is not None and width >= height * ratio_max:
        return size
    if width * size.height > size.width * height:
        return ImageSize(height=max(round(height / width * size.width), 1), width=size.width)
    if width * size.height < size.width * height:
        return ImageSize(height=size.height, width=max(round(width / height * size.height), 1))
    return size


def _scale(image_CHW: torch.Tensor, size: ImageSize) -> torch.Tensor:
    shape = (size.height, size.width)
    if image_CHW.shape[1:] == shape:
        return image_CHW
    scaled = F.interpolate(image_CHW[None], shape, mode="bicubic", antialias=True)[0]
    # A bicubic curve overshoots at edges; bytes saturate by themselves.
    return scaled if scaled.dtype == torch.uint8 else scaled.clamp(0.0, 1.0)


def normalise(image_CHW: torch.Tensor) -> torch.Tensor:
    """Bytes, or floats in 0..1, as float32 in -1..1."""
    unit = image_CHW.to(torch.float32)
    if image_CHW.dtype == torch.uint8:
        unit = unit / 255
    return (unit - MEAN) / DEVIATION


def patchify(pixels_CHW: torch.Tensor, patch_pixels: int) -> torch.Tensor:
    """Patches in reading order [patches, 3 x patch x patch]; inside one: channel, row, column."""
    channels, height, width = pixels_CHW.shape
    rows, columns = height // patch_pixels, width // patch_pixels
    cut = pixels_CHW.reshape(channels, rows, patch_pixels, columns, patch_pixels)
    return cut.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
