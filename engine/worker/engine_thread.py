"""The thread that an engine runs in: requests go in by a queue, answers come out by a callback.

    event loop: submit, resume -> request line -> [ orders, step, hand-overs ] -> post(deliveries)
                abort, hand_over_all -> orders ----^

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
from ..request import FinishReason, TokenEvent
from ..request_checks import PreparedRequest, prepare_request
from ..request_report import RequestReport
from .hand_overs import HandOvers
from .messages import (
    DRAINING,
    Answer,
    Failed,
    Finished,
    MalformedMessage,
    Refused,
    Submit,
    Tokens,
    Waiting,
)
from .outbox import Delivery
from .request_line import Begin, RequestLine
from .request_log import log_end
from .submission import read_submission

IDLE_WAIT_S = 1.0
"""Between two looks of an engine that has nothing to do and is not woken."""
ORDERS_PER_STEP = 32
"""More wait for the next step: however many clients come at one time, answers go on."""
NOTICE_INTERVAL_S = 2.0
"""Between two words to a client that gets no tokens."""


class EngineThread:
    """Runs one engine. All public methods are for other threads, and wait for nobody.

    `line` bounds what is not begun; it is closed by `stop`. What is begun is aborted once at most,
    so there are no more orders than requests. `on_end` is called in the thread when it ends, with
    the error that ended it.
    """

    def __init__(
        self,
        engine: LLMEngine,
        hand_overs: HandOvers | None,
        line: RequestLine,
        *,
        ends_after_prefill: bool,
        on_end: Callable[[BaseException | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._hand_overs = hand_overs
        self._line = line
        line.on_ready = engine.wake
        self._ends_after_prefill = ends_after_prefill
        self._on_end = on_end
        self._clock = clock
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliveries: list[Delivery] = []
        self._running: set[str] = set()
        self._noticed_s = clock()
        self._grown: set[str] = set()
        """Requests that got tokens since then."""
        self._is_ending = False
        self._is_leaving = False
        """Whatever can go elsewhere goes."""
        self._thread: threading.Thread | None = None

    def start(self, post: Callable[[Run[Delivery]], None]) -> None:
        """Run from now on; answers go to `post`, in the thread."""
        self._thread = threading.Thread(target=self._run, args=(post,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, request_id: str, message: Submit) -> Refused | None:
        """Answer a prompt; or why not, if too many wait to be begun."""
        return self._enter(request_id, partial(self._read, request_id, message))

    def resume(self, request_id: str, ticket: bytes) -> Refused | None:
        """Go on with a sequence from elsewhere; or why not, as `submit`."""
        return self._enter(request_id, lambda: partial(self._resume, request_id, ticket))

    def abort(self, request_id: str) -> None:
        """Nobody waits for the answer any more; nothing happens if it has ended."""
        if not self._line.withdraw(request_id):
            self._order(partial(self._abort, request_id))

    def hand_over_all(self) -> None:
        """Send away what decodes, each sequence once, as those before it get away; what does not
        decode has failed."""
        self._order(self._hand_over_all)

    def stop(self, deadline_s: float) -> bool:
        """End the thread, with whatever runs; False if it hangs in a step."""
        assert self._thread is not None, "it was not started"
        self._is_ending = True  # whatever else is in line
        self._engine.wake()
        self._line.close(deadline_s)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def describe(self) -> dict[str, Any]:
        """The engine and its hand-overs as they are, for the status document."""
        status = asdict(self._engine.status)
        status["counts"]["refused"] += self._line.refused
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

    def _enter(self, request_id: str, read: Callable[[], Begin]) -> Refused | None:
        if self._line.enter(request_id, read):
            return None
        return Refused(reason=str(EngineBusy(waiting_requests=len(self._line))), cause="busy")

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._engine.wake()

    # In the line's thread -------------------------------------------------------------------------

    def _read(self, request_id: str, message: Submit) -> Begin:
        try:
            request = read_submission(message, request_id)
            request = replace(request, ends_after_prefill=self._ends_after_prefill)
            prepared = prepare_request(request, self._engine.runner)
        except (InvalidRequest, MalformedMessage) as error:
            return partial(self._refuse_invalid, request_id, str(error))
        return partial(self._submit, prepared)

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
        has_more = bool(self._deliveries or self._line.ready) or not self._orders.empty()
        for event in self._engine.step(wait_s=0.0 if has_more else IDLE_WAIT_S):
            self._tell(event)
        if self._hand_overs is not None:
            for delivery in self._hand_overs.poll():
                self._running.discard(delivery[0])
                self._deliveries.append(delivery)
        if self._is_leaving:
            self._hand_over_more()
        if self._clock() >= self._noticed_s + NOTICE_INTERVAL_S:
            self._tell_who_waits()

    def _follow_orders(self) -> None:
        for _ in range(ORDERS_PER_STEP):
            order = self._next_order()
            if order is None:
                return
            order()

    def _next_order(self) -> Callable[[], None] | None:
        try:
            return self._orders.get_nowait()
        except Empty:
            return self._line.take()

    def _submit(self, prepared: PreparedRequest) -> None:
        request_id = prepared.request.request_id
        if self._is_leaving:
            self._say(request_id, DRAINING)
            return
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
        if self._is_leaving:
            refused = DRAINING
        elif self._hand_overs is not None:
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
        self._is_leaving = True
        self._hand_over_more()

    def _hand_over_more(self) -> None:
        """Send away as many as may leave at one time. The other answers go on until it is their
        turn, one that is complete ends here, and what is still coming leaves when it has come."""
        lost = self._running - set(self._engine.ending_ids())
        if self._hand_overs is not None:
            decoding = self._engine.decoding_ids()
            for request_id in decoding:
                if self._hand_overs.may_send:
                    log_end(request_id, "moved", self._engine.report(request_id))
                    self._hand_overs.send(request_id, is_drain=True)
            lost.difference_update(decoding)
            lost = {one for one in lost if not self._hand_overs.is_under_way(one)}
        for request_id in lost:
            self._abort(request_id)
            self._say(request_id, Failed(reason="the worker drained before it was done"))

    def _tell(self, event: TokenEvent) -> None:
        """What an event means for the client, and for the sequence."""
        request_id = event.request_id
        if event.token_ids:
            self._grown.add(request_id)
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
            assert event.report is not None
            log_end(request_id, "prefilled", event.report)
            report = describe_report(event.report)
            self._hand_overs.send(request_id, is_drain=False, report=report)
        elif event.finish_reason is not None:
            assert event.report is not None
            log_end(request_id, event.finish_reason, event.report)
            self._end(request_id, event.finish_reason, event.report)

    def _end(self, request_id: str, reason: FinishReason, report: RequestReport) -> None:
        self._running.discard(request_id)
        if self._hand_overs is not None:
            self._hand_overs.forget(request_id)
        match reason:
            case "stop" | "length":
                self._say(request_id, Finished(reason=reason, report=describe_report(report)))
            case "no_room":
                self._say(request_id, Failed(reason="no room for its blocks"))
            case "aborted":
                pass  # by us: nobody waits for it

    def _tell_who_waits(self) -> None:
        """A word to each client whose request was taken and that got no tokens since the last time,
        so that it does not take the worker for lost, and leave its place in line."""
        self._noticed_s = self._clock()
        waiting = {
            request_id: Waiting(state="preempted" if is_preempted else "queued", ahead=place)
            for place, (request_id, is_preempted) in enumerate(self._engine.waiting_line())
        }
        begun = Waiting(state="begun")
        for request_id in self._running - self._grown:
            self._say(request_id, waiting.get(request_id, begun))
        self._grown.clear()

    def _say(self, request_id: str, answer: Answer) -> None:
        self._deliveries.append((request_id, answer))


def describe_report(report: RequestReport) -> dict[str, Any]:
    """A report as a client gets it: what was saved by then, in place of the receipt."""
    fields = {name: getattr(report, name) for name in REPORTED}
    return fields | {"blocks": asdict(report.receipt.summary())}


REPORTED = tuple(name for name in RequestReport.__dataclass_fields__ if name != "receipt")
