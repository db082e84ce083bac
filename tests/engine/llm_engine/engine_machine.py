"""Whatever happens to an engine, in whatever order: the machine behind `test_state_machine`.

Operations are numbers, so that hypothesis can choose them and take away those that do not matter. A
state machine of hypothesis itself is not used: it leaves out half of its rules in each example, and
few of those that are left come to a full pool, a load that falls short, or a second preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Run
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from engine.errors import EngineBusy
from engine.job import Job, Phase
from engine.sequence import Sequence
from kvstore.layout import BLOCK_TOKENS
from tests.engine.llm_engine.alone import (
    Alone,
    Bits,
    SoundKept,
    alone,
    check_answer,
    record,
    strange_keys,
)
from tests.engine.llm_engine.driven import DrivenLoad, Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    MakeRunner,
    prompt_of,
    references_of,
    request_of,
)
from tests.engine.llm_engine.moving import move

SEQUENCES_MAX = 5
QUEUE_MAX = 4
SNAPSHOTS_MAX = 3

T = TypeVar("T")


class Choices:
    """Choices that one number stands for; the first of everything for zero."""

    def __init__(self, number: int) -> None:
        self._left = number

    def one_of(self, options: Run[T]) -> T:
        self._left, index = divmod(self._left, len(options))
        return options[index]

    def below(self, end: int) -> int:
        return self.one_of(range(end))

    def is_so(self) -> bool:
        return self.one_of((False, True))


@dataclass(frozen=True, slots=True)
class Holder:
    """A request that has blocks. `strength`: the longest answer, of equals the earliest."""

    strength: tuple[int, int]
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a machine is of. `prompts`: tokens and seed of each; those of a seed begin alike."""

    make_runner: MakeRunner
    prompts: tuple[tuple[int, int], ...]
    pool_blocks: range
    longest_answer: int
    state_slots: int = 4

    def prompt(self, which: int) -> tuple[int, ...]:
        tokens, seed = self.prompts[which]
        return tuple(prompt_of(tokens, seed))

    def cold(self, prompt_ids: Run[int]) -> Alone:
        return alone(self.make_runner, tuple(prompt_ids), self.longest_answer)


OPERATIONS = {
    "add": 8,
    "step": 18,
    "let_load_go_on": 14,
    "hold": 2,
    "save": 1,
    "pass_time": 1,
    "forget": 1,
    "abort": 1,
    "detach": 1,
    "release": 1,
    "add_again": 1,
}
"""How often each is chosen."""


class EngineMachine:
    """One engine with a small pool, and one elsewhere that sequences may go over to.

    `detached` are those that have left the schedule. `seen` counts what machines have come to.
    """

    def __init__(self, family: Family, setting: int, seen: Counter[str]) -> None:
        choices = Choices(setting)
        self.family = family
        self.seen = seen
        self.prompts = [family.prompt(which) for which in range(len(family.prompts))]
        self.sound = SoundKept([family.cold(prompt_ids).kept for prompt_ids in self.prompts])
        self.kept = self.make_store()
        self.bench = EngineBench(
            family.make_runner,
            pool_blocks=choices.one_of(family.pool_blocks),
            state_slots=family.state_slots,
            kept=self.kept,
            loads_max=choices.one_of((3, 2, 1)),
            step_budget_s=choices.one_of((0.256, 0.0)),
            sequences_max=SEQUENCES_MAX,
            queue_requests_max=QUEUE_MAX,
            window_snapshots_max=SNAPSHOTS_MAX,
        )
        self.fill_store(choices.one_of(("nothing", "blocks", "blocks", "all")))
        self.bench.source.is_held = choices.one_of((False, True, True))
        self.computed: list[Sequence] = []
        self.bits = record(self.bench, self.computed)
        self.elsewhere = EngineBench(family.make_runner, has_source=False)
        self.bits_elsewhere = record(self.elsewhere)
        self.may_be_strange: set[bytes] = set()
        self.detached: list[Sequence] = []
        self.number = 0

    def make_store(self) -> Kept:
        return self.sound

    def fill_store(self, what: str) -> None:
        """Blocks of all prompts, and window state that their next turns would hit."""
        if what == "nothing":
            return
        for prompt_ids in self.prompts:
            found = self.family.cold(prompt_ids).kept.blocks
            self.kept.blocks |= list(found.items())[: len(prompt_ids) // BLOCK_TOKENS]
        if what == "all":
            self.kept.windows |= self.sound.sound.windows

    def do(self, operation: str, number: int) -> None:
        getattr(self, operation)(Choices(number))
        self.check_books()

    # Requests -------------------------------------------------------------------------------------

    def add(self, choices: Choices) -> None:
        """A new request, or one that was answered in part elsewhere."""
        prompt_ids = choices.one_of(self.prompts)
        longest = self.family.longest_answer
        answered = choices.one_of((0, 0, 0, longest // 4, longest // 2))
        self.ask(
            prompt_ids,
            min(answered + choices.one_of((1, 9, longest, longest)), longest),
            ends_after_prefill=choices.one_of((False, False, False, False, True)),
            answered_ids=tuple(self.family.cold(prompt_ids).token_ids[:answered]),
        )

    def add_again(self, choices: Choices) -> None:
        """A request whose engine was lost when it had given out so much."""
        ended = [*self.ended()]
        if not ended:
            return
        name = choices.one_of(ended)
        answer, prompt_ids = self.bench.answers[name], self.bench.requests[name].prompt_ids
        given_before = len(answer.token_ids) - len(answer.replays)
        at = choices.below(len(answer.replays))
        given = given_before + at + 1
        if given < self.family.longest_answer:
            self.ask(
                tuple(prompt_ids),
                min(given + choices.one_of((1, 9)), self.family.longest_answer),
                answered_ids=tuple(answer.token_ids[:given]),
                replay_first=answer.replays[at],
            )

    def ask(self, prompt_ids: tuple[int, ...], max_tokens: int, **more: object) -> None:
        self.number += 1
        request = request_of(f"r{self.number}", prompt_ids, max_tokens, **more)  # type: ignore[arg-type]
        try:
            self.bench.add(request)
        except EngineBusy:
            assert self.bench.engine.status.waiting == QUEUE_MAX

    def step(self, choices: Choices) -> None:
        for _ in range(choices.one_of((1, 3, 20, 60))):
            if self.bench.engine.has_requests:
                self.step_once()

    def step_once(self) -> None:
        before = self.holders()
        self.bench.step()
        self.check_victims(before)
        for sequence in self.computed:
            plain_ids = self.family.cold(sequence.request.prompt_ids).token_ids
            self.may_be_strange.update(strange_keys(self.bench, sequence, plain_ids))
        self.computed.clear()

    def abort(self, choices: Choices) -> None:
        if len(self.jobs) < 3:
            return
        name = choices.one_of(list(self.jobs))
        self.bench.engine.abort(name)
        self.step_once()
        assert self.bench.answers[name].finish_reason == "aborted"

    def detach(self, choices: Choices) -> None:
        if names := [*self.bench.engine.decoding_ids(), *self.parked()]:
            self.detached.append(self.bench.engine.detach(choices.one_of(names)))

    def release(self, choices: Choices) -> None:
        """Give a sequence that left back, mostly after a copy of it has come to an engine."""
        if not self.detached:
            return
        sequence = self.detached.pop(0)
        target = choices.one_of((self.elsewhere, self.bench, None))
        if target is not None:
            self.seen["moved"] += move(self.bench, sequence, target)
        self.bench.engine.release(sequence)

    # Source, sink and time ------------------------------------------------------------------------

    def hold(self, choices: Choices) -> None:
        source = self.bench.source
        source.is_held = choices.one_of((False, True, True))
        source.are_slow_to_end = choices.is_so()
        self.bench.sink.is_held = choices.is_so()

    def let_load_go_on(self, choices: Choices) -> None:
        """Its match is answered; or some of its sections come; or nothing more comes."""
        moving = [load for load in self.loads() if load.found is None or load.is_begun]
        if not moving:
            return
        load = choices.one_of(moving)
        if load.found is None:
            load.answer(is_lost=choices.one_of((False, False, False, True)))
        elif choices.is_so():
            self.end(load, choices.below(3), with_window=choices.one_of((True, False)))
        elif not load.is_given_up:
            load.comes_while_waited_for = choices.is_so()
            load.bring(choices.below(3))

    def end(self, load: DrivenLoad, lost_blocks: int, *, with_window: bool = True) -> None:
        if load.is_whole:
            # A pass may have gone on with what came.
            load.end()
        elif load.is_given_up:
            # Until now something was still written there.
            pool = self.bench.runner.pool
            for block_id in load.references:
                pool.buffer(block_id)[:] = bytes(pool.block_bytes)
            load.end(0)
        else:
            load.bring_window()
            blocks = max(0, len(load.references) - lost_blocks)
            load.end_short(blocks, with_window=with_window)

    def save(self, choices: Choices) -> None:
        if self.bench.sink.jobs:
            self.bench.sink.save_next()

    def forget(self, choices: Choices) -> None:
        """The store loses something."""
        stored = choices.one_of((self.kept.windows, self.kept.blocks))
        if stored:
            del stored[choices.one_of(list(stored))]

    def pass_time(self, choices: Choices) -> None:
        self.bench.clock.now_s += choices.one_of((0.1, 1.5))

    # What must hold -------------------------------------------------------------------------------

    def holders(self) -> dict[str, Holder]:
        """Those whom blocks can be taken from."""
        phases = (Phase.LOADING, Phase.PREFILL, Phase.DECODING, Phase.ENDING)
        return {
            name: Holder((job.answer_tokens, -job.order), job.costs.preemptions)
            for name, job in self.jobs.items()
            if job.phase in phases and job.sequence not in self.held
        }

    def check_victims(self, before: dict[str, Holder]) -> None:
        """Nobody was preempted before one that has a shorter answer, or came later."""
        there = {name: job.costs.preemptions for name, job in self.jobs.items()}
        victims = [
            holder for name, holder in before.items() if there.get(name, 0) > holder.preemptions
        ]
        stayed = [
            holder for name, holder in before.items() if there.get(name) == holder.preemptions
        ]
        self.seen["preempted"] += len(victims)
        for victim in victims:
            assert all(victim.strength < one.strength for one in stayed), (victim, stayed)
        assert not victims or max(before.values(), key=lambda one: one.strength) not in victims

    def references_add_up(self) -> None:
        holders = Counter(self.bench.source.references) + Counter(self.bench.sink.references)
        for sequence in {job.sequence for job in self.jobs.values()} | self.held:
            holders.update(sequence.block_ids)
        pool = self.bench.runner.pool
        assert references_of(pool) == dict(holders)
        assert pool.free_blocks + len(holders) == pool.capacity_blocks

    def states_add_up(self) -> None:
        used = self.bench.engine._memory.open_sequences
        assert used <= SEQUENCES_MAX
        if self.bench.runner.window_layout is not None:
            assert self.bench.runner.free_states + used == self.family.state_slots

    def every_load_is_somebodys(self) -> None:
        """Who needs one no more has given it up."""
        wanted = [job.load for job in self.jobs.values() if job.load is not None]
        is_open = {load for load in wanted if load.outcome is None}
        assert is_open == {load for load in self.loads() if not load.is_given_up}

    def every_request_is_in_one_place(self) -> None:
        status = self.bench.engine.status
        in_places = status.waiting + status.entering + status.prefilling + status.decoding
        assert in_places + len(self.parked()) == len(self.jobs)
        assert set(self.detached) <= self.held

    def only_a_replay_saves_other_bytes(self) -> None:
        assert self.sound.strange <= self.may_be_strange

    def check_books(self) -> None:
        self.references_add_up()
        self.states_add_up()
        self.every_load_is_somebodys()
        self.every_request_is_in_one_place()
        self.only_a_replay_saves_other_bytes()

    def finish(self) -> None:
        """Whatever was held back goes on, and everybody gets his answer."""
        bench = self.bench
        bench.source.is_held = bench.source.are_slow_to_end = bench.sink.is_held = False
        for load in self.loads():
            if load.found is None:
                load.answer()
            elif load.is_begun:
                self.end(load, 0)
        bench.sink.flush(1.0)
        for sequence in self.detached:
            bench.engine.release(sequence)
        for _ in range(2000):
            if self.is_over():
                break
            self.step_once()
        self.elsewhere.finish()
        self.only_a_replay_saves_other_bytes()
        self.check_answers(bench, self.bits)
        self.check_answers(self.elsewhere, self.bits_elsewhere)
        self.count_what_was_seen()
        assert self.is_over(), bench.engine.status
        for one in (bench, self.elsewhere):
            assert one.engine.close()
            one.assert_all_is_free()

    def check_answers(self, bench: EngineBench, found: Bits) -> None:
        changes = sum(
            before != after
            for answer in bench.answers.values()
            for before, after in pairwise(answer.replays)
        )
        assert changes <= bench.engine.status.counts.changed_prefixes
        for name, answer in bench.answers.items():
            request = bench.requests[name]
            own = {place: bits for place, bits in found.items() if place.request_id == name}
            prompt_ids = tuple(request.prompt_ids)
            family = self.family
            check_answer(family.make_runner, prompt_ids, answer, own, family.longest_answer)
            if answer.finish_reason == "length":
                assert len(answer.token_ids) == request.max_tokens

    def count_what_was_seen(self) -> None:
        counts = self.bench.engine.status.counts
        self.seen["changed"] += counts.changed_prefixes
        self.seen["short loads"] += counts.short_loads
        self.seen["shared"] += counts.shared_tokens > 0
        for answer in self.bench.answers.values():
            self.seen["replayed"] += any(at is not None for at in answer.replays)
            if answer.report is not None:
                is_exact = answer.report.replay_tokens == 0 < answer.report.hit_tokens
                self.seen["exact hit"] += is_exact

    # What there is --------------------------------------------------------------------------------

    @property
    def jobs(self) -> dict[str, Job]:
        return self.bench.engine._schedule.jobs

    def loads(self) -> list[DrivenLoad]:
        return [load for load in self.bench.source.loads if load.outcome is None]

    def is_over(self) -> bool:
        """Whether all requests have ended; those that wait to be detached end here."""
        for name in self.parked():
            self.bench.engine.abort(name)
        return not self.bench.engine.has_requests

    def ended(self) -> list[str]:
        """Those that are in the engine no more, and gave out something here."""
        there = {*self.jobs} | {sequence.request.request_id for sequence in self.detached}
        return [
            name
            for name, answer in self.bench.answers.items()
            if name not in there and answer.replays
        ]

    def parked(self) -> list[str]:
        """Those that ended after prefill and wait to be detached."""
        return [name for name, job in self.jobs.items() if job.sequence in self.held]

    @property
    def held(self) -> set[Sequence]:
        return self.bench.engine._memory.held


class PlainMachine(EngineMachine):
    """Its store keeps what a replay led to as well, as a real one does: so nobody can say what bits
    an exact hit has. But no block changes that somebody else has (`SummingRunner` sees to that),
    and an answer that was begun cold is that of a cold run, whatever came in between.
    """

    def make_store(self) -> Kept:
        return Kept()

    def forget(self, choices: Choices) -> None:
        """Window state only: a block that was lost may be stored anew by somebody else."""
        if self.kept.windows:
            del self.kept.windows[choices.one_of(list(self.kept.windows))]

    def check_books(self) -> None:
        super().check_books()
        self.what_counts_as_cold_is_so()

    def what_counts_as_cold_is_so(self) -> None:
        """Of the keys of cold runs of the prompts: the pool and the engine have no other bytes."""
        knowledge, pool = self.bench.engine._admission._prefixes, self.bench.runner.pool
        for key, block in self.sound.sound.blocks.items():
            if knowledge.index.count_cold([key]):
                kept = knowledge.index._kept[key]
                assert pool.memory[kept.block_id].numpy().tobytes() == block, key.hex()
                self.seen["cold blocks"] += 1
        for key, window in self.sound.sound.windows.items():
            if knowledge._snapshots.is_cold(key):
                kept_record = knowledge._snapshots._records[key]
                assert kept_record.memory.numpy().tobytes() == window, key.hex()
                self.seen["cold windows"] += 1

    def check_answers(self, bench: EngineBench, found: Bits) -> None:
        if bench is self.elsewhere:
            return
        for name, answer in bench.answers.items():
            request, report = bench.requests[name], answer.report
            if report is None or report.hit_tokens or request.answered_ids or not answer.replays:
                continue
            plain_ids = self.family.cold(request.prompt_ids).token_ids
            assert answer.token_ids == plain_ids[: len(answer.token_ids)], name
            self.seen["cold"] += 1
            self.seen["cold and preempted"] += report.preemptions > 0
