"""The calls of an `AgentClient` that hand out runs of the arena and window records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from ..key import Namespace
from ..layout import BlockLayout
from .agent_access import AgentAccess
from .agent_arguments import bound_deadline, check_chain
from .agent_link import OPEN_DEADLINE_S
from .agent_results import RunOperation, WindowFetch
from .arena_run import ArenaRun
from .arguments import check_first_block, check_keys, check_ttl_class
from .results import FetchResult, SaveResult

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class AgentRunCalls(AgentAccess):
    """Leases, fetches into runs and saves out of them; window state."""

    async def lease_run(
        self, namespace: Namespace, blocks: int, *, deadline_s: float = 1.0
    ) -> ArenaRun | None:
        """Memory for `blocks` blocks, or for fewer if the arena has no more within the deadline;
        None if it has none at all. Raises InvalidArgument, ClientClosed, AgentError."""
        self._check_open("lease_run")
        deadline_s = bound_deadline(deadline_s)
        return await self._runs.lease(
            *await self._namespace(namespace, deadline_s),
            namespace.layout,
            blocks,
            deadline_s=deadline_s,
        )

    def fetch_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: ArenaRun,
        *,
        first_block: int = 0,
        is_by_layer: bool = True,
        deadline_s: float = 2.0,
    ) -> RunOperation[FetchResult]:
        """Begin to read blocks `first_block` to the end of `keys` into a run, from its first block
        on. No coroutine: the call begins it, and returns at once; the run says what is ready, and
        `await` of what is returned gives the result. To be called in the client's event loop.

        `is_by_layer`: the first section of all blocks before the second, and so on; else block
        after block. Raises InvalidArgument, ClientClosed, AgentError.
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
