"""How parameters move: Muon for the matrices inside layers, Adam with decoupled decay for the rest.

Muon (Jordan et al., 2024) makes the momentum of a matrix orthogonal with a few Newton-Schulz steps:
all its directions are learnt at one pace. Every step is made of tensors on the device, the learning
rate too, so that it can be captured into a graph.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
ADAM_EPSILON = 1e-10
MATRIX_DECAY = 0.1
MUON_RATE = 0.02
"""Of updates whose size is that of Adam's at a tenth of it: see `_scale`."""
ADAM_RATE = 2e-3
TABLE_RATE = 4e-3

_TABLES = ("embed.weight", "markov_head.head.weight", "head.weight")
_NOT_ORTHOGONAL = (*_TABLES, "gate.weight", "weights_proj.weight", "confidence_head.proj.weight")


def is_orthogonalised(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon moves it: a matrix, or a stack of them, between channels and channels.

    Not tables with a row a token or n-gram, not routers and other heads, not what mHC keeps small.
    """
    is_matrix = name.endswith(".weight") and parameter.ndim >= 2
    return is_matrix and not name.endswith(_NOT_ORTHOGONAL)


class Optimiser:
    """Moves `parameters` in place by their gradients; `set_rate` comes before each step."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._matrices: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        others: list[torch.Tensor] = []
        tables: list[torch.Tensor] = []
        for name, parameter in parameters.items():
            if is_orthogonalised(name, parameter):
                self._matrices[parameter.shape[-2:]].append(parameter)
            else:
                (tables if name.endswith(_TABLES) else others).append(parameter)
        device = next(iter(parameters.values())).device
        self._momenta = {
            shape: torch.zeros(sum(p[..., 0, 0].numel() for p in group), *shape, device=device)
            for shape, group in self._matrices.items()
        }
        self._rate = torch.zeros((), device=device)
        groups = [
            {"params": others, "lr": torch.zeros((), device=device)},
            {"params": tables, "lr": torch.zeros((), device=device)},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=ADAM_BETAS,
            eps=ADAM_EPSILON,
            weight_decay=0.0,
            fused=True if device.type == "cuda" else None,
            capturable=device.type == "cuda",
        )
        self._all = list(parameters.values())
        self._peaks = [
            ADAM_RATE if group is groups[0] else TABLE_RATE for group in groups if group["params"]
        ]

    def set_rate(self, factor: float) -> None:
        """Learning rates as a share of their peaks."""
        self._rate.fill_(factor * MUON_RATE)
        for group, peak in zip(self._adam.param_groups, self._peaks, strict=True):
            group["lr"].fill_(factor * peak)

    def clear_gradients(self) -> None:
        for parameter in self._all:
            parameter.grad = None

    def clip_gradients(self, norm_max: float) -> torch.Tensor:
        """Scale all gradients down to a common norm; returns the norm before, a scalar tensor."""
        return torch.nn.utils.clip_grad_norm_(self._all, norm_max, foreach=True)

    @torch.no_grad()
    def step(self) -> None:
        self._adam.step()
        for shape, group in self._matrices.items():
            momentum = self._momenta[shape]
            grads = torch.cat([_stack(_gradient_of(parameter)) for parameter in group])
            momentum.lerp_(grads, 1 - MOMENTUM)
            # Nesterov: look ahead by one more step of the momentum.
            update = orthogonalise(grads.lerp(momentum, MOMENTUM)) * _scale(shape)
            sizes = [_stack(parameter).shape[0] for parameter in group]
            for parameter, part in zip(group, update.split(sizes), strict=True):
                parameter.mul_(1 - self._rate * MATRIX_DECAY)
                parameter.sub_(self._rate * part.view_as(parameter))

    def state(self) -> dict[str, Any]:
        return {"adam": self._adam.state_dict(), "momenta": list(self._momenta.values())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, for the same parameters."""
        for own, given in zip(self._momenta.values(), state["momenta"], strict=True):
            own.copy_(given)
        rates = [group["lr"] for group in self._adam.param_groups]
        self._adam.load_state_dict(state["adam"])
        for group, rate in zip(self._adam.param_groups, rates, strict=True):
            group["lr"] = rate


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """[..., N, K] with singular values near 1 (0.7 to 1.2) and the same singular vectors."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _scale(shape: torch.Size) -> float:
    """Steps in proportion to what keeps the outputs' size the same over shapes."""
    return max(1.0, shape[-2] / shape[-1]) ** 0.5


def _stack(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


WARM_UP = 0.02
DECAY_START = 0.45


def learning_rate_factor(progress: float) -> float:
    """Share of the peak at `progress` 0 to 1 of a run: a short rise, a plateau, a fall to 0."""
    rise = min(1.0, progress / WARM_UP)
    fall = min(1.0, (1.0 - progress) / (1.0 - DECAY_START))
    return max(0.0, min(rise, fall))
