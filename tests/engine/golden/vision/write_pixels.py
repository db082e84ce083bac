"""Writes pixels.npz: images scaled and bordered by Pillow, as the released image processor does it.

Pillow is no dependency of the project, so this runs in an environment of its own, with a release
whose scaling goes along rows first (11.3.0 does; 13.0.0 may choose the other way):

    python -m venv pillow && pillow/bin/pip install numpy pillow==11.3.0
    pillow/bin/python tests/engine/golden/vision/write_pixels.py

`image_<case>`: uint8 [height, width, 3], noise over a gradient. `fitted_<case>`: uint8, the size
that was asked for, gray where the image leaves it free.
"""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps  # type: ignore[import-not-found]

GRAY = (127, 127, 127)
# Height and width, of the image and of what it becomes.
CASES = {
    "grows": ((13, 17), (42, 56)),
    "shrinks": ((90, 75), (28, 24)),
    "tall": ((60, 11), (42, 42)),
    "wide": ((9, 64), (28, 42)),
    "odd_border": ((20, 33), (30, 41)),
    "one_pixel": ((1, 1), (14, 28)),
    "same": ((14, 28), (14, 28)),
}


def draw(height: int, width: int, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(0, 96, (height, width, 3))
    slope = np.add.outer(np.arange(height) * 2, np.arange(width))[..., None] % 160
    image: np.ndarray = (noise + slope).astype(np.uint8)
    return image


def main() -> None:
    arrays: dict[str, Any] = {}
    for seed, (case, (source, target)) in enumerate(CASES.items()):
        image = draw(*source, seed)
        fitted = ImageOps.pad(Image.fromarray(image), (target[1], target[0]), color=GRAY)
        arrays[f"image_{case}"] = image
        arrays[f"fitted_{case}"] = np.asarray(fitted)
    np.savez_compressed(Path(__file__).with_name("pixels.npz"), **arrays)


if __name__ == "__main__":
    main()
