"""Whether an engine rebuilds lost shards itself: measured when it starts, on its own machine.

What an agent's worker does on a core, and what the GPU does beside the rest of a load, is timed for
the same blocks. On an engine without a GPU there is nothing to measure: it is the same work by the
same kind of core, and the agent has more of them and begins earlier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from erasure.code import Code
from kvstore.client import BlockingAgentClient
from kvstore.key import Namespace

from ..block_pool import BlockPool
from ..errors import InvalidRequest
from ..store_faults import STORE_ERRORS
from .device_errors import DEVICE_ERRORS, device_error
from .mover import SectionMover, first_line
from .rebuild import Rebuilder

if TYPE_CHECKING:
    from .cuda_rebuild import ShardKernels

log = logging.getLogger(__name__)

MEASURED_BLOCKS = 64
"""A span: what a lost node takes a shard of at one time."""
ROUNDS = 3


class RebuildTimes(NamedTuple):
    """Seconds for the same blocks, each of which has lost a data shard."""

    agent_s: float
    reader_s: float


def choose_is_reader(times: RebuildTimes) -> bool:
    """Shall the reader of a run rebuild?"""
    return times.reader_s < times.agent_s


def find_rebuilder(
    client: BlockingAgentClient,
    namespace: Namespace,
    pool: BlockPool,
    mover: SectionMover,
    *,
    clock: Callable[[], float],
) -> Rebuilder | None:
    """What rebuilds for this pool, if it is to be rebuilt here and not by the agent.

    Takes some seconds where kernels are compiled. An agent that is not there is not waited for.
    Raises DeviceFull, DeviceLost.
    """
    if pool.memory.device.type != "cuda":
        return None
    code = _find_code(client, namespace)
    if code is None:
        return None
    k, m = code
    try:
        # Here: what it needs is an optional package.
        from .cuda_rebuild import GpuRebuilder, ShardKernels

        kernels = ShardKernels(pool.device, pool.block_bytes, k=k, m=m)
        times = measure(kernels, MEASURED_BLOCKS, clock=clock)
    except DEVICE_ERRORS as error:
        raise device_error(error) from error
    # An OSError is a kernel's that could not be compiled.
    except (ImportError, InvalidRequest, RuntimeError, OSError) as error:
        log.warning("lost shards are rebuilt by the agent: %s", first_line(error))
        return None
    is_reader = choose_is_reader(times)
    log.info(
        "lost shards of %d blocks take an agent %.3f ms and this GPU %.3f ms: rebuilt by the %s",
        MEASURED_BLOCKS,
        times.agent_s * 1e3,
        times.reader_s * 1e3,
        "engine" if is_reader else "agent",
    )
    return GpuRebuilder(pool, mover, kernels) if is_reader else None


def _find_code(client: BlockingAgentClient, namespace: Namespace) -> tuple[int, int] | None:
    """k and m of the cluster: a run with room for its parity tells. None, and a line in the log,
    without an agent or without room."""
    try:
        run = client.lease_run(namespace, 1, has_parity_room=True)
    except STORE_ERRORS as error:
        log.warning("lost shards are rebuilt by the agent, which does not answer: %s", error)
        return None
    if run is None:
        log.warning("lost shards are rebuilt by the agent, whose arena has no room at the moment")
        return None
    with run:
        return run.layout.code


def measure(kernels: ShardKernels, blocks: int, *, clock: Callable[[], float]) -> RebuildTimes:
    """Both ways, for so many blocks."""
    shard_bytes = kernels.block_bytes // kernels.k
    return RebuildTimes(
        agent_s=time_on_host(kernels.k, kernels.m, shard_bytes, blocks, clock=clock),
        reader_s=kernels.time_rebuild(blocks, clock, ROUNDS),
    )


def time_on_host(
    k: int, m: int, shard_bytes: int, blocks: int, *, clock: Callable[[], float]
) -> float:
    """Least seconds, of some rounds, in which one core rebuilds and checks these blocks."""
    code = Code(k, m)
    shards = np.ones((blocks, k + m, shard_bytes), np.uint8)
    available = range(1, k + 1)
    sources, targets = list(shards[:, 1 : k + 1]), list(shards[:, :1])
    taken_s = []
    for _ in range(ROUNDS + 1):
        start_s = clock()
        code.reconstruct([0], available, sources, targets, shard_bytes=shard_bytes)
        for block in targets:
            xxh3_64_intdigest(block[0].data)
        taken_s.append(clock() - start_s)
    return min(taken_s[1:])
