"""The event loop of a node: one thread, epoll, and a few threads for the disk.

Single-threaded on purpose: the state of targets and connections needs no locks, and the system
calls that move bytes release the interpreter to the disk threads anyway.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .connection import READABLE, Connection
from .disk_work import sync_segments
from .node import Node, SyncPolicy
from .worker_pool import Completion, WorkerPool

log = logging.getLogger(__name__)

SCRATCH_BYTES = 256 << 10
EVENTS_PER_POLL_MAX = 256
ACCEPTS_PER_POLL_MAX = 64
KEEPALIVE_IDLE_S = 60
"""A peer whose machine is gone is noticed after about so long, plus three probes of 10 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Bounds of what peers may cost."""

    connections_max: int = 1024
    """Further ones are closed at once."""
    frame_s: float = 30.0
    """A frame that is begun must be complete after so long, in both directions."""
    stall_s: float = 2.0
    """A payload must go on after so long while others wait in line for memory."""
    stop_s: float = 2.0
    """How long requests under way may go on when the node is told to stop."""
    disk_threads: int = 8
    """Reads from a device, writes and syncs that are under way at once."""
    check_s: float = 0.25
    """How often slow peers are looked for."""
    check_waiting_s: float = 0.02
    """The same while somebody waits in line for memory or a turn."""
    sync_interval_s: float = 1.0
    """How often written segments are synced with SyncPolicy.INTERVAL."""
    look_interval_s: float = 1.0
    """How often it is looked whether the targets' folders are still in their place."""
    access_times_interval_s: float = 60.0
    """How often it is noted beside the segments when shards were used."""


class Server:
    """Serves a node on a listening socket until it is told to stop."""

    def __init__(
        self, node: Node, listener: socket.socket, settings: ServerSettings | None = None
    ) -> None:
        self.node = node
        self.settings = settings or ServerSettings()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._listener = listener
        self._listener.setblocking(False)
        self._workers = WorkerPool(self.settings.disk_threads)
        self._epoll = select.epoll()
        self._stop_signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connections: dict[int, Connection] = {}
        self._watched: dict[int, int] = {}
        self._ready: deque[Connection] = deque()
        self._is_accepting = False
        self._is_syncing = False
        self._is_looking = False
        self._is_noting_access = False
        self._is_saving_policy = False
        now_s = node.clock.monotonic_s()
        self._check_due_s = now_s
        self._sync_due_s = now_s + self.settings.sync_interval_s
        self._look_due_s = now_s + self.settings.look_interval_s
        self._access_due_s = now_s + self.settings.access_times_interval_s
        self._stop_due_s: float | None = None
        self._has_ended = False
        # The descriptor must not be closed, and its number given to somebody else, between a look
        # and a write. Reentrant, since a signal handler may interrupt the thread that holds it.
        self._stop_lock = threading.RLock()

    def request_stop(self) -> None:
        """Make `run` end soon. May be called from a signal handler or another thread, and late."""
        with self._stop_lock:
            if not self._has_ended:
                os.eventfd_write(self._stop_signal, 1)

    def run(self) -> None:
        """Serve until `request_stop`. A broken invariant is raised, and ends everything."""
        try:
            self._serve()
            self._finish()
        finally:
            self._release()

    def _serve(self) -> None:
        for descriptor in (self._workers.wakeup, self._stop_signal):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._accept_again()
        while not self._has_stopped():
            for descriptor, _ in self._epoll.poll(self._timeout_s(), EVENTS_PER_POLL_MAX):
                # An event that came with the one that closed its connection has nobody to go to.
                connection = self._connections.get(descriptor)
                if connection is not None:
                    connection.visit()
                else:
                    self._dispatch(descriptor)
            for _ in range(len(self._ready)):
                connection = self._ready.popleft()
                if not connection.is_closed:
                    connection.visit()
            self._tick()

    # For connections ------------------------------------------------------------------------------

    def watch(self, connection: Connection, events: int) -> None:
        """See `connection.Reactor`.

        A connection that waits for no event is taken out of epoll, which reports a hang-up whether
        one asks for it or not, again and again.
        """
        descriptor = connection.socket.fileno()
        watched = self._watched.get(descriptor, 0)
        if watched == events:
            return
        if not events:
            self._epoll.unregister(descriptor)
            del self._watched[descriptor]
            return
        if watched:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._watched[descriptor] = events

    def visit_soon(self, connection: Connection) -> None:
        """See `connection.Reactor`."""
        self._ready.append(connection)

    def submit(self, call: Callable[[], Any], deliver: Callable[[Completion], None]) -> None:
        """See `connection.Reactor`."""
        self._workers.submit(call, deliver)

    def check_soon(self) -> None:
        """See `connection.Reactor`."""
        soon_s = self.node.clock.monotonic_s() + self.settings.check_waiting_s
        self._check_due_s = min(self._check_due_s, soon_s)

    def release_socket(self, connection: Connection) -> None:
        """See `connection.Reactor`."""
        self.watch(connection, 0)
        del self._connections[connection.socket.fileno()]

    def forget(self, connection: Connection) -> None:
        """See `connection.Reactor`."""
        self.node.connections -= 1
        self._accept_again()

    # The loop -------------------------------------------------------------------------------------

    def _dispatch(self, descriptor: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor == self._workers.wakeup:
            for completion in self._workers.take_done():
                completion.deliver(completion)
        elif descriptor == self._stop_signal:
            self._begin_stop()

    def _timeout_s(self) -> float:
        if self._ready:
            return 0.0
        return max(self._check_due_s - self.node.clock.monotonic_s(), 0.0)

    def _tick(self) -> None:
        now_s = self.node.clock.monotonic_s()
        if now_s >= self._check_due_s:
            is_anybody_waiting = False
            for connection in list(self._connections.values()):
                connection.check_time(now_s)
                is_anybody_waiting |= connection.is_waiting
            settings = self.settings
            period_s = settings.check_waiting_s if is_anybody_waiting else settings.check_s
            self._check_due_s = now_s + period_s
            self._accept_again()
        if self.node.sync is SyncPolicy.INTERVAL and now_s >= self._sync_due_s:
            self._sync_due_s = now_s + self.settings.sync_interval_s
            self._sync()
        if now_s >= self._look_due_s:
            self._look_due_s = now_s + self.settings.look_interval_s
            self._look_after_folders()
            self._save_policy(now_s)
        if now_s >= self._access_due_s:
            self._access_due_s = now_s + self.settings.access_times_interval_s
            self._note_access_times()

    def _note_access_times(self) -> None:
        """Have a thread write down when shards were used; see `access_times`."""
        if self._is_noting_access:
            return
        self._is_noting_access = True
        rounds = [
            (target.access_times, list(target.space.segments.values()))
            for target in self.node.targets.values()
            if not target.is_lost
        ]

        def deliver(completion: Completion) -> None:
            self._is_noting_access = False
            if completion.error is not None:
                raise completion.error

        def write() -> None:
            for access_times, segments in rounds:
                access_times.write(self.node.disk, segments)

        self._workers.submit(write, deliver)

    def _look_after_folders(self) -> None:
        """Find out whether the targets' folders are still in their place."""
        if self._is_looking:
            return
        self._is_looking = True
        targets = list(self.node.targets.values())

        def deliver(completion: Completion) -> None:
            self._is_looking = False
            if completion.error is not None:
                raise completion.error
            for target, problem in zip(targets, completion.value, strict=True):
                target.note_place(problem)

        folders = [target.folder for target in targets]
        # In a thread: a file system that hangs must not hold up the loop.
        self._workers.submit(lambda: [folder.find_problem() for folder in folders], deliver)

    def _save_policy(self, now_s: float) -> None:
        """Have a thread write the policy that could not be written when it came."""
        store = self.node.policy
        if not store.is_save_due(now_s) or not store.turn.try_take():
            return
        self._is_saving_policy = True
        policy = store.current

        def deliver(completion: Completion) -> None:
            self._is_saving_policy = False
            if completion.error is None:
                store.note_saved(policy)
            elif isinstance(completion.error, OSError):
                store.note_failed(policy, completion.error, self.node.clock.monotonic_s())
            else:
                raise completion.error
            store.turn.release()

        self._workers.submit(partial(store.save, policy), deliver)

    def _sync(self) -> None:
        if self._is_syncing:
            return
        dirty = [s for target in self.node.targets.values() for s in target.take_dirty()]
        if not dirty:
            return
        self._is_syncing = True
        for segment in dirty:
            segment.pins += 1

        def deliver(completion: Completion) -> None:
            self._is_syncing = False
            if completion.error is not None:
                raise completion.error
            for segment in dirty:
                segment.pins -= 1
                segment.is_dirty |= bool(completion.value)
            for error in completion.value:
                log.error("sync failed: %s", error)

        self._workers.submit(partial(sync_segments, self.node.disk, dirty), deliver)

    # Accepting ------------------------------------------------------------------------------------

    def _accept_again(self) -> None:
        if not self._is_accepting and self._stop_due_s is None:
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
            self._is_accepting = True

    def _pause_accepting(self) -> None:
        if self._is_accepting:
            self._epoll.unregister(self._listener.fileno())
            self._is_accepting = False

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_POLL_MAX):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Out of descriptors: the next check tries again, and meanwhile peers wait.
                log.error("cannot accept: %s", error)
                self._pause_accepting()
                return
            peer = f"{address[0]}:{address[1]}"
            if self.node.connections >= self.settings.connections_max:
                self.node.counters.connections_refused += 1
                log.warning("refused peer=%s: %d connections", peer, self.node.connections)
                sock.close()
                continue
            self._welcome(sock, peer)

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.node.connections += 1
        self.node.counters.connections_accepted += 1
        connection = Connection(
            sock,
            peer,
            node=self.node,
            reactor=self,
            frame_s=self.settings.frame_s,
            stall_s=self.settings.stall_s,
        )
        self._connections[sock.fileno()] = connection
        self.watch(connection, READABLE)

    # The end --------------------------------------------------------------------------------------

    def _begin_stop(self) -> None:
        os.eventfd_read(self._stop_signal)
        if self._stop_due_s is not None:
            return
        log.info("stopping connections=%d", self.node.connections)
        self._stop_due_s = self.node.clock.monotonic_s() + self.settings.stop_s
        self._pause_accepting()
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.stop()

    def _has_stopped(self) -> bool:
        if self._stop_due_s is None:
            return False
        now_s = self.node.clock.monotonic_s()
        return self.node.connections == 0 or now_s >= self._stop_due_s

    def _finish(self) -> None:
        """Bring to its end what threads have begun, so that no slot is left half written."""
        for connection in list(self._connections.values()):
            connection.close("the node stops", logging.WARNING)
        due_s = self.node.clock.monotonic_s() + self.settings.stop_s
        poll = select.poll()
        poll.register(self._workers.wakeup, select.POLLIN)
        while self.node.connections or self._is_busy():
            left_s = due_s - self.node.clock.monotonic_s()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                log.error("a disk thread is stuck; leaving it behind")
                break
            for completion in self._workers.take_done():
                completion.deliver(completion)
        else:
            self._workers.close()

    def _is_busy(self) -> bool:
        """Whether a thread works for the node itself."""
        is_writing = self._is_syncing or self._is_noting_access or self._is_saving_policy
        return is_writing or self._is_looking

    def _release(self) -> None:
        with self._stop_lock:
            self._has_ended = True
            os.close(self._stop_signal)
        for connection in self._connections.values():
            connection.socket.close()
        self._listener.close()
        self._epoll.close()
