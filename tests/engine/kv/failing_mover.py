"""A mover whose device takes no work."""

from __future__ import annotations

from typing import NoReturn

from engine.block_pool import BlockPool
from engine.errors import TransferFailed
from engine.kv.memcpy_mover import MemcpyMover
from kvstore.layout import BlockLayout


class FailingMover(MemcpyMover):
    """Whatever section is to be moved, `error` is raised."""

    def __init__(
        self, pool: BlockPool, layout: BlockLayout, *, error: TransferFailed | None = None
    ) -> None:
        super().__init__(pool, layout)
        self._error = error or TransferFailed("it has failed")

    def to_pool(self, *_: object, **__: object) -> NoReturn:
        raise self._error

    def from_pool(self, *_: object, **__: object) -> NoReturn:
        raise self._error
