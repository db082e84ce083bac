"""A question as the token ids of a prompt.

A model with a chat template is asked in turns. One without goes on with the text as it stands: a
plain completion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .chat import Message, encode_chat, encode_follow_up, encode_text, encode_text_after
from .errors import InvalidRequest
from .question import Question, TextBound, Words, read_question
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .load import OpenModel


def read_prompt(words: Words, model: OpenModel) -> list[int]:
    """The ids of what a command line asks. A file that no prompt of the model can hold, with
    the blanks at its ends, is refused before it is all read. Raises as `read_question` and
    `encode_question`."""
    # An answer has a token at least.
    bound = TextBound(model.context_tokens - 1, model.tokenizer.token_bytes_max)
    return encode_question(model.tokenizer, read_question(words, bound))


def encode_question(tokenizer: Tokenizer, question: Question) -> list[int]:
    """Prompt ids: one user turn, or a turn after an earlier answer; without a template the text,
    or the text behind what was there. Raises InvalidRequest for a system text without one."""
    if tokenizer.data.chat_template:
        if question.earlier is not None:
            return encode_follow_up(tokenizer, *question.earlier, question.text)
        system = [] if question.system is None else [Message("system", question.system)]
        return encode_chat(tokenizer, [*system, Message("user", question.text)])
    if question.system is not None:
        raise InvalidRequest(
            "system text", given=repr(question.system[:40]), expected="a model with a chat template"
        )
    if question.earlier is not None:
        return encode_text_after(tokenizer, *question.earlier, question.text)
    return encode_text(tokenizer, question.text)
