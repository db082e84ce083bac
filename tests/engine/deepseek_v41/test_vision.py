"""Images become spans of embeddings: sizes, pixels, the encoder against loops, and what is refused.

Golden pixels were made by Pillow (tests/engine/golden/vision). The table of sizes was computed from
the rule of the image processor released with DeepSeek-V4.1-Flash.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import InvalidRequest, ModelFileError
from engine.models.deepseek_v41.checkpoint.tensor_schema import tensor_schema
from engine.models.deepseek_v41.checkpoint.writer import write_folder
from engine.models.deepseek_v41.config import VisionConfig
from engine.models.deepseek_v41.load import load_vision
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.vision.aligner import unfold_patches
from engine.models.deepseek_v41.vision.encoder import VisionEncoder, build_vision
from engine.models.deepseek_v41.vision.image_size import (
    Grid,
    ImageSize,
    choose_image_size,
    patch_grid,
    span_tokens,
    token_grid,
)
from engine.models.deepseek_v41.vision.image_span import SpanPart, fill_span, plan_span
from engine.models.deepseek_v41.vision.pixels import (
    PIXELS_MAX,
    choose_inner_size,
    fit_image,
    normalise,
    patchify,
)
from engine.models.deepseek_v41.vision.weights import vision_schema
from tests.engine.deepseek_v41.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny
from tests.engine.deepseek_v41.vision_by_loops import encode_by_loops

with np.load(Path(__file__).parents[1] / "golden" / "vision" / "pixels.npz") as file:
    PIXELS = dict(file)
CASES = sorted(name.removeprefix("image_") for name in PIXELS if name.startswith("image_"))

FLASH_CONFIG = shipped_config("v41-flash")
assert FLASH_CONFIG.vision is not None
FLASH = FLASH_CONFIG.vision
SMALL = VisionConfig(
    layers=2,
    hidden=16,
    heads=2,
    intermediate=12,
    patch_pixels=2,
    downsample=3,
    tokens_max=14,
    pixels_min=48,
)
SMALL_CONFIG = replace(shipped_config("v41-nano"), vision=SMALL, hidden=10)

# Height and width of the image, the size it is brought to, the positions of its span.
SIZES = [
    ((1, 1), (546, 546), 184),
    ((100, 100), (546, 546), 184),
    ((108, 312), (322, 924), 186),
    ((300, 400), (476, 630), 194),
    ((358, 667), (406, 742), 192),
    ((544, 544), (546, 546), 184),
    ((768, 1024), (770, 1036), 496),
    ((1080, 1920), (966, 1708), 968),
    ((1344, 1302), (1288, 1260), 963),
    ((1400, 1400), (1302, 1302), 994),
    ((3000, 4000), (1134, 1512), 1001),
    ((8192, 8192), (1302, 1302), 994),
    ((4096, 1), (21462, 42), 1024),
    ((1, 4096), (14, 34818), 832),
    ((100000, 40), (21462, 42), 1024),
    ((40, 100000), (42, 42882), 1024),
    ((2000, 30), (4452, 70), 320),
    ((30, 2000), (70, 4452), 216),
]


def grids(size: ImageSize, vision: VisionConfig) -> tuple[Grid, Grid]:
    patches = patch_grid(size, vision)
    return patches, token_grid(patches, vision)


def random_tensors(seed: int, scale: float = 0.4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * scale
        for name, shape in vision_schema(SMALL_CONFIG).items()
    }


def random_bytes(height: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return build_vision(SMALL_CONFIG, random_tensors(0))


# Sizes and spans


@pytest.mark.parametrize(("image", "expected", "span"), SIZES)
def test_image_size_is_the_released_one(
    image: tuple[int, int], expected: tuple[int, int], span: int
) -> None:
    size = choose_image_size(*image, FLASH)
    assert (size.height, size.width) == expected
    assert span_tokens(grids(size, FLASH)[1]) == span


@given(
    st.integers(1, 1 << 16),
    st.integers(1, 1 << 16),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(4, 2000),
    st.integers(1, 1 << 20),
)
# Grows to 2 x 2 and has room for one token.
@example(height=1, width=1, patch=1, downsample=1, tokens_max=4, pixels_min=4)
def test_image_size_keeps_its_rules(
    height: int, width: int, patch: int, downsample: int, tokens_max: int, pixels_min: int
) -> None:
    vision = replace(
        FLASH,
        patch_pixels=patch,
        downsample=downsample,
        tokens_max=tokens_max,
        pixels_min=pixels_min,
    )
    size = choose_image_size(height, width, vision)
    patches, tokens = grids(size, vision)
    assert (size.height % patch, size.width % patch) == (0, 0)
    assert patches.cells >= 1
    assert span_tokens(tokens) <= tokens_max
    grown = max(pixels_min / (height * width), 1) ** 0.5
    is_shrunk = size.height < height * grown - 1 or size.width < width * grown - 1
    # Growth cuts each side to a whole pixel first.
    assert is_shrunk or (size.height + 1) * (size.width + 1) >= pixels_min
    if is_shrunk:
        whole = Grid(
            rows=-(-height * grown // (patch * downsample)),
            columns=-(-width * grown // (patch * downsample)),
        )
        assert span_tokens(whole) > tokens_max


@given(st.integers(200, 3000), st.integers(200, 3000))
def test_image_size_keeps_the_aspect_ratio_to_a_patch(height: int, width: int) -> None:
    size = choose_image_size(height, width, FLASH)
    # Some scale brings both sides to within a patch of the sides that were chosen.
    slack = FLASH.patch_pixels + 1
    low = max((size.height - slack) / height, (size.width - slack) / width)
    high = min((size.height + slack) / height, (size.width + slack) / width)
    assert low <= high


def test_image_wider_than_the_ratio_counts_as_just_so_wide() -> None:
    limited = replace(FLASH, aspect_ratio_max=8.0)
    assert choose_image_size(100, 5000, limited) == choose_image_size(100, 800, limited)
    assert choose_image_size(5000, 100, limited) == choose_image_size(5000, 100, FLASH)


@given(st.integers(1, 12), st.integers(1, 12))
def test_span_is_start_rows_with_newlines_and_end(rows: int, columns: int) -> None:
    grid = Grid(rows=rows, columns=columns)
    parts = plan_span(grid).tolist()
    line = [SpanPart.TOKEN] * columns + [SpanPart.NEWLINE]
    assert parts == [SpanPart.START, *line * rows, SpanPart.END]
    assert len(parts) == span_tokens(grid) == rows * (columns + 1) + 2


@given(st.integers(1, 6), st.integers(1, 6))
def test_filled_span_has_each_embedding_at_its_part(rows: int, columns: int) -> None:
    grid = Grid(rows=rows, columns=columns)
    tokens = torch.arange(grid.cells, dtype=torch.float32)[:, None].expand(-1, 4)
    marks = {part: torch.full((4,), -1.0 - part) for part in SpanPart}
    span = fill_span(
        tokens,
        grid,
        start_E=marks[SpanPart.START],
        newline_E=marks[SpanPart.NEWLINE],
        end_E=marks[SpanPart.END],
    )
    parts = plan_span(grid)
    assert torch.equal(span[parts == SpanPart.TOKEN], tokens)
    for part in (SpanPart.START, SpanPart.NEWLINE, SpanPart.END):
        assert (span[parts == part] == marks[part]).all()


# Pixels


@pytest.mark.parametrize("case", CASES)
def test_fitted_image_is_that_of_pillow(case: str) -> None:
    expected = torch.from_numpy(PIXELS[f"fitted_{case}"]).permute(2, 0, 1).int()
    size = ImageSize(height=expected.shape[1], width=expected.shape[2])
    fitted = fit_image(torch.from_numpy(PIXELS[f"image_{case}"]), size, FLASH)
    difference = (fitted.int() - expected).abs()
    assert fitted.dtype == torch.uint8
    assert difference.max() <= 2
    assert (difference > 0).float().mean() < 0.02


@pytest.mark.parametrize("case", CASES)
def test_floats_are_scaled_like_bytes_but_for_their_rounding(case: str) -> None:
    image = torch.from_numpy(PIXELS[f"image_{case}"])
    height, width, _ = PIXELS[f"fitted_{case}"].shape
    size = ImageSize(height=height, width=width)
    as_bytes = normalise(fit_image(image, size, FLASH))
    as_floats = normalise(fit_image(image.double() / 255, size, FLASH))
    assert as_floats.dtype == torch.float32
    # Bytes are rounded, and saturate, after each of the two passes.
    assert (as_bytes - as_floats).abs().max() < 0.06
    assert (as_bytes - as_floats).abs().mean() < 0.005


def test_wide_image_is_squeezed_when_the_ratio_is_limited() -> None:
    image = random_bytes(10, 90)
    size = ImageSize(height=14, width=112)
    limited = replace(FLASH, aspect_ratio_max=8.0)
    assert (fit_image(image, size, FLASH)[:, 0] == 127).all()
    assert not (fit_image(image, size, limited)[:, 0] == 127).all()


@pytest.mark.parametrize(
    ("image", "size", "inner"),
    [
        ((3, 4), (30, 40), (30, 40)),
        ((3, 4), (30, 50), (30, 40)),
        ((3, 4), (50, 40), (30, 40)),
        ((1, 100_000), (14, 14_000), (1, 14_000)),
        ((100_000, 1), (14_000, 14), (14_000, 1)),
    ],
)
def test_image_fills_its_size_as_its_ratio_allows(
    image: tuple[int, int], size: tuple[int, int], inner: tuple[int, int]
) -> None:
    outer = ImageSize(height=size[0], width=size[1])
    expected = ImageSize(height=inner[0], width=inner[1])
    assert choose_inner_size(*image, outer, FLASH) == expected


def test_pixels_are_mapped_to_minus_one_to_one() -> None:
    assert normalise(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]
    assert normalise(torch.tensor([0.0, 0.5, 1.0])).tolist() == [-1.0, 0.0, 1.0]


def test_patches_are_in_reading_order_and_channel_first_inside() -> None:
    height, width, patch = 4, 6, 2
    pixels = torch.arange(3 * height * width).view(3, height, width)
    patches = patchify(pixels, patch)
    assert patches.shape == (6, 12)
    for index, values in enumerate(patches):
        row, column = divmod(index, width // patch)
        expected = [
            int(pixels[channel, row * patch + y, column * patch + x])
            for channel in range(3)
            for y in range(patch)
            for x in range(patch)
        ]
        assert values.tolist() == expected


# The encoder


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 5), (3, 3), (4, 7)])
def test_squares_are_channel_first_and_padded_with_zeros(rows: int, columns: int) -> None:
    x_PE = torch.arange(1.0, rows * columns * 2 + 1).view(rows * columns, 2)
    squares = unfold_patches(x_PE, Grid(rows=rows, columns=columns), 3)
    across = -(-columns // 3)
    assert squares.shape == (-(-rows // 3) * across, 18)
    for index, square in enumerate(squares.view(-1, 2, 3, 3)):
        for channel in range(2):
            for y in range(3):
                for x in range(3):
                    row, column = index // across * 3 + y, index % across * 3 + x
                    is_inside = row < rows and column < columns
                    expected = x_PE[row * columns + column, channel] if is_inside else 0.0
                    assert square[channel, y, x] == expected


@pytest.mark.parametrize(("height", "width"), [(6, 6), (7, 11), (3, 40), (40, 3), (200, 130)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 2e-6)], ids=["f32", "f64"]
)
def test_encoder_agrees_with_loops(
    height: int, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    tensors = random_tensors(1)
    image = random_bytes(height, width)
    size = choose_image_size(height, width, SMALL)
    patches, tokens = grids(size, SMALL)
    pixels = patchify(normalise(fit_image(image, size, SMALL)), SMALL.patch_pixels)
    expected = encode_by_loops(
        pixels.double().tolist(),
        rows=patches.rows,
        columns=patches.columns,
        layers=SMALL.layers,
        heads=SMALL.heads,
        downsample=SMALL.downsample,
        theta=SMALL.rope_theta,
        epsilon=SMALL.norm_epsilon,
        tensors={name: tensor.numpy() for name, tensor in tensors.items()},
    )
    encoded = build_vision(SMALL_CONFIG, tensors, dtype).encode(image)
    assert encoded.tokens == tokens
    assert torch.equal(encoded.parts, plan_span(tokens))
    assert encoded.embeddings.dtype == dtype
    difference = encoded.embeddings.double() - torch.tensor(expected, dtype=torch.float64)
    # Angles are float32 in both types, so that float64 cannot come closer than they are.
    assert difference.abs().max() < tolerance * max(1.0, abs(np.array(expected)).max())


def test_encoder_gives_the_same_bits_again_and_after_other_images(encoder: VisionEncoder) -> None:
    image = random_bytes(9, 14)
    first = encoder.encode(image).embeddings
    encoder.encode(random_bytes(20, 5, seed=1))
    assert torch.equal(first, encoder.encode(image).embeddings)


def test_encoder_takes_floats_from_zero_to_one(encoder: VisionEncoder) -> None:
    image = random_bytes(8, 6)
    image[0, 0], image[7, 5] = 0, 255
    as_floats = encoder.encode(image.to(torch.float32) / 255).embeddings
    assert torch.equal(as_floats, encoder.encode(image).embeddings)


def test_encoder_takes_strided_images(encoder: VisionEncoder) -> None:
    wide = random_bytes(12, 20)
    view = wide.permute(1, 0, 2)[::2]
    assert torch.equal(encoder.encode(view).embeddings, encoder.encode(view.clone()).embeddings)


def test_encoder_sees_where_a_patch_stands(encoder: VisionEncoder) -> None:
    image = random_bytes(6, 12)
    assert encoder.encode(image).tokens == Grid(rows=1, columns=2)
    turned = encoder.encode(image.flip(1)).embeddings
    straight = encoder.encode(image).embeddings
    assert (turned[[0, 3, 4]] == straight[[0, 3, 4]]).all()
    assert (turned[[1, 2]] - straight[[2, 1]]).abs().max() > 1e-3


def test_encoder_of_the_nano_model_fills_a_span_of_the_text_model() -> None:
    config = shipped_config("v41-nano")
    assert config.vision is not None
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.1).to(torch.bfloat16)
        for name, shape in vision_schema(config).items()
    }
    encoded = build_vision(config, tensors).encode(random_bytes(50, 30))
    assert encoded.embeddings.shape == (span_tokens(encoded.tokens), config.hidden)
    assert len(encoded.parts) <= config.vision.tokens_max
    assert encoded.embeddings.isfinite().all()


def test_encoder_is_loaded_from_a_folder(tmp_path: Path) -> None:
    image = random_bytes(20, 30)
    expected = build_vision(tiny_config(), tiny_tensors()).encode(image).embeddings
    encoder = load_vision(write_tiny(tmp_path / "model", quantised=True))
    assert torch.equal(encoder.encode(image).embeddings, expected)


def test_folder_of_a_text_model_has_no_encoder(tmp_path: Path) -> None:
    config = replace(tiny_config(), vision=None)
    text = {
        name: tensor for name, tensor in tiny_tensors().items() if name in tensor_schema(config)
    }
    write_folder(tmp_path / "model", config, text)
    with pytest.raises(InvalidRequest, match="vision_config"):
        load_vision(tmp_path / "model")


def test_schema_of_the_released_model_has_its_names_and_shapes() -> None:
    schema = vision_schema(FLASH_CONFIG)
    assert len(schema) == 2 + 32 * 8 + 1 + 4 + 3
    assert schema["vision.patch_embed.proj.weight"] == (1024, 588)
    assert schema["vision.blocks.31.attn.wqkv.weight"] == (3072, 1024)
    assert schema["vision.blocks.31.attn.wo.bias"] == (1024,)
    assert schema["vision.blocks.0.mlp.w1.weight"] == (5632, 1024)
    assert schema["vision.blocks.0.mlp.w2.weight"] == (1024, 2816)
    assert schema["aligner.w1.weight"] == (5120, 9216)
    assert schema["aligner.w2.bias"] == schema["image_newline"] == (5120,)
    assert vision_schema(replace(FLASH_CONFIG, vision=None)) == {}


# What is refused


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((4, 4, 3), np.uint8), "image: given ndarray"),
        (torch.zeros(4, 4, dtype=torch.uint8), r"shape: given \[4, 4\]"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), r"shape: given \[3, 4, 4\]"),
        (torch.zeros(4, 4, 4, dtype=torch.uint8), r"shape: given \[4, 4, 4\]"),
        (torch.zeros(1, 4, 4, 3, dtype=torch.uint8), r"shape: given \[1, 4, 4, 3\]"),
        (torch.zeros(4, 4, 3, dtype=torch.int32), "type: given torch.int32"),
        (torch.zeros(4, 4, 3, dtype=torch.bool), "type: given torch.bool"),
        (torch.zeros(4, 4, 3, dtype=torch.complex64), "type: given torch.complex64"),
        (torch.zeros(4, 4, 3).to(torch.float8_e4m3fn), "type: given torch.float8_e4m3fn"),
        (torch.zeros(0, 4, 3, dtype=torch.uint8), "size: given 0 x 4"),
        (torch.zeros(4, 0, 3), "size: given 4 x 0"),
        (torch.zeros(1, 1, 3).expand(1 << 14, (1 << 12) + 1, 3), f"1 to {PIXELS_MAX} pixels"),
        (torch.full((4, 4, 3), 255.0), "values: given 255 to 255, expected 0 to 1"),
        (torch.full((4, 4, 3), -0.01), "values"),
    ],
)
def test_image_is_refused_when_it_is_no_image(
    encoder: VisionEncoder, image: torch.Tensor, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        encoder.encode(image)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_image_is_refused_when_one_value_is_not_finite(
    encoder: VisionEncoder, value: float, dtype: torch.dtype
) -> None:
    image = torch.full((9, 7, 3), 0.5, dtype=dtype)
    image[8, 3, 1] = value
    with pytest.raises(InvalidRequest, match="image values"):
        encoder.encode(image)


def test_every_tensor_that_does_not_fit_is_named() -> None:
    tensors = random_tensors(0)
    del tensors["aligner.w1.bias"]
    tensors["vision.norm.weight"] = torch.zeros(17)
    tensors["something.else"] = torch.zeros(1)
    with pytest.raises(InvalidRequest) as raised:
        build_vision(SMALL_CONFIG, tensors)
    assert "aligner.w1.bias is missing" in str(raised.value)
    assert "vision.norm.weight is [17], not [16]" in str(raised.value)
    assert "something" not in str(raised.value)


def test_many_tensors_that_do_not_fit_are_counted() -> None:
    with pytest.raises(InvalidRequest, match=f"and {len(random_tensors(0)) - 8} more"):
        build_vision(SMALL_CONFIG, {})


def test_vision_tensors_that_hold_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", quantised=False)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(vision_schema(tiny_config()))[0]
    tensors[name].fill_(float("inf"))
    save_file(tensors, file)
    with pytest.raises(ModelFileError, match=name):
        load_vision(tmp_path / "model")
