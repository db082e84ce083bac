"""The two ways in which the demo asks the model: in this process, and in a process of its own.

Both reach the storage nodes through the agent of this host.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.client import AgentClient

from .document import join_prompt
from .nodes import run_json
from .replies import Reply, read_reply

FETCH_DEADLINE_S = 10.0
"""Far more than a fetch takes: on a machine that does other work too, late is still a hit."""

SAVE_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 2.0


class OwnEngine:
    """An engine in this process, with a client of its own. Use it in `with`.

    The modules of the engine are imported late: they bring the tensor library, and take a second.
    """

    def __init__(self, socket_path: Path) -> None:
        from engine.threads import prepare_environment, set_thread_count

        prepare_environment()
        set_thread_count(None)
        from engine.llm import LLMConfig, load_llm
        from engine.load import find_default_model

        model = find_default_model()
        self.model_name = model.name
        config = LLMConfig(fetch_deadline_s=FETCH_DEADLINE_S, close_deadline_s=CLOSE_DEADLINE_S)
        with ExitStack() as stack:
            self._store = stack.enter_context(AgentClient.open(socket_path, name="demo"))
            self._llm = stack.enter_context(
                load_llm(model, store=self._store, clock=time.perf_counter, config=config)
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def decoded_blocks(self) -> int:
        """Blocks that were rebuilt from parity since the engine began."""
        return self._store.counters.blocks_decoded

    def count_tokens(self, text: str) -> int:
        return len(self._llm.tokenizer.encode(text))

    def block_keys(self, prompt_ids: Sequence[int]) -> list[bytes]:
        """The keys under which the store has the full blocks of a prompt."""
        return self._llm.namespace.block_keys(prompt_ids)

    def encode(self, document: str, question: str) -> list[int]:
        """Prompt of a first question about the document."""
        from engine.chat import Message, encode_chat

        text = join_prompt(document, question)
        return encode_chat(self._llm.tokenizer, [Message("user", text)])

    def encode_follow_up(self, earlier: Reply, question: str) -> list[int]:
        """Prompt of a further question, after an earlier prompt and the model's answer to it."""
        from engine.chat import encode_follow_up

        return encode_follow_up(
            self._llm.tokenizer, earlier.prompt_ids, earlier.token_ids, question
        )

    def ask(
        self, prompt_ids: Sequence[int], max_tokens: int, on_text: Callable[[str], None]
    ) -> Reply:
        """Answer greedily, and wait until the blocks are saved, or given up.

        The engine is to show what the store has, so it keeps nothing for the next prompt.
        """
        generation = self._llm.generate(prompt_ids, max_tokens=max_tokens, on_text=on_text)
        self._llm.flush(SAVE_DEADLINE_S)
        self._llm.forget_blocks()
        summary = generation.receipt.summary()
        timings = generation.timings
        return Reply(
            prompt_ids=tuple(generation.prompt_ids),
            token_ids=tuple(generation.token_ids),
            text=generation.text,
            hit_tokens=generation.hit_tokens,
            match_s=timings.match_s,
            fetch_s=timings.fetch_s,
            prefill_s=timings.prefill_s,
            ttft_s=timings.ttft_s,
            rejected_shards=generation.rejected_shards,
            blocks_stored=summary.stored,
            blocks_failed=summary.failed + summary.dropped + summary.pending,
            store_errors=self._llm.store_faults.count,
        )


def ask_in_new_process(socket_path: Path, prompt_file: Path, max_tokens: int) -> Reply:
    """Answer the prompt in a file, by `python -m engine.generate`, which knows nothing of us."""
    words = [sys.executable, "-m", "engine.generate", "--agent", str(socket_path)]
    words += ["--prompt-file", str(prompt_file), "--max-tokens", str(max_tokens), "--json"]
    return read_reply(run_json(words))
