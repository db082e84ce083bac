"""The calls of an `AgentClient` that hand out runs of the arena and window records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import AgentError, InvalidArgument
from ..key import Namespace
from ..layout import BlockLayout
from .agent_access import AgentAccess
from .agent_arguments import bound_deadline, bound_ttl, check_chain, check_offer
from .agent_link import OPEN_DEADLINE_S
from .agent_results import RunOffer, RunOperation, WindowFetch
from .arena_run import ArenaRun
from .arguments import Rebuild, check_first_block, check_keys, check_ttl_class
from .results import FetchResult, SaveResult

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class AgentRunCalls(AgentAccess):
    """Leases, fetches into runs and saves out of them; offers; window state."""

    async def lease_run(
        self,
        namespace: Namespace,
        blocks: int,
        *,
        has_parity_room: bool = False,
        deadline_s: float = 1.0,
    ) -> ArenaRun | None:
        """Memory for `blocks` blocks, or for fewer if the arena has no more within the deadline;
        None if it has none at all. `has_parity_room`: also for their parity, which a fetch with
        rebuild="reader" needs. Raises InvalidArgument, ClientClosed, AgentError."""
        self._check_open("lease_run")
        deadline_s = bound_deadline(deadline_s)
        return await self._runs.lease(
            *await self._namespace(namespace, deadline_s),
            namespace.layout,
            blocks,
            deadline_s=deadline_s,
            has_parity_room=has_parity_room,
        )

    def fetch_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: ArenaRun,
        *,
        first_block: int = 0,
        is_by_layer: bool = True,
        rebuild: Rebuild = "agent",
        deadline_s: float = 2.0,
    ) -> RunOperation[FetchResult]:
        """Begin to read blocks `first_block` to the end of `keys` into a run, from its first block
        on. No coroutine: the call begins it, and returns at once; the run says what is ready, and
        `await` of what is returned gives the result. To be called in the client's event loop.

        `is_by_layer`: the first section of all blocks before the second, and so on; else block
        after block. `rebuild`: with "reader" (in layer order) a section of a block counts as ready,
        too, when data shards of the block are lost and all that is needed to rebuild them is there:
        `run.losses` tells which blocks those are. Raises InvalidArgument, ClientClosed, AgentError.
        """
        self._check_open("fetch_run")
        check_chain(namespace, keys)
        check_first_block(keys, first_block)
        return self._runs.begin_fetch(
            self._link.connection,
            namespace.layout,
            keys,
            run,
            first_block=first_block,
            is_by_layer=is_by_layer,
            rebuild=rebuild,
            deadline_s=bound_deadline(deadline_s),
        )

    def save_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: ArenaRun,
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
        deadline_s: float = 10.0,
    ) -> RunOperation[SaveResult]:
        """Hand a run over: its first blocks are saved as blocks `first_block` to the end of `keys`.
        No coroutine: the call hands it over, and returns at once; the run is the agent's, whatever
        becomes of this client. `await` of what is returned gives the result. To be called in the
        client's event loop.

        Raises InvalidArgument, ClientClosed, AgentError.
        """
        self._check_open("save_run")
        check_chain(namespace, keys)
        check_first_block(keys, first_block)
        check_ttl_class(ttl_class)
        return self._runs.begin_save(
            self._link.connection,
            namespace.layout,
            keys,
            run,
            first_block=first_block,
            ttl_class=ttl_class,
            deadline_s=bound_deadline(deadline_s),
        )

    # Handing over ---------------------------------------------------------------------------------

    async def offer_run(self, run: ArenaRun, *, ttl_s: float = 30.0) -> RunOffer:
        """Offer a run to another engine, which may take it within `ttl_s` (two minutes at most), at
        this host or at another. The run is the agent's from now on, whatever becomes of this
        client, and its memory must not be touched any more; nobody has it once the time is up.

        If the agent refuses (AgentRefused: too much is on offer) the run stays the caller's. If
        this is cancelled nobody can take the run. Raises InvalidArgument, ClientClosed, AgentError.
        """
        self._check_open("offer_run")
        ttl_s = bound_ttl(ttl_s)
        return await self._offers.offer(self._link.connection, run, ttl_s=ttl_s)

    async def take_run(
        self, namespace: Namespace, offer: RunOffer, *, deadline_s: float = 2.0
    ) -> ArenaRun | None:
        """The run that an engine has offered: at the same agent the very same memory; from another
        one its bytes, verified, in a run of this host. It is the caller's then, and no other's.

        None if it is gone: taken, withdrawn, expired; if the other host does not give it within the
        deadline; or if there is no room here. Raises InvalidArgument, ClientClosed, AgentError:
        AgentRefused if the offer is of another namespace or layout.
        """
        self._check_open("take_run")
        check_keys(namespace, ())
        check_offer(offer)
        deadline_s = bound_deadline(deadline_s)
        return await self._offers.take(
            *await self._namespace(namespace, deadline_s),
            namespace.layout,
            offer,
            deadline_s=deadline_s,
        )

    async def withdraw_offer(self, offer: RunOffer) -> bool:
        """Nobody shall take what this engine has offered: the run is free, and not the caller's.
        False if it was gone, or the agent is. Raises InvalidArgument, ClientClosed."""
        self._check_open("withdraw_offer")
        check_offer(offer)
        try:
            return await self._offers.withdraw(self._link.connection, offer.ticket)
        except AgentError:
            return False  # the run has gone with its agent, or expires

    # Window state -------------------------------------------------------------------------------

    async def open_namespace(
        self, namespace: Namespace, *, window_layout: BlockLayout | None = None
    ) -> None:
        """Say once what layout the window state of a namespace has. Other calls open a namespace
        when they first need it. Raises InvalidArgument, ClientClosed, AgentError."""
        self._check_open("open_namespace")
        check_keys(namespace, ())
        if window_layout is not None:
            self._window_layouts[namespace.namespace_id] = window_layout
        await self._namespace(namespace, OPEN_DEADLINE_S)

    async def lease_window(
        self, namespace: Namespace, *, deadline_s: float = 1.0
    ) -> ArenaRun | None:
        """Memory for one window record: a run of one block of the window layout; None if the arena
        is full. Raises InvalidArgument, ClientClosed, AgentError."""
        self._check_open("lease_window")
        deadline_s = bound_deadline(deadline_s)
        return await self._windows.lease(
            *await self._namespace(namespace, deadline_s),
            self._window_layout(namespace),
            deadline_s=deadline_s,
        )

    async def put_window(
        self,
        namespace: Namespace,
        key: bytes,
        record: ReadableBuffer | ArenaRun,
        *,
        deadline_s: float = 1.0,
    ) -> bool:
        """Keep the window state at the end of the block that has this key: the sections of the
        window layout one after the other, or a run from `lease_window`, which stays the caller's.

        False if it was not kept. Raises InvalidArgument, ClientClosed, AgentError.
        """
        self._check_open("put_window")
        check_keys(namespace, [key])
        deadline_s = bound_deadline(deadline_s)
        return await self._windows.put(
            *await self._namespace(namespace, deadline_s),
            self._window_layout(namespace),
            key,
            record,
            deadline_s=deadline_s,
        )

    async def lookup(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0
    ) -> list[str | None]:
        """For each key the address of the agent that has its window record: empty for this host's,
        None if nobody is known to have it. Raises InvalidArgument, ClientClosed, AgentError."""
        self._check_open("lookup")
        check_chain(namespace, keys)
        deadline_s = bound_deadline(deadline_s)
        return await self._windows.look_up(
            *await self._namespace(namespace, deadline_s), keys, deadline_s=deadline_s
        )

    async def fetch_window(
        self,
        namespace: Namespace,
        key: bytes,
        into: WriteableBuffer | ArenaRun,
        *,
        deadline_s: float = 1.0,
    ) -> WindowFetch:
        """Get a window record from this host or another one, into a buffer that is as long as the
        window layout's block, or into a run from `lease_window`.

        A record that is gone, or fails its checksum, is not found; then the bytes of `into` are
        undefined. Raises InvalidArgument, ClientClosed, AgentError.
        """
        self._check_open("fetch_window")
        check_keys(namespace, [key])
        deadline_s = bound_deadline(deadline_s)
        return await self._windows.fetch(
            *await self._namespace(namespace, deadline_s),
            self._window_layout(namespace),
            key,
            into,
            deadline_s=deadline_s,
        )

    def _window_layout(self, namespace: Namespace) -> BlockLayout:
        layout = self._window_layouts.get(namespace.namespace_id)
        if layout is None:
            raise InvalidArgument(
                "namespace",
                given="one without a window layout",
                expected="open_namespace(namespace, window_layout=...) before",
            )
        return layout
