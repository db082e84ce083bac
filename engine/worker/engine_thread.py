"""The thread that an engine runs in: requests go in by a queue, answers come out by a callback.

    event loop: submit, resume, abort -> queue -> [ commands, step, hand-overs ] -> post(deliveries)

Nothing here waits for a client, a store or a socket. A fault of the engine ends the thread and is
given to whoever owns it: an engine whose books may be wrong must not go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import asdict, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..errors import DeviceLost, EngineBusy, InvalidRequest
from ..kv.mover import first_line
from ..llm_engine import LLMEngine
from ..request import Request, TokenEvent
from ..request_checks import PreparedRequest, prepare_request
from ..request_report import RequestReport
from .hand_overs import HandOvers
from .messages import Failed, Finished, Refused, Tokens
from .outbox import Delivery

IDLE_WAIT_S = 1.0
"""Between two looks of an engine that has nothing to do and is not woken."""
ORDERS_PER_STEP = 32
"""More wait for the next step: however many clients come at one time, answers go on."""


class EngineThread:
    """Runs one engine. All public methods are for other threads, and wait for nobody.

    The queue of commands is as short as clients are few: each has one request, which is begun once
    and aborted once. `on_end` is called in the thread when it ends, with the error that ended it.
    """

    def __init__(
        self,
        engine: LLMEngine,
        hand_overs: HandOvers | None,
        *,
        ends_after_prefill: bool,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._engine = engine
        self._hand_overs = hand_overs
        self._ends_after_prefill = ends_after_prefill
        self._on_end = on_end
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliveries: list[Delivery] = []
        self._running: set[str] = set()
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def start(self, post: Callable[[Run[Delivery]], None]) -> None:
        """Run from now on; answers go to `post`, in the thread."""
        self._thread = threading.Thread(target=self._run, args=(post,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Answer a prompt. What takes longer for a longer one is done here, by the caller."""
        request = replace(request, ends_after_prefill=self._ends_after_prefill)
        try:
            prepared = prepare_request(request, self._engine.runner)
        except InvalidRequest as error:
            self._order(partial(self._refuse_invalid, request.request_id, str(error)))
        else:
            self._order(partial(self._submit, prepared))

    def resume(self, request_id: str, ticket: bytes) -> None:
        """Go on with a sequence from elsewhere."""
        self._order(partial(self._resume, request_id, ticket))

    def abort(self, request_id: str) -> None:
        """Nobody waits for the answer any more; nothing happens if it has ended."""
        self._order(partial(self._abort, request_id))

    def hand_over_all(self) -> None:
        """Send away what decodes, each sequence once; what does not decode yet has failed."""
        self._order(self._hand_over_all)

    def stop(self, deadline_s: float) -> bool:
        """End the thread, with whatever runs; False if it hangs in a step."""
        assert self._thread is not None, "it was not started"
        self._is_ending = True  # whatever else is in line
        self._engine.wake()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def describe(self) -> dict[str, Any]:
        """The engine and its hand-overs as they are, for the status document."""
        status = asdict(self._engine.status)
        times = self._engine.times
        moved = {} if self._hand_overs is None else self._hand_overs.counts()
        return {
            "engine": status,
            "times": {
                "step": times.step.to_values(),
                "first_token": times.first_token.to_values(),
            },
            "hand_overs": moved,
        }

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._engine.wake()

    # In the thread --------------------------------------------------------------------------------

    def _run(self, post: Callable[[Run[Delivery]], None]) -> None:
        error: BaseException | None = None
        try:
            while not self._is_ending:
                self._turn()
                deliveries, self._deliveries = self._deliveries, []
                post(deliveries)
        except torch.AcceleratorError as fault:
            error = DeviceLost(f"the device has failed: {first_line(fault)}")
        except BaseException as fault:
            error = fault
        self._on_end(error)

    def _turn(self) -> None:
        self._follow_orders()
        if self._is_ending:
            return
        has_more = bool(self._deliveries) or not self._commands.empty()
        for event in self._engine.step(wait_s=0.0 if has_more else IDLE_WAIT_S):
            self._tell(event)
        if self._hand_overs is not None:
            for delivery in self._hand_overs.poll():
                self._running.discard(delivery[0])
                self._deliveries.append(delivery)

    def _follow_orders(self) -> None:
        for _ in range(ORDERS_PER_STEP):
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _submit(self, prepared: PreparedRequest) -> None:
        request_id = prepared.request.request_id
        try:
            self._engine.add_request(prepared)
        except EngineBusy as error:
            self._say(request_id, Refused(reason=str(error), cause="busy"))
        except InvalidRequest as error:
            self._refuse_invalid(request_id, str(error))
        else:
            self._running.add(request_id)

    def _refuse_invalid(self, request_id: str, reason: str) -> None:
        self._say(request_id, Refused(reason=reason, cause="invalid"))

    def _resume(self, request_id: str, ticket: bytes) -> None:
        refused: Refused | None = Refused(reason="this worker has no agent", cause="ticket")
        if self._hand_overs is not None:
            refused = self._hand_overs.receive(request_id, ticket)
        if refused is None:
            self._running.add(request_id)
        else:
            self._say(request_id, refused)

    def _abort(self, request_id: str) -> None:
        if request_id not in self._running:
            return
        self._running.discard(request_id)
        self._engine.abort(request_id)
        if self._hand_overs is not None:
            self._hand_overs.forget(request_id)

    def _hand_over_all(self) -> None:
        decoding = set(self._engine.decoding_ids())
        for request_id in list(self._running):
            if request_id in decoding and self._hand_overs is not None:
                self._hand_overs.send(request_id, is_drain=True)
            elif not self._is_leaving(request_id):
                self._abort(request_id)
                self._say(request_id, Failed(reason="the worker drained before it was done"))

    def _tell(self, event: TokenEvent) -> None:
        """What an event means for the client, and for the sequence."""
        request_id = event.request_id
        if event.token_ids:
            self._say(
                request_id,
                Tokens(
                    position=event.position,
                    token_ids=event.token_ids,
                    replay_first=event.replay_first,
                ),
            )
        if event.is_prefilled:
            assert self._hand_overs is not None
            report = describe_report(event.report)
            self._hand_overs.send(request_id, is_drain=False, report=report)
        elif event.finish_reason is not None:
            self._running.discard(request_id)
            if self._hand_overs is not None:
                self._hand_overs.forget(request_id)
            match event.finish_reason:
                case "stop" | "length":
                    report = describe_report(event.report)
                    self._say(request_id, Finished(reason=event.finish_reason, report=report))
                case "no_room":
                    self._say(request_id, Failed(reason="no room for its blocks"))
                case "aborted":
                    pass  # by us: nobody waits for it

    def _say(self, request_id: str, answer: Tokens | Finished | Refused | Failed) -> None:
        self._deliveries.append((request_id, answer))

    def _is_leaving(self, request_id: str) -> bool:
        return self._hand_overs is not None and self._hand_overs.is_leaving(request_id)


def describe_report(report: RequestReport | None) -> dict[str, Any]:
    """A report as a client gets it: what was saved by then, in place of the receipt."""
    if report is None:
        return {}
    fields = {name: getattr(report, name) for name in REPORTED}
    return fields | {"blocks": asdict(report.receipt.summary())}


REPORTED = tuple(name for name in RequestReport.__dataclass_fields__ if name != "receipt")
