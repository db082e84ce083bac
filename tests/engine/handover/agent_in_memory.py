"""What a hand-over needs of an agent, within one process: runs that go from hand to hand."""

from __future__ import annotations

from itertools import count
from threading import Event, Lock
from types import SimpleNamespace

from kvstore.client import RunOffer
from kvstore.key import Namespace
from tests.patience import PATIENCE_S


class RunInMemory:
    def __init__(self, namespace: Namespace, blocks: int) -> None:
        self.namespace = namespace
        self.blocks = blocks
        self.layout = SimpleNamespace(layout=namespace.layout)
        self.is_released = False
        self._sections = [bytearray(blocks * one.bytes) for one in namespace.layout.sections]

    def __enter__(self) -> RunInMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def section(self, index: int) -> memoryview:
        return memoryview(self._sections[index])

    def release(self) -> None:
        self.is_released = True


class AgentInMemory:
    """Of one host, for any number of engines. `may_lease` and `may_take`: until they are set, who
    asks for that waits."""

    def __init__(self) -> None:
        self.may_lease, self.may_take = Event(), Event()
        self.may_lease.set()
        self.may_take.set()
        self.leased: list[RunInMemory] = []
        self._numbers = count(1)
        self._offers: dict[bytes, tuple[RunOffer, RunInMemory]] = {}
        self._lock = Lock()

    @property
    def offers(self) -> int:
        """Runs that wait to be taken."""
        return len(self._offers)

    def lease_run(self, namespace: Namespace, blocks: int, *, deadline_s: float) -> RunInMemory:
        assert self.may_lease.wait(PATIENCE_S)
        run = RunInMemory(namespace, blocks)
        self.leased.append(run)
        return run

    def offer_run(self, run: RunInMemory, *, ttl_s: float) -> RunOffer:
        offer = RunOffer(
            ticket=next(self._numbers).to_bytes(16, "big"),
            host="",
            namespace_id=run.namespace.namespace_id,
            layout=run.namespace.layout.fingerprint,
            blocks=run.blocks,
        )
        with self._lock:
            self._offers[offer.ticket] = offer, run
        return offer

    def take_run(
        self, namespace: Namespace, offer: RunOffer, *, deadline_s: float
    ) -> RunInMemory | None:
        assert self.may_take.wait(PATIENCE_S)
        with self._lock:
            made, run = self._offers.get(offer.ticket, (None, None))
            if made != offer:
                return None
            del self._offers[offer.ticket]
        return run

    def withdraw_offer(self, offer: RunOffer) -> bool:
        with self._lock:
            return self._offers.pop(offer.ticket, None) is not None
