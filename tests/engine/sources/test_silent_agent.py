"""An agent that is silent at one step of a load is left alone as one that is silent at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from engine.sources.agent_source import AgentSource
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from kvstore.client import BlockingAgentClient
from kvstore.client.agent_results import PromptMatch, WindowFetch
from kvstore.errors import AgentUnreachable
from kvstore.key import Namespace
from kvstore.layout import BlockLayout
from kvstore.policy import HitPlan
from tests.engine.llm_engine.engine_bench import Clock
from tests.engine.stored_prompt import WINDOW, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until

BLOCKS = 2
REST_S = 2.0
PLAN = HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=None)
PLAN_WITH_WINDOW = HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=BLOCKS * 128)


class SilentAgent:
    """A client of an agent that has no answer in time; or, to who goes away, none at all."""

    def __init__(self, clock: Clock) -> None:
        self.asked: list[str] = []
        self.meanwhile: list[Callable[[], object]] = []
        """Of each step that is asked for what comes to pass, in place of its deadline."""
        self._clock = clock

    def open_namespace(self, namespace: Namespace, *, window_layout: BlockLayout) -> None:
        """Taken, as before it fell silent."""

    def match(
        self, namespace: Namespace, token_ids: list[int], *, is_dense: bool, deadline_s: float
    ) -> PromptMatch:
        raise AgentUnreachable("agent.sock", "it is asked for nothing but loads")

    def lease_run(
        self, namespace: Namespace, blocks: int, *, has_parity_room: bool, deadline_s: float
    ) -> None:
        self._let_pass("lease", deadline_s)
        raise AgentUnreachable("agent.sock", "no answer")

    def fetch_window(
        self, namespace: Namespace, key: bytes, record: bytearray, *, deadline_s: float
    ) -> WindowFetch:
        """Another host has it, which is silent; the agent says so."""
        self._let_pass("window", deadline_s)
        return WindowFetch(is_found=False, host="", elapsed_s=deadline_s)

    def _let_pass(self, step: str, deadline_s: float) -> None:
        self.asked.append(step)
        if self.meanwhile:
            self.meanwhile.pop(0)()
        else:
            self._clock.now_s += deadline_s


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.agent = SilentAgent(self.clock)
        self.prompt = StoredPrompt(BLOCKS)
        self.pool = self.prompt.pool(4 * BLOCKS)
        self.source = AgentSource(
            cast("BlockingAgentClient", self.agent),
            namespace=self.prompt.namespace,
            pool=self.pool,
            window_layout=WINDOW,
            faults=StoreFaults(),
            limits=LoadLimits(rest_s=REST_S),
            clock=self.clock,
        )

    def look_up(self) -> ThreadedLoad:
        load = self.source.look_up(self.prompt.tokens, self.prompt.keys)
        wait_until(lambda: load.found is not None)
        return load

    def bring(self, load: ThreadedLoad, plan: HitPlan = PLAN, first_block: int = 0) -> None:
        """Until it has ended, with nothing."""
        block_ids = self.pool.allocate(BLOCKS)
        load.begin(plan, block_ids, first_block)
        self.pool.release(block_ids)
        wait_until(lambda: load not in self.source._loads)  # what came of it is noted by then
        assert load.outcome is not None
        assert (load.outcome.blocks, load.outcome.window) == (first_block, None)


@pytest.mark.parametrize(
    ("step", "plan", "first_block"),
    [("lease", PLAN, 0), ("window", PLAN_WITH_WINDOW, BLOCKS)],
)
def test_agent_that_is_silent_at_one_step_is_not_asked_for_a_while(
    step: str, plan: HitPlan, first_block: int
) -> None:
    """Either has half of a load's time, and once that was taken for an answer."""
    scene = Scene()
    for round_number in (1, 2):  # the second one is a single question, and its answer no better
        for _ in range(3):
            scene.bring(scene.look_up(), plan, first_block)
        assert scene.agent.asked == [step] * round_number
        scene.clock.now_s += REST_S
    assert scene.source.close(DEADLINE_S)


def test_load_that_is_given_up_while_it_asks_alone_is_no_answer() -> None:
    scene = Scene()
    scene.bring(scene.look_up())
    scene.clock.now_s += REST_S
    asks_alone, asks_again, comes_then = (scene.look_up() for _ in range(3))
    scene.agent.meanwhile = [asks_alone.give_up, lambda: scene.bring(comes_then)]
    scene.bring(asks_alone)
    scene.bring(asks_again)
    assert scene.agent.asked == ["lease"] * 3
    assert scene.source.close(DEADLINE_S)
