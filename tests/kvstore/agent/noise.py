"""A hostile engine: requests of every kind, right, half right and wrong, and bytes that are none.

Run as a program it makes so many sessions of noise against an agent and prints how often it sent
each request, and what was answered. Everything is drawn from the seed. Started by `make_noise`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore import agent_messages as m
from kvstore.layout import BlockLayout, Section

from .arena_runs import V41_SECTIONS
from .engine_steps import WINDOW
from .raw_engine import RawEngine, rows_of

LAYOUT = BlockLayout(tuple(Section(f"s{at}", size) for at, size in enumerate(V41_SECTIONS)))
ROOT = Path(__file__).resolve().parents[3]
PROCESS_S = 120.0
ANSWER_S = 0.1
"""So long a session waits for an answer before it goes on without."""
REQUEST_TYPES: tuple[type[m.Message], ...] = m.Request.__args__
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Noise:
    """How often each was sent, and how often each came back, by the name of the message."""

    sent: dict[str, int]
    answered: dict[str, int]


def start_noise(socket_path: Path, seed: int, sessions: int) -> subprocess.Popen[str]:
    """The process; what it made is told by `read_noise`."""
    words = [sys.executable, "-m", __spec__.name, os.fspath(socket_path), str(seed), str(sessions)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def read_noise(process: subprocess.Popen[str]) -> Noise:
    """Waits for its end."""
    output, _ = process.communicate(timeout=PROCESS_S)
    assert process.returncode == 0
    return Noise(**json.loads(output))


class Generator:
    """Draws messages. `runs` and `namespaces` are numbers that the session really has."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.runs: list[int] = []
        self.window_runs: list[int] = []
        self.namespaces: list[int] = []
        self.offers: list[m.RunOffered] = []
        self._draw_by_type: dict[type[m.Message], Callable[[], m.Message]] = {
            m.Hello: lambda: m.Hello(version=self._pick(m.PROTOCOL_VERSION, 0, 99), client="noise"),
            m.OpenNamespace: self.open_namespace,
            m.Match: lambda: m.Match(self._namespace(), self._keys(), self._deadline_s()),
            m.MatchPrompt: self._match_prompt,
            m.LeaseRun: self._lease_run,
            m.ReleaseRun: lambda: m.ReleaseRun(self._run()),
            m.FetchRun: self._fetch_run,
            m.StoreRun: self._store_run,
            m.OfferRun: lambda: m.OfferRun(self._run(), self._pick(0.001, 0.05, 1.0)),
            m.TakeRun: self._take_run,
            m.WithdrawOffer: lambda: m.WithdrawOffer(self._ticket()),
            m.Forget: lambda: m.Forget(
                self._namespace(), self._keys(), self._first_block(), self._deadline_s()
            ),
            m.AskNodes: lambda: m.AskNodes(self._deadline_s()),
            m.PutWindow: lambda: m.PutWindow(
                self._namespace(), self._key(), self._run(is_window=True)
            ),
            m.LookUpWindows: lambda: m.LookUpWindows(
                self._namespace(), self._keys(), self._deadline_s()
            ),
            m.FetchWindow: lambda: m.FetchWindow(
                self._namespace(), self._key(), self._run(is_window=True), self._deadline_s()
            ),
            m.AskStatus: m.AskStatus,
        }
        assert set(self._draw_by_type) == set(REQUEST_TYPES)

    def request(self) -> m.Message:
        """One that the protocol knows; its numbers may mean nothing."""
        return self._draw_by_type[self.rng.choice(REQUEST_TYPES)]()

    def spoilt(self, request: m.Message) -> bytes:
        """The same on the wire with something wrong in it."""
        how = self.rng.randrange(5)
        if how == 0:  # a field of another type, or out of its bounds
            fields: dict[str, Any] = msgspec.to_builtins(request, builtin_types=[bytes])
            fields[self.rng.choice(list(fields))] = self._pick(-1, 2**64 - 1, "x", b"y", None, [1])
            return self._framed(_encode(fields))
        if how == 1:  # a field too many, or one too few
            fields = msgspec.to_builtins(request, builtin_types=[bytes])
            if self.rng.random() < 0.5:
                fields["more"] = 1
            else:
                del fields[self.rng.choice(list(fields))]
            return self._framed(_encode(fields))
        data = bytearray(m.pack_message(self.rng.randrange(2**32), request))
        if how == 2:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        elif how == 3:
            del data[self.rng.randrange(len(data)) :]
        else:
            data = bytearray(self.rng.randbytes(self.rng.randrange(1, 20_000)))
        return bytes(data)

    def open_namespace(self) -> m.OpenNamespace:
        sections = rows_of(LAYOUT)
        others = [("a", 4_096)], [("a", 0)], [("a", 1), ("a", 2)], [("x" * 128, 2**31 - 1)] * 1024
        return m.OpenNamespace(
            model="noise",
            weights=self._pick("w1", "w2", "x" * 1024),
            tokenizer="t",
            sections=sections if self.rng.random() < 0.7 else self.rng.choice(others),
            window_sections=rows_of(WINDOW) if self.rng.random() < 0.7 else None,
        )

    def _lease_run(self) -> m.LeaseRun:
        return m.LeaseRun(
            namespace=self._namespace(),
            blocks=self._pick(1, 1, 2, 4, 8, 100, 65_536),
            deadline_s=self._deadline_s(),
            is_window=self.rng.random() < 0.4,
        )

    def _match_prompt(self) -> m.MatchPrompt:
        return m.MatchPrompt(
            namespace=self._namespace(),
            keys=self._keys(),
            prompt_tokens=self._pick(0, 127, 128, 300, 1 << 20, 2**31 - 1),
            is_dense=self.rng.random() < 0.5,
            deadline_s=self._deadline_s(),
        )

    def _fetch_run(self) -> m.FetchRun:
        return m.FetchRun(
            run=self._run(),
            keys=self._keys(),
            first_block=self._first_block(),
            is_by_layer=self.rng.random() < 0.5,
            deadline_s=self._deadline_s(),
        )

    def _store_run(self) -> m.StoreRun:
        return m.StoreRun(
            run=self._run(),
            keys=self._keys(),
            first_block=self._first_block(),
            ttl_class=self._pick("chat", "chat", "chat", "chat", "noise", "", "no such", "x" * 128),
            deadline_s=self._deadline_s(),
        )

    def _take_run(self) -> m.TakeRun:
        return m.TakeRun(
            namespace=self._namespace(),
            ticket=self._ticket(),
            host=self._pick("", "", "127.0.0.1:1", "0.0.0.0:7", "name:7", "x" * 1024),
            namespace_id=self.offers[-1].namespace_id if self.offers else bytes(16),
            layout=self._pick(LAYOUT.fingerprint, bytes(32)),
            blocks=self._pick(1, 1, 2, 4, 8, 65_536),
            deadline_s=self._deadline_s(),
        )

    def _ticket(self) -> bytes:
        if self.offers and self.rng.random() < 0.8:
            return self.rng.choice(self.offers).ticket
        return self.rng.randbytes(16)

    def _run(self, *, is_window: bool = False) -> int:
        """One of its own, most of the time; one of somebody else, perhaps; or none."""
        right, wrong = self.runs, self.window_runs
        if is_window:
            right, wrong = wrong, right
        if right and self.rng.random() < 0.7:
            return self.rng.choice(right)
        if wrong and self.rng.random() < 0.5:
            return self.rng.choice(wrong)
        return self.rng.choice([0, self.rng.randrange(1, 5_000), 2**53])

    def _namespace(self) -> int:
        if self.namespaces and self.rng.random() < 0.9:
            return self.rng.choice(self.namespaces)
        return self.rng.choice([0, 7, 2**31 - 1])

    def _keys(self) -> bytes:
        count = self._pick(1, 1, 2, 4, 8, 0, 100)
        odd = self._pick(0, 0, 0, 0, 0, 0, 31)
        if self.rng.random() < 0.02:
            count, odd = m.KEYS_PER_MESSAGE_MAX, 0
        return self.rng.randbytes(32 * count + odd)

    def _key(self) -> bytes:
        return bytes([self.rng.randrange(8)]) * 32

    def _first_block(self) -> int:
        return self.rng.choice([0, 0, 0, 0, 0, 0, 1, 3, 2**31 - 1])

    def _deadline_s(self) -> float:
        return self.rng.choice([0.001, 0.05, 1.0, 3600.0])

    def _pick(self, *values: Any) -> Any:  # noqa: ANN401 (of any field)
        return self.rng.choice(values)

    def _framed(self, body: bytes) -> bytes:
        return m.HEAD.pack(len(body), self.rng.randrange(2**32)) + body


class Session:
    """One connection of noise."""

    def __init__(self, path: Path, rng: random.Random, sent: Counter[str]) -> None:
        self._rng = rng
        self._generator = Generator(rng)
        self._sent = sent
        self._engine = RawEngine(path)
        self.answered: Counter[str] = Counter()

    def run(self) -> None:
        with self._engine as engine:
            try:
                if self._rng.random() < 0.9:
                    engine.hello()
                    self._prepare()
                engine.socket.settimeout(ANSWER_S)
                for _ in range(self._rng.randrange(1, 30)):
                    self._speak()
            except (ConnectionError, TimeoutError):
                return  # it was thrown out, or went before all was answered

    def _prepare(self) -> None:
        """Most sessions have something that requests can be about."""
        engine, generator = self._engine, self._generator
        for _ in range(self._rng.randrange(3)):
            answer = engine.answer(engine.send(generator.open_namespace()))
            if isinstance(answer, m.NamespaceOpened):
                generator.namespaces.append(answer.namespace)
        for _ in range(self._rng.randrange(4)):
            if not generator.namespaces:
                return
            is_window = self._rng.random() < 0.4
            request = m.LeaseRun(
                namespace=self._rng.choice(generator.namespaces),
                blocks=1 if is_window else self._rng.randrange(1, 9),
                deadline_s=1.0,
                is_window=is_window,
            )
            answer = engine.answer(engine.send(request))
            if isinstance(answer, m.RunLeased) and answer.blocks:
                (generator.window_runs if is_window else generator.runs).append(answer.run)
                self._use_well(request, answer)

    def _use_well(self, leased: m.LeaseRun, run: m.RunLeased) -> None:
        """Now and then a session behaves: what is asked of it is right, and its answer awaited."""
        keys, key = self._rng.randbytes(32 * run.blocks), bytes([self._rng.randrange(8)]) * 32
        fetch: m.Message = m.FetchRun(run.run, keys, 0, self._rng.random() < 0.5, 1.0)
        store: m.Message = m.StoreRun(run.run, keys, 0, "chat", 1.0)
        if leased.is_window:
            fetch = m.FetchWindow(leased.namespace, key, run.run, 1.0)
            store = m.PutWindow(leased.namespace, key, run.run)
        if not leased.is_window and self._rng.random() < 0.3:
            self._hand_over(leased.namespace, run)
            return
        for request in (fetch, store):
            if self._rng.random() < 0.3:
                answer = self._engine.answer(self._engine.send(request))
                self.answered[type(answer).__name__] += 1

    def _hand_over(self, namespace: int, run: m.RunLeased) -> None:
        """To itself, or to whoever guesses; perhaps nobody takes it."""
        offered = self._engine.answer(self._engine.send(m.OfferRun(run.run, 1.0)))
        self.answered[type(offered).__name__] += 1
        if not isinstance(offered, m.RunOffered):
            return
        self._generator.offers.append(offered)
        if self._rng.random() < 0.5:
            take = m.TakeRun(
                namespace=namespace,
                ticket=offered.ticket,
                host=offered.host,
                namespace_id=offered.namespace_id,
                layout=LAYOUT.fingerprint,
                blocks=run.blocks,
                deadline_s=1.0,
            )
            taken = self._engine.answer(self._engine.send(take))
            if isinstance(taken, m.RunLeased) and taken.blocks:
                self._generator.runs.append(taken.run)

    def _speak(self) -> None:
        request = self._generator.request()
        if self._rng.random() < 0.1:
            self._engine.socket.sendall(self._generator.spoilt(request))
            return
        self._sent[type(request).__name__] += 1
        number = self._engine.send(request)
        if self._rng.random() < 0.5:
            with suppress(TimeoutError):
                answer = self._engine.answer(number)
                self.answered[type(answer).__name__] += 1


def _make(path: Path, seed: int, sessions: int) -> Noise:
    rng = random.Random(seed)
    sent: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for _ in range(sessions):
        session = Session(path, rng, sent)
        session.run()
        answered += session.answered
    return Noise(sent, answered)


if __name__ == "__main__":
    noise = _make(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(json.dumps({"sent": noise.sent, "answered": noise.answered}))
