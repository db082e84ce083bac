"""The package nixl as far as a mover calls it: an agent that copies within one process, and only
between memory that is registered. What it answers may be set."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

Rows = NDArray[np.uint64]


class FakeConfig:
    def __init__(self, backends: Sequence[str]) -> None:
        self.backends = list(backends)


class FakeHandle:
    def __init__(self, operation: str, local: Rows, remote: Rows) -> None:
        self.operation = operation
        self.local, self.remote = local, remote
        self.is_begun = False
        self.is_released = False


class FakeAgent:
    """`fails`: names of calls that raise. `states`: what is answered in place of the truth."""

    def __init__(self, package: FakeNixl, name: str, config: FakeConfig) -> None:
        package.raise_if_told("nixl_agent")
        self.name = name
        self.backends = dict.fromkeys(package.backends)
        self._package = package
        self.registered: dict[int, int] = {}
        """Bytes by address."""

    def register_memory(
        self, memory: torch.Tensor | list[tuple[int, int, int, str]], *_: str, backends: list[str]
    ) -> tuple[int, int]:
        self._package.raise_if_told("register_memory")
        if isinstance(memory, torch.Tensor):
            start, size = memory.data_ptr(), memory.numel()
        else:
            ((start, size, _device, _text),) = memory
        if sum(self.registered.values()) + size > self._package.room_bytes:
            raise LookupError("NIXL_ERR_NO_ROOM")
        assert start not in self.registered
        self.registered[start] = size
        return start, size

    def deregister_memory(self, registered: tuple[int, int], backends: list[str]) -> None:
        self._package.raise_if_told("deregister_memory")
        assert not self._package.is_moving, "memory of a transfer that is under way"
        assert self.registered.pop(registered[0]) == registered[1]

    def get_xfer_descs(self, rows: Rows, memory: str) -> Rows:
        for start, size, _ in rows.tolist():
            assert any(
                first <= start and start + size <= first + whole
                for first, whole in self.registered.items()
            ), "a piece that is not registered"
        return rows

    def initialize_xfer(
        self, operation: str, local: Rows, remote: Rows, name: str, backends: list[str]
    ) -> FakeHandle:
        self._package.raise_if_told("initialize_xfer")
        assert name == self.name
        handle = FakeHandle(operation, local, remote)
        self._package.handles.append(handle)
        return handle

    def transfer(self, handle: FakeHandle) -> str:
        self._package.raise_if_told("transfer")
        handle.is_begun = True
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: FakeHandle) -> str:
        self._package.raise_if_told("check_xfer_state")
        assert handle.is_begun
        assert not handle.is_released
        if self._package.state == "DONE":
            for local, remote in zip(handle.local.tolist(), handle.remote.tolist(), strict=True):
                source, target = (local, remote) if handle.operation == "WRITE" else (remote, local)
                assert source[1] == target[1]
                ctypes.memmove(target[0], source[0], source[1])
        return self._package.state

    def release_xfer_handle(self, handle: FakeHandle) -> None:
        self._package.raise_if_told("release_xfer_handle")
        assert not handle.is_released
        handle.is_released = True


class FakeNixl:
    """Stands for the package's module of agents."""

    def __init__(self) -> None:
        self.backends = ["UCX"]
        self.agents: list[FakeAgent] = []
        self.handles: list[FakeHandle] = []
        self.state = "DONE"
        """Of every transfer."""
        self.fails: set[str] = set()
        """Calls that raise."""
        self.room_bytes = 1 << 40
        """Of all memory that is registered at one time."""

    def raise_if_told(self, call: str) -> None:
        if call in self.fails:
            raise LookupError(f"NIXL_ERR_{call.upper()}\nand a trace")

    @property
    def is_moving(self) -> bool:
        return any(one.is_begun and not one.is_released for one in self.handles)

    @property
    def registered(self) -> dict[int, int]:
        """Of the last agent."""
        return self.agents[-1].registered

    def nixl_agent_config(self, *, backends: list[str]) -> FakeConfig:
        return FakeConfig(backends)

    def nixl_agent(self, name: str, config: FakeConfig) -> FakeAgent:
        self.agents.append(FakeAgent(self, name, config))
        return self.agents[-1]

    @property
    def module(self) -> ModuleType:
        return cast("ModuleType", self)
