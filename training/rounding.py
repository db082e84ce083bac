"""The formats of cache rows and weights as roundings that gradients pass straight through.

The same numbers, bit for bit, as `kernels.reference` gives for finite ones, in a few elementwise
steps that a device captures into a graph: no bytes are made, nothing is checked, and infinity or
NaN spreads. The gradient of a rounding is taken as 1 (Bengio et al., 2013).
"""

# The library's context of a function has no type of its own.
# ruff: noqa: ANN001

from collections.abc import Callable

import torch

from engine.models.deepseek_v41.checkpoint.tensor_schema import SCALE_CHANNELS, Storage

E4M3_MAX, E2M1_MAX = 448.0, 6.0
WINDOW_AMAX_MIN = 1e-4
MAIN_AMAX_MIN = E2M1_MAX * 2.0**-9
NORMAL_MIN = 2.0**-126

_MANTISSA = (1 << 23) - 1
_EXPONENT = 0x7F800000

Rounding = Callable[[torch.Tensor], torch.Tensor]


class _StraightThrough(torch.autograd.Function):
    """A function on a tensor whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, function: Rounding) -> torch.Tensor:
        return function(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _StraightThroughTogether(torch.autograd.Function):
    """The same for several tensors that are rounded in one call."""

    @staticmethod
    def forward(ctx, function: Callable, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(tensors))

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads)


def round_window_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D], D a multiple of 32, as the rows of a window ring keep it."""
    return _StraightThrough.apply(x, _window)


def round_main_entries(x: torch.Tensor) -> torch.Tensor:
    """x [..., D], D a multiple of 16, as main entries keep it."""
    return _StraightThrough.apply(x, _main)


def round_index_entries(x: torch.Tensor) -> torch.Tensor:
    """x [..., J], J a multiple of 32, as index keys keep it; index queries too."""
    return _StraightThrough.apply(x, _index)


def round_weights(
    weights: dict[str, torch.Tensor], storages: dict[str, Storage]
) -> dict[str, torch.Tensor]:
    """Each weight as its storage keeps it: PLAIN as BF16, FLOAT32 as it is.

    Weights of one storage are rounded together, so that a step makes few calls. The last dimension
    of FP4_ROWS and FP8_ROWS, and the last two of FP8_BLOCKS, are multiples of 32.
    """
    rounded = dict(weights)
    for storage, function in _TOGETHER.items():
        names = [name for name in weights if storages[name] is storage]
        if names:
            tensors = [weights[name] for name in names]
            rounded.update(
                zip(names, _StraightThroughTogether.apply(function, *tensors), strict=True)
            )
    return rounded


def _power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below x, for positive normal float32 x, by its bits."""
    bits = x.view(torch.int32) + _MANTISSA
    return (bits & _EXPONENT).view(torch.float32)


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(torch.float32)


def _to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to even, for magnitudes up to 6 (above: 6).

    Steps are 0.5 below 2, 1 below 4, then 2: half the power of two that is at or below a number.
    """
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    at_least_1 = x.abs().clamp_(min=1.0)
    step = (at_least_1.view(torch.int32) & _EXPONENT).view(torch.float32).mul_(0.5)
    return (x / step).round_().mul_(step)


def _groups(x: torch.Tensor, channels: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, channels))
    return groups, groups.abs().amax(-1, keepdim=True).clamp_(min=floor)


def _window(x: torch.Tensor) -> torch.Tensor:
    groups, amax = _groups(x, 32, WINDOW_AMAX_MIN)
    scales = _power_of_two_above(amax / E4M3_MAX)
    return _to_e4m3(groups / scales).mul_(scales).flatten(-2)


def _main(x: torch.Tensor) -> torch.Tensor:
    groups, amax = _groups(x, 16, MAIN_AMAX_MIN)
    scales = _to_e4m3((amax / E2M1_MAX).clamp_(max=E4M3_MAX))
    return _to_e2m1(groups / scales).mul_(scales).flatten(-2)


def _index(x: torch.Tensor) -> torch.Tensor:
    groups, amax = _groups(x, 32, E2M1_MAX * NORMAL_MIN)
    scales = _power_of_two_above(amax / E2M1_MAX)
    return _to_e2m1(groups / scales).mul_(scales).flatten(-2)


def _fp8_groups(groups: torch.Tensor) -> torch.Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=E4M3_MAX * NORMAL_MIN)
    scales = _power_of_two_above(amax / E4M3_MAX)
    return _to_e4m3(groups / scales).mul_(scales)


def _fp8_blocks(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    blocks = [_split_blocks(tensor) for tensor in tensors]
    rounded = _fp8_groups(torch.cat([part.flatten(0, 1).flatten(1) for part in blocks]))
    pieces = rounded.split([part.shape[0] * part.shape[1] for part in blocks])
    return [
        piece.view(part.shape).transpose(1, 2).reshape(tensor.shape)
        for piece, part, tensor in zip(pieces, blocks, tensors, strict=True)
    ]


def _split_blocks(w: torch.Tensor) -> torch.Tensor:
    """[N / 32, K / 32, 32, 32] of [N, K]."""
    rows = w.flatten(0, -2)
    split = rows.unflatten(0, (-1, SCALE_CHANNELS)).unflatten(2, (-1, SCALE_CHANNELS))
    return split.transpose(1, 2)


def _rows_of_32(round_groups: Rounding) -> Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]]:
    def round_rows(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        flat = torch.cat([tensor.reshape(-1, SCALE_CHANNELS) for tensor in tensors])
        pieces = round_groups(flat).split([tensor.numel() // SCALE_CHANNELS for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    return round_rows


def _bf16(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    flat = torch.cat([tensor.flatten() for tensor in tensors]).bfloat16().float()
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


_TOGETHER = {
    Storage.PLAIN: _bf16,
    Storage.FP8_BLOCKS: _fp8_blocks,
    Storage.FP8_ROWS: _rows_of_32(_fp8_groups),
    Storage.FP4_ROWS: _rows_of_32(_index),
}
