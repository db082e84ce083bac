"""The workers that a client knows: who takes prompts, who takes sequences, and where they are.

A folder of `cachalot up --engines` has a socket for each: p01.sock is a prefill worker, d01.sock a
decode worker, and b01.sock does both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidRequest
from ..worker.address import WorkerAddress, parse_address

SOCKET_SUFFIX = ".sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    """Addresses of workers by their role. Raises InvalidRequest if nobody goes on with what a
    prefill worker begins; who decodes computes prompts too, where nobody else does."""

    prefill: tuple[WorkerAddress, ...] = ()
    decode: tuple[WorkerAddress, ...] = ()
    both: tuple[WorkerAddress, ...] = ()

    def __post_init__(self) -> None:
        if not self.for_sequences:
            counts = (
                f"{len(self.prefill)} prefill, {len(self.decode)} decode, {len(self.both)} both"
            )
            raise InvalidRequest(
                "engine workers",
                given=counts,
                expected="at least one of decode or of both: a prefill worker gives the first"
                " token of an answer and no more",
            )

    @property
    def for_prompts(self) -> tuple[WorkerAddress, ...]:
        """Who is asked first."""
        return self.prefill + self.both

    @property
    def for_sequences(self) -> tuple[WorkerAddress, ...]:
        """Who goes on with what another worker has begun."""
        return self.decode + self.both


def find_places(path: str) -> EnginePlaces:
    """The workers in a folder of sockets; or one that does both, at an address.

    Raises InvalidRequest.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        return EnginePlaces(both=(parse_address(path, "--engines"),))
    found: dict[str, list[WorkerAddress]] = {"p": [], "d": [], "b": []}
    for socket_path in sorted(folder.glob(f"*{SOCKET_SUFFIX}")):
        found.get(socket_path.name[0], []).append(WorkerAddress(path=socket_path))
    if not any(found.values()):
        raise InvalidRequest(
            "--engines",
            given=f"{path}, a folder without a socket of an engine",
            expected="the folder `engines` of a cluster whose engines run, or the address of one",
        )
    return EnginePlaces(prefill=tuple(found["p"]), decode=tuple(found["d"]), both=tuple(found["b"]))
