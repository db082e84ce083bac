"""What an engine worker is told when it is started, and which of it cannot be. Pure."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvstore.errors import shown
from kvstore.token_file import read_token_file

from ..errors import InvalidRequest
from ..scheduler.cost import MeasuredCost
from .address import WorkerAddress, parse_host_port

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
DEVICE_PATTERN = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
MEMORY_BYTES_MIN = 1 << 20


class Role(Enum):
    """What a worker does with a prompt."""

    PREFILL = "prefill"
    """Computes it, gives the first token, and hands the sequence over."""
    DECODE = "decode"
    """Goes on with sequences of others; a prompt that cannot be handed over it answers alone."""
    BOTH = "both"
    """Answers it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Raises InvalidRequest, which names the option of `cachalot engine`."""

    role: Role
    model: Path
    listen: WorkerAddress
    agent: Path | None = None
    """Socket of this host's agent. Without one nothing is found, saved or handed over."""
    name: str = "engine"
    pool_blocks: int | None = None
    pool_bytes: int | None = None
    """Memory for the pool of blocks, in place of `pool_blocks`."""
    sequences: int = 16
    queue: int = 64
    step_budget_s: float | None = None
    cost: MeasuredCost | None = None
    threads: int | None = None
    """Of the CPU; None for as many as a model of this size has use for."""
    ticket_key: bytes = b""
    """Of all engines that hand over to each other; without one, whoever speaks to a worker can make
    tickets of any tokens."""
    device: str = "cpu"
    must_pin: bool = False
    """With a GPU: an arena that cannot be page-locked is an error, not just slow."""
    grace_s: float = 60.0
    read_deadline_s: float | None = None
    """How far behind a client may be with reading; None for that of `ConnectionBounds`."""
    metrics: str | None = None
    """HOST:PORT where /metrics is served."""
    is_log_json: bool = False

    def __post_init__(self) -> None:
        if self.role is not Role.BOTH and self.agent is None:
            raise InvalidRequest(
                "--agent", given="none", expected=f"one, for the role {self.role.value}"
            )
        if not NAME_PATTERN.fullmatch(self.name):
            expected = "1 to 32 letters, digits, dots, dashes and underscores"
            raise InvalidRequest("--name", given=repr(self.name), expected=expected)
        if not DEVICE_PATTERN.fullmatch(self.device):
            # Whether the device is there the tensor library knows.
            expected = "cpu, cuda, or cuda: and a number"
            raise InvalidRequest("--device", given=shown(self.device), expected=expected)
        if self.metrics is not None:
            parse_host_port(self.metrics, "--metrics")
        if self.pool_blocks is not None and self.pool_bytes is not None:
            raise InvalidRequest("--pool-memory", given="--pool-blocks too", expected="one of them")
        if self.pool_bytes is not None and self.pool_bytes < MEMORY_BYTES_MIN:
            given = f"{self.pool_bytes} bytes"
            raise InvalidRequest("--pool-memory", given=given, expected="1MiB or more")


def read_ticket_key(path: Path) -> bytes:
    """The key that a file's secret gives. Raises InvalidArgument, naming the option."""
    return hashlib.sha256(read_token_file(path, option="--ticket-key").encode()).digest()


_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_memory_bytes(option: str, text: str) -> int:
    """Bytes from a size such as 512MiB. Raises InvalidRequest."""
    found = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]iB|B|)", text.strip())
    if found is None:
        raise InvalidRequest(option, given=repr(text), expected="a size such as 512MiB or 4GiB")
    return int(found[1]) * _UNITS[found[2]]
