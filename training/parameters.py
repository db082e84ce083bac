"""What is trained: float32 tensors by their published names, the experts of a layer as one.

    layers.N.ffn.experts.K.w1.weight [F, E], for all K -> layers.N.ffn.experts.w1.weight [X, F, E]

One tensor for all experts of a layer saves a step thousands of small calls. All else is named and
shaped as in a checkpoint.
"""

import re
from collections.abc import Mapping

import torch

from engine.models.deepseek_v41.checkpoint.tensor_schema import Storage, tensor_schema
from engine.models.deepseek_v41.config import DeepseekV41Config

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\.w[123]\.weight)")
DRAFT_PREFIX = "mtp."
ROUTER_BIASES = (".gate.bias", ".gate.bias_vl")
"""Moved by the balance of the experts, not by a gradient."""


def storages_of(config: DeepseekV41Config) -> dict[str, Storage]:
    """How a checkpoint keeps each parameter, in the order of the model."""
    schema = tensor_schema(config)
    return {_stacked_name(name): schema[name].storage for name in schema}


def shapes_of(config: DeepseekV41Config) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, experts stacked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in tensor_schema(config).items():
        stacked = _stacked_name(name)
        if stacked == name:
            shapes[name] = spec.shape
        else:
            shapes[stacked] = (shapes.get(stacked, (0,))[0] + 1, *spec.shape)
    return shapes


def count_parameters(config: DeepseekV41Config) -> int:
    """Numbers in all tensors of a checkpoint, the n-gram tables and every expert among them."""
    return sum(torch.Size(spec.shape).numel() for spec in tensor_schema(config).values())


def stack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters, float32, of tensors by their published names."""
    stacked: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            stacked[name] = tensor.float()
        else:
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = tensor.float()
    for name, parts in experts.items():
        stacked[name] = torch.stack([parts[number] for number in sorted(parts)])
    return stacked


def unstack_experts(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their published names; those of experts are views."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in parameters.items():
        head, separator, tail = name.partition(".experts.")
        if not separator:
            tensors[name] = tensor
            continue
        for number, part in enumerate(tensor.unbind(0)):
            tensors[f"{head}.experts.{number}.{tail}"] = part
    return tensors


def names_of_target(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """What a gradient trains of the model proper."""
    return [n for n in parameters if not n.startswith(DRAFT_PREFIX) and _has_gradient(n)]


def names_of_draft(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """What a gradient trains of the draft stages."""
    return [n for n in parameters if n.startswith(DRAFT_PREFIX) and _has_gradient(n)]


def _has_gradient(name: str) -> bool:
    return not name.endswith(ROUTER_BIASES)


def _stacked_name(name: str) -> str:
    match = _EXPERT.fullmatch(name)
    return name if match is None else match[1] + match[3]


def initialise(config: DeepseekV41Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Parameters to start from, on the CPU.

    Matrices are normal with variance 1 / inputs; those that write to the residual are smaller by
    the root of twice the number of layers. mHC starts as in DeepInfer (facts: each site reads one
    stream, in turn, and streams stay apart). Norm weights are 1, sinks and router biases 0.
    """
    parameters = {}
    for name, shape in shapes_of(config).items():
        parameters[name] = _initial(name, shape, config, generator)
    return parameters


EMBEDDING_DEVIATION = 0.5
HEAD_DEVIATION = 0.02
_TO_RESIDUAL = (".wo_b.weight", ".w2.weight", ".engram.wkv.weight")
_ONES = ("norm.weight", ".q_weight", ".k_weight")
_ZEROS = (
    "_fn",
    ".attn_sink",
    ".gate.bias",
    ".gate.bias_vl",
    ".markov_head.head.weight",
    ".confidence_head.proj.weight",
)


def _initial(
    name: str, shape: tuple[int, ...], config: DeepseekV41Config, generator: torch.Generator
) -> torch.Tensor:
    if name.endswith("_scale"):
        return torch.full(shape, 0.01)
    if name.endswith("_base"):
        return _initial_base(name, config.streams)
    if name.endswith(_ONES):
        return torch.ones(shape)
    if name.endswith(_ZEROS):
        return torch.zeros(shape)
    deviation = shape[-1] ** -0.5
    if name.endswith("embed.weight"):
        deviation = EMBEDDING_DEVIATION
    elif name == "head.weight":
        deviation = HEAD_DEVIATION
    elif name.endswith(_TO_RESIDUAL):
        deviation *= (2 * config.layers) ** -0.5
    return torch.randn(shape, generator=generator) * deviation


def _initial_base(name: str, streams: int) -> torch.Tensor:
    """[pre n | post n | comb n x n]: the site of layer l reads stream l mod n."""
    layer = int(name.split(".")[1])
    pre = torch.full((streams,), -3.0)
    pre[layer % streams] = 3.0
    comb = torch.full((streams, streams), -3.0).fill_diagonal_(3.0)
    return torch.cat([pre, torch.zeros(streams), comb.flatten()])
