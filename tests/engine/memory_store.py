"""Block stores that keep bytes in memory: a sound one, and ones with one fault each."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

from kvstore.errors import NodeUnreachable
from kvstore.key import Namespace


@dataclass(frozen=True)
class Fetched:
    blocks: int
    rejected_shards: int = 0


@dataclass(frozen=True)
class Saved:
    stored: int
    known: int
    failed: int = 0


class MemoryStore:
    """Keeps blocks in a dictionary and counts the calls."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, bytes], bytes] = {}
        self.calls: list[str] = []

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        self.calls.append("match")
        present = [(namespace.namespace_id, key) in self.blocks for key in keys]
        return present.index(False) if False in present else len(keys)

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> Fetched:
        self.calls.append("fetch")
        assert len(buffers) == len(keys) - first_block
        for index, (key, buffer) in enumerate(zip(keys[first_block:], buffers, strict=True)):
            data = self.blocks.get((namespace.namespace_id, key))
            if data is None:
                return Fetched(index)
            buffer[:] = data
        return Fetched(len(buffers))

    def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
    ) -> Saved:
        self.calls.append("save")
        assert len(buffers) == len(keys) - first_block
        stored = 0
        for key, buffer in zip(keys[first_block:], buffers, strict=True):
            assert len(buffer) == namespace.layout.block_bytes
            if (namespace.namespace_id, key) not in self.blocks:
                self.blocks[namespace.namespace_id, key] = bytes(buffer)
                stored += 1
        return Saved(stored=stored, known=len(buffers) - stored)


class ShortStore(MemoryStore):
    """Promises all it has, delivers `delivered_blocks` and leaves rubbish in the other buffers."""

    def __init__(self, delivered_blocks: int) -> None:
        super().__init__()
        self.delivered_blocks = delivered_blocks

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> Fetched:
        super().fetch(namespace, keys, buffers, first_block=first_block, deadline_s=deadline_s)
        for buffer in buffers[self.delivered_blocks :]:
            # As bfloat16 these are NaN: any use of them would spread into the logits.
            buffer[:] = b"\xff" * len(buffer)
        return Fetched(min(self.delivered_blocks, len(buffers)), rejected_shards=3)


class FailingStore(MemoryStore):
    """Raises an operating error in the operations named."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = failing

    def _fail(self, operation: str) -> None:
        if operation in self.failing:
            raise NodeUnreachable("n0", f"{operation} was refused")

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        self._fail("match")
        return super().match(namespace, keys)

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> Fetched:
        self._fail("fetch")
        return super().fetch(
            namespace, keys, buffers, first_block=first_block, deadline_s=deadline_s
        )

    def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
    ) -> Saved:
        self._fail("save")
        return super().save(namespace, keys, buffers, first_block=first_block, ttl_class=ttl_class)


class StuckStore(MemoryStore):
    """Saves nothing until `release` is set; `entered` is set when a save has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = Event()
        self.release = Event()

    def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
    ) -> Saved:
        self.entered.set()
        assert self.release.wait(30)
        return super().save(namespace, keys, buffers, first_block=first_block, ttl_class=ttl_class)
