"""The state of a training run on disk: what a later process goes on from, or exports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .command import InvalidInput, reading

_MEMBERS = ("parameters", "progress", "begun")


def read_state(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The state in a file; raises InvalidInput unless its parameters have these shapes."""
    expected = "the state.pt of a run of training.train"
    with reading("state", path, expected=expected):
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(name in state for name in _MEMBERS):
        given = f"no {', '.join(_MEMBERS)}"
        raise InvalidInput(f"state {path}", given=given, expected=expected)
    parameters = state["parameters"]
    if not isinstance(parameters, dict) or not all(map(torch.is_tensor, parameters.values())):
        raise InvalidInput(f"state {path}", given="parameters of another kind", expected=expected)
    found = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    unfit = {*found, *shapes} - {name for name in found if found[name] == shapes.get(name)}
    if unfit:
        given = f"{len(unfit)} parameters that are missing, unknown or of another shape, "
        given += f"{min(unfit, key=str)} among them"
        needed = "those of training.mini_config with the tokenizer of the data"
        raise InvalidInput(f"state {path}", given=given, expected=needed)
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the state file; the old one stays whole until the new one is."""
    partial = path.with_name(path.name + ".partial")
    torch.save(dict(state), partial)
    partial.replace(path)
