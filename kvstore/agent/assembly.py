"""An agent put together of its parts: what is there for which role, and in which order it starts
and ends. Clock, chance, sockets and memory are handed in (`main`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..arena.region import ArenaRegion
from ..arena.run_layout import RunCode
from ..client.store_client import StoreClient
from ..cluster.address import host_of, is_loopback
from ..socket_file import SocketFile
from ..window.directory import DirectoryPart
from ..window.directory_host import DirectoryHost
from ..window.peers import Peers
from ..window.pool import WindowPool
from ..window.service import WindowService
from .arena_runs import ArenaRuns
from .matching import PromptMatcher
from .offers import OfferBook
from .options import AgentOptions, Role
from .peer_listener import address_of
from .peer_server import PeerServer
from .policy_follower import PolicyFollower
from .requests import AgentIdentity, RequestHandler
from .run_receiver import RunReceiver
from .run_requests import ArenaParts
from .run_sender import RunSender
from .server import UnixServer
from .session_bounds import SessionBounds
from .status import StatusParts, make_status
from .store_queue import StoreQueue
from .workers import WorkerPool

log = logging.getLogger(__name__)

FINISH_DEADLINE_S = 5.0
"""So long the runs that were handed over may still be saved when the agent is told to stop."""
LAST_ANSWERS_DEADLINE_S = 0.5
"""After it the answers to what was saved are lost; they are ready at once as a rule."""
WORKERS_DEADLINE_S = 1.0
OFFER_SHARE = 2
"""Runs that are offered may take 1 / OFFER_SHARE of the arena."""
STORE_SHARE = 2
"""Runs that wait to be saved may take 1 / STORE_SHARE of the arena; the rest is for fetches."""


@dataclass(frozen=True, slots=True)
class OpenArena:
    """Shared memory: its descriptor, and as it is mapped here."""

    descriptor: int
    region: ArenaRegion


@contextmanager
def open_arena(size_bytes: int) -> Iterator[OpenArena]:
    """An arena, until left. Raises StoreError if the system gives none."""
    descriptor = ArenaRegion.create(size_bytes)
    try:
        with ArenaRegion(descriptor) as region:
            yield OpenArena(descriptor, region)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """Where an agent runs, and what it is given there. All of it stays the caller's."""

    name: str
    pid: int
    uid: int
    version: str
    instance: int
    """Random once for the process."""
    make_ticket: Callable[[], bytes]
    """16 random bytes, others each time."""
    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    socket_file: SocketFile
    peer_listener: socket.socket
    arena: OpenArena | None
    """None for an agent without a role that moves bytes."""


class Agent:
    """The parts, and their life: `start`, `stop` when it is told to, `close` in any case."""

    def __init__(self, options: AgentOptions, place: AgentPlace, store: StoreClient) -> None:
        self.options = options
        self.name = place.name
        self.pid = place.pid
        self.address = address_of(place.peer_listener)
        self._place = place
        self._store = store
        self._bounds = SessionBounds()
        self._started_s = place.clock()
        self._policy = PolicyFollower(store, sleep=place.sleep, first_turn=place.pid)
        self._windows = self._make_windows()
        self._matcher = PromptMatcher(store, self._windows, place.clock)
        self._workers = self._make_workers()
        self._arena = self._make_arena()
        self._handler = RequestHandler(
            AgentIdentity(
                name=place.name,
                instance=place.instance,
                roles=options.roles,
                cluster_path=str(options.cluster_path.absolute()),
                address=self.address,
            ),
            store=store,
            matcher=self._matcher,
            arena=self._arena,
            windows=self._windows,
            status=self.status,
            bounds=self._bounds,
            clock=place.clock,
        )
        self._peers = self._make_peer_server()
        self._server: UnixServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Serves from the return on. What runs in the background runs in `group`."""
        place = self._place
        self._warn_of_loopback()
        loops = [self._policy.run(), self._peers.run()]
        if self._workers is not None:
            await self._workers.start()
        if self._arena is not None:
            arena = self._arena
            loops += [arena.queue.run(), arena.offers.run(place.sleep), arena.runs.run(place.sleep)]
        self._windows.start()
        self._tasks = [group.create_task(loop) for loop in loops]
        self._server = UnixServer(
            place.socket_file.listener,
            self._handler,
            group=group,
            loop=place.loop,
            uid=place.uid,
            bounds=self._bounds,
        )
        self._server.start()

    async def stop(self) -> None:
        """Takes no more, lets what was handed over be saved for a while, and ends everything."""
        assert self._server is not None
        self._handler.is_stopping = True
        self._server.stop_accepting()
        self._place.socket_file.close()
        if self._arena is not None:
            await self._arena.queue.finish(FINISH_DEADLINE_S)
            await self._server.send_last_answers(LAST_ANSWERS_DEADLINE_S)
        self._server.close_sessions("the agent stops")
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Ends what other processes and other agents would otherwise have to notice."""
        await self._windows.stop()
        if self._arena is not None:
            self._arena.receiver.close()
        if self._workers is not None:
            await self._workers.stop(WORKERS_DEADLINE_S)

    def _warn_of_loopback(self) -> None:
        """An address of this machine alone is of no use to entrypoints on others."""
        far = [one for one in self._store.map.entrypoints if not is_loopback(one.host)]
        if far and is_loopback(host_of(self.address)):
            log.warning(
                "other machines cannot fetch from address=%s, but entrypoint=%s is on another one;"
                " start the agent with --listen and an address of this machine's network",
                self.address,
                far[0].name,
            )

    def status(self) -> dict[str, Any]:
        """The status document (`status`)."""
        arena = self._arena
        server = self._server
        return make_status(
            StatusParts(
                options=self.options,
                name=self.name,
                instance=self._place.instance,
                address=self.address,
                pid=self.pid,
                version=self._place.version,
                uptime_s=lambda: self._place.clock() - self._started_s,
                map_epoch=lambda: self._store.map.epoch,
                server=(lambda: {}) if server is None else server.describe,
                peers=self._peers.describe,
                fetches=self._handler.fetches,
                matches=self._matcher.counters,
                runs=None if arena is None else arena.runs,
                jobs=None if arena is None else arena.jobs,
                queue=None if arena is None else arena.queue,
                offers={} if arena is None else arena.describe_offers(),
                windows=self._windows.describe,
                directory=self._windows.describe_directory,
            )
        )

    # Putting it together --------------------------------------------------------------------------

    def _make_windows(self) -> WindowService:
        """Every agent has it, if only to ask: one without the role keeps no record."""
        place, options = self._place, self.options
        directory = None
        if options.entrypoint is not None and Role.CHECK in options.roles:
            part = DirectoryPart(place.clock)
            directory = DirectoryHost(part, instance=place.instance, clock=place.clock)
        is_keeping = Role.WINDOW in options.roles
        memory_bytes = options.window_memory_bytes if is_keeping else 0
        return WindowService(
            pool=WindowPool(memory_bytes, self._policy.window_ttl_s, place.clock),
            directory=directory,
            entrypoint=options.entrypoint,
            cluster_map=lambda: self._store.map,
            address=self.address,
            instance=place.instance,
            loop=place.loop,
            clock=place.clock,
        )

    def _make_peer_server(self) -> PeerServer:
        return PeerServer(
            self._place.peer_listener,
            cluster=self._store.map.cluster_id,
            find=self._windows.find,
            ttl_left_s=self._windows.pool.ttl_left_s,
            directory=self._windows.directory,
            offered=None if self._arena is None else self._arena.sender,
            status=self.status,
            loop=self._place.loop,
        )

    def _make_workers(self) -> WorkerPool | None:
        options, place = self.options, self._place
        if place.arena is None:
            return None
        return WorkerPool(
            cluster_path=options.cluster_path,
            arena=place.arena.descriptor,
            fetch_workers=options.fetch_workers if Role.FETCH in options.roles else 0,
            has_store_worker=Role.STORE in options.roles,
            loop=place.loop,
            clock=place.clock,
            is_log_json=options.is_log_json,
        )

    def _make_arena(self) -> ArenaParts | None:
        arena, place = self._place.arena, self._place
        if arena is None:
            return None
        assert self._workers is not None
        runs = ArenaRuns(arena.region, clock=place.clock)
        offers = OfferBook(
            runs.book,
            clock=place.clock,
            make_ticket=place.make_ticket,
            bytes_max=arena.region.size_bytes // OFFER_SHARE,
        )
        cluster = self._store.map.cluster_id
        peers = Peers(cluster=cluster, loop=place.loop, clock=place.clock)
        return ArenaParts(
            descriptor=arena.descriptor,
            code=RunCode(self._store.map.code.k, self._store.map.code.m),
            runs=runs,
            jobs=self._workers,
            queue=StoreQueue(
                self._workers,
                runs.book.end_store,
                loop=place.loop,
                clock=place.clock,
                bytes_max=arena.region.size_bytes // STORE_SHARE,
            ),
            offers=offers,
            sender=RunSender(offers, runs.memory),
            receiver=RunReceiver(peers, loop=place.loop, clock=place.clock),
        )
