"""The vision encoder once more, from its formulas, in float64 with plain loops over lists.

An oracle for small sizes: it shares no code with the encoder and uses no tensor library.
"""

import math
from collections.abc import Mapping

import numpy as np

Vector = list[float]
Tensors = Mapping[str, np.ndarray]


def encode_by_loops(
    patches: list[Vector],
    *,
    rows: int,
    columns: int,
    layers: int,
    heads: int,
    downsample: int,
    theta: float,
    epsilon: float,
    tensors: Tensors,
) -> list[Vector]:
    """Span embeddings from normalised patches in reading order."""
    embed = "vision.patch_embed.proj"
    x = [_linear(patch, tensors[f"{embed}.weight"], tensors[f"{embed}.bias"]) for patch in patches]
    for layer in range(layers):
        prefix = f"vision.blocks.{layer}"
        normed = [_rms(row, tensors[f"{prefix}.norm1.weight"], epsilon) for row in x]
        attended = _attend(normed, columns, heads, theta, f"{prefix}.attn", tensors)
        x = [_add(row, change) for row, change in zip(x, attended, strict=True)]
        normed = [_rms(row, tensors[f"{prefix}.norm2.weight"], epsilon) for row in x]
        x = [
            _add(row, _swiglu(inner, f"{prefix}.mlp", tensors))
            for row, inner in zip(x, normed, strict=True)
        ]
    x = [_rms(row, tensors["vision.norm.weight"], epsilon) for row in x]
    return _span(x, rows, columns, downsample, tensors)


def _linear(x: Vector, weight: np.ndarray, bias: np.ndarray | None = None) -> Vector:
    out = []
    for index in range(len(weight)):
        total = math.fsum(float(w) * value for w, value in zip(weight[index], x, strict=True))
        out.append(total + (0.0 if bias is None else float(bias[index])))
    return out


def _add(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def _rms(x: Vector, weight: np.ndarray, epsilon: float) -> Vector:
    root = math.sqrt(math.fsum(value * value for value in x) / len(x) + epsilon)
    return [value / root * float(w) for value, w in zip(x, weight, strict=True)]


def _turn(x: Vector, row: int, column: int, theta: float) -> Vector:
    """Pairs (i, i + D / 2): the first half of the pairs by the row, the others by the column."""
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        position, step = (row, i) if i < half // 2 else (column, i - half // 2)
        angle = position * theta ** (-2 * step / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i] * sin + x[i + half] * cos
    return out


def _attend(
    x: list[Vector], columns: int, heads: int, theta: float, prefix: str, tensors: Tensors
) -> list[Vector]:
    width = len(x[0])
    dim = width // heads
    qkv = [
        _linear(row, tensors[f"{prefix}.wqkv.weight"], tensors[f"{prefix}.wqkv.bias"]) for row in x
    ]
    joined: list[Vector] = [[] for _ in x]
    for head in range(heads):
        q, k, v = (
            [row[part * width + head * dim : part * width + (head + 1) * dim] for row in qkv]
            for part in range(3)
        )
        places = [divmod(index, columns) for index in range(len(x))]
        q = [_turn(row, *place, theta) for row, place in zip(q, places, strict=True)]
        k = [_turn(row, *place, theta) for row, place in zip(k, places, strict=True)]
        for index in range(len(x)):
            joined[index] += _softmax_mean(q[index], k, v)
    return [
        _linear(row, tensors[f"{prefix}.wo.weight"], tensors[f"{prefix}.wo.bias"]) for row in joined
    ]


def _softmax_mean(q: Vector, keys: list[Vector], values: list[Vector]) -> Vector:
    scores = [
        math.fsum(a * b for a, b in zip(q, key, strict=True)) / math.sqrt(len(q)) for key in keys
    ]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [
        math.fsum(weight * value[channel] for weight, value in zip(weights, values, strict=True))
        / total
        for channel in range(len(q))
    ]


def _swiglu(x: Vector, prefix: str, tensors: Tensors) -> Vector:
    both = _linear(x, tensors[f"{prefix}.w1.weight"])
    half = len(both) // 2
    inner = [
        gate / (1 + math.exp(-gate)) * up for gate, up in zip(both[:half], both[half:], strict=True)
    ]
    return _linear(inner, tensors[f"{prefix}.w2.weight"])


def _gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _span(
    x: list[Vector], rows: int, columns: int, downsample: int, tensors: Tensors
) -> list[Vector]:
    newline = [float(value) for value in tensors["image_newline"]]
    span = [[float(value) for value in tensors["image_start"]]]
    for top in range(0, rows, downsample):
        for left in range(0, columns, downsample):
            square = []
            for channel in range(len(x[0])):
                for row in range(top, top + downsample):
                    for column in range(left, left + downsample):
                        is_inside = row < rows and column < columns
                        square.append(x[row * columns + column][channel] if is_inside else 0.0)
            first = _linear(square, tensors["aligner.w1.weight"], tensors["aligner.w1.bias"])
            inner = [_gelu(value) for value in first]
            span.append(_linear(inner, tensors["aligner.w2.weight"], tensors["aligner.w2.bias"]))
        span.append(newline)
    span.append([float(value) for value in tensors["image_end"]])
    return span
