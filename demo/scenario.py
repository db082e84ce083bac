"""The seven requests, what is broken between them, and what is claimed of each.

Decides what happens in which order. How a request is answered, a node killed or a table drawn is
elsewhere.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.layout import BLOCK_TOKENS

from .claims import (
    Claim,
    claim_answer_hit,
    claim_blocks_rebuilt,
    claim_damage_found,
    claim_full_hit,
    claim_no_error,
    claim_no_hit,
    claim_recovered,
    claim_same_answer,
    claim_saved,
)
from .display import Display
from .document import choose_document, join_prompt, read_topics
from .engines import OwnEngine, ask_in_new_process
from .interruption import Interruption
from .nodes import DemoNodes
from .outcomes import Outcome, Request
from .replies import Reply
from .shards import StoredShard, find_shards, flip_bytes

SHORT_QUESTION = 'Answer in one short sentence: What does the "in" operator do?'
LONG_QUESTION = "Summarize the text."
FOLLOW_UP = "Answer in one short sentence: What does the len function return?"

SHORT_ANSWER_TOKENS = 48
LONG_ANSWER_TOKENS = 160
"""More than a block: then one block of the store holds nothing but the model's own words."""

REPORT_DEADLINE_S = 5.0
REPORT_POLL_S = 0.2

Step: TypeAlias = Callable[[], tuple[Reply, list[Claim]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the scenario plays on."""

    nodes: DemoNodes
    engine: OwnEngine
    display: Display
    interruption: Interruption
    tokens_max: int
    """Length of the document."""


class Scenario:
    """Plays the requests once, in order; `outcomes` grows with each."""

    def __init__(self, stage: Stage) -> None:
        self.outcomes: list[Outcome] = []
        self._nodes = stage.nodes
        self._engine = stage.engine
        self._display = stage.display
        self._interruption = stage.interruption
        self._document = self._choose_document(stage.tokens_max)
        self._prompt_file = stage.nodes.folder / "prompt.txt"
        self._victims: dict[str, list[StoredShard]] = {}
        self._blocks_before: dict[str, int | None] = {}

    def play(self) -> None:
        """Stops behind the first request of which a claim does not hold."""
        steps: list[tuple[str, Step]] = [
            ("cold: nothing is stored yet", self._ask_cold),
            ("same document, another question", self._ask_something_else),
            ("question 1, new engine process", self._ask_in_new_process),
            ("question 1, two of 12 nodes killed", self._ask_with_two_nodes_dead),
            ("question 1, stored bytes flipped", self._ask_with_bytes_flipped),
            ("follow-up on the model's answer", self._ask_further),
            ("the same, four nodes dead", self._ask_with_four_nodes_dead),
        ]
        for number, (title, step) in enumerate(steps, 1):
            request = Request(number, title)
            self._display.begin(request)
            reply, found = step()
            outcome = Outcome(request, reply, tuple(found))
            self.outcomes.append(outcome)
            self._display.end(outcome)
            if outcome.broken_claims:
                return

    # The requests -------------------------------------------------------------------------------

    def _ask_cold(self) -> tuple[Reply, list[Claim]]:
        reply = self._ask(self._engine.encode(self._document, SHORT_QUESTION))
        return reply, [claim_no_hit(reply), claim_saved(reply), claim_no_error(reply)]

    def _ask_something_else(self) -> tuple[Reply, list[Claim]]:
        prompt_ids = self._engine.encode(self._document, LONG_QUESTION)
        reply = self._ask(prompt_ids, max_tokens=LONG_ANSWER_TOKENS)
        return reply, [
            claim_full_hit(reply, self._replies),
            claim_saved(reply),
            claim_no_error(reply),
        ]

    def _ask_in_new_process(self) -> tuple[Reply, list[Claim]]:
        reply = self._ask_first_question_elsewhere()
        return reply, [
            claim_full_hit(reply, self._replies),
            claim_same_answer(reply, self._replies[0], 1),
        ]

    def _ask_with_two_nodes_dead(self) -> tuple[Reply, list[Claim]]:
        self._victims = self._find_victims()
        names = list(self._victims)
        self._blocks_before = {node.name: node.blocks for node in self._nodes.status()}
        self._kill(names)
        decoded_before = self._engine.decoded_blocks
        reply = self._ask(self._replies[0].prompt_ids)
        return reply, [
            claim_full_hit(reply, self._replies),
            claim_same_answer(reply, self._replies[0], 1),
            claim_blocks_rebuilt(self._engine.decoded_blocks - decoded_before),
            claim_no_error(reply),
        ]

    def _ask_with_bytes_flipped(self) -> tuple[Reply, list[Claim]]:
        recovered = self._bring_back()
        flipped = self._flip_one_shard_of_each_block()
        self._display.note(
            f"flipped bytes on disk: one shard of each of {flipped} blocks,"
            f" on {' and '.join(self._victims)}"
        )
        # The agent shuns nodes that were dead for 2 s at most; a new engine takes longer to start.
        reply = self._ask_first_question_elsewhere()
        return reply, [
            claim_full_hit(reply, self._replies),
            claim_same_answer(reply, self._replies[0], 1),
            claim_damage_found(flipped, reply.rejected_shards, self._wait_for_rejected_shards()),
            *recovered,
        ]

    def _ask_further(self) -> tuple[Reply, list[Claim]]:
        answered = self._replies[1]
        reply = self._ask(self._engine.encode_follow_up(answered, FOLLOW_UP))
        return reply, [
            claim_full_hit(reply, self._replies),
            claim_answer_hit(reply, answered),
            claim_no_error(reply),
        ]

    def _ask_with_four_nodes_dead(self) -> tuple[Reply, list[Claim]]:
        others = [node.name for node in self._nodes.status() if node.name not in self._victims]
        self._kill([*self._victims, *others[:2]])
        reply = self._ask(self._replies[5].prompt_ids)
        return reply, [
            claim_no_hit(reply),
            claim_same_answer(reply, self._replies[5], 6),
            claim_no_error(reply),
        ]

    # Their parts --------------------------------------------------------------------------------

    @property
    def _replies(self) -> list[Reply]:
        return [outcome.reply for outcome in self.outcomes]

    def _choose_document(self, tokens_max: int) -> str:
        return choose_document(
            read_topics(),
            tokens_max=tokens_max,
            count_tokens=self._engine.count_tokens,
            tokens_to_border=lambda document: tokens_to_border(
                len(self._engine.encode(document, LONG_QUESTION))
            ),
        )

    def _ask(self, prompt_ids: Sequence[int], *, max_tokens: int = SHORT_ANSWER_TOKENS) -> Reply:
        return self._engine.ask(prompt_ids, max_tokens, self._display.take_text)

    def _ask_first_question_elsewhere(self) -> Reply:
        prompt = join_prompt(self._document, SHORT_QUESTION)
        self._prompt_file.write_text(prompt, encoding="utf-8")
        return ask_in_new_process(
            self._nodes.agent.socket_path, self._prompt_file, SHORT_ANSWER_TOKENS
        )

    def _find_victims(self) -> dict[str, list[StoredShard]]:
        """The nodes that hold data shards 0 and 1 of the document's blocks, with these shards."""
        keys = set(self._engine.block_keys(self._replies[0].prompt_ids))
        victims = {}
        for name, folder in self._nodes.target_folders().items():
            shards = find_shards(folder, keys)
            if shards and shards[0].index in (0, 1):
                victims[name] = shards
        assert len(victims) == 2, f"data shards 0 and 1 are on {list(victims)}"
        return victims

    def _kill(self, names: Sequence[str]) -> None:
        self._nodes.kill(names)
        self._display.note(f"killed {', '.join(names)} with SIGKILL")

    def _bring_back(self) -> list[Claim]:
        with self._interruption.held():
            started = self._nodes.start()
        blocks = {node.name: node.blocks for node in self._nodes.status()}
        self._display.note(f"started again: {', '.join(started)}")
        return [
            claim_recovered(name, blocks=blocks[name], before=self._blocks_before[name])
            for name in self._victims
        ]

    def _flip_one_shard_of_each_block(self) -> int:
        """Even blocks on one victim, odd ones on the other, so that 11 good shards stay of each."""
        halves = [shards[turn::2] for turn, shards in enumerate(self._victims.values())]
        damaged = [shard for half in halves for shard in half]
        for shard in damaged:
            flip_bytes(shard)
        return len({shard.key for shard in damaged})

    def _wait_for_rejected_shards(self) -> int:
        """What the nodes count; they look for themselves before they believe a client."""
        due_s = time.monotonic() + REPORT_DEADLINE_S
        while True:
            count = sum(node.rejected_shards or 0 for node in self._nodes.status())
            if count or time.monotonic() >= due_s:
                return count
            time.sleep(REPORT_POLL_S)


def tokens_to_border(tokens: int) -> int:
    """How many tokens are missing to a whole number of blocks."""
    return -tokens % BLOCK_TOKENS
