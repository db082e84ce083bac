"""Prompts as token ids: conversations in SmolLM2's form of ChatML, and plain texts to go on with.

    <|im_start|>ROLE\\nTEXT<|im_end|>\\n ... <|im_start|>assistant\\n

Special tokens are put in by id. Only the template below is known. A model without one is given a
text; a model with another one can still be given plain token ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .errors import InvalidRequest
from .tokenizer import Tokenizer

Role: TypeAlias = Literal["system", "user", "assistant"]

START = "<|im_start|>"
END = "<|im_end|>"
DEFAULT_SYSTEM_TEXT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + DEFAULT_SYSTEM_TEXT + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template in the model file whose meaning this module has in Python."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. Raises InvalidRequest for a role that the template does not know."""

    role: Role
    text: str

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise InvalidRequest(
                "role", given=repr(self.role), expected=f"one of {', '.join(get_args(Role))}"
            )


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Prompt for the assistant's next turn; the default system text comes first if none is given.

    Raises InvalidRequest if there is no message or the model has another chat template.
    """
    if tokenizer.data.chat_template != SMOLLM2_TEMPLATE:
        raise InvalidRequest(
            "chat template of the model",
            given=repr(tokenizer.data.chat_template[:60]),
            expected="SmolLM2's; give token ids instead of messages",
        )
    if not messages:
        raise InvalidRequest("messages", given="none", expected="one or more")
    if messages[0].role != "system":
        messages = [Message("system", DEFAULT_SYSTEM_TEXT), *messages]
    return _turns(tokenizer, messages) + _opening(tokenizer, "assistant")


def encode_follow_up(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], answer_ids: Sequence[int], text: str
) -> list[int]:
    """Prompt for a user's next turn after an answer, which goes in as the ids it was made of.

    Ids and not text: a model does not always choose the ids its own text would be encoded to, and
    other ids would mean other keys, so the blocks of the answer would not be found again.
    """
    end_id = tokenizer.special_id(END)
    answer = _without_stop(tokenizer, answer_ids)
    ended = [*prompt_ids, *answer, end_id, *tokenizer.encode("\n")]
    return ended + _turns(tokenizer, [Message("user", text)]) + _opening(tokenizer, "assistant")


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Prompt of a model without chat template: the text, behind the token that texts begin with."""
    begin_id = tokenizer.data.begin_id
    return [*([] if begin_id is None else [begin_id]), *tokenizer.encode(text)]


def encode_text_after(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], answer_ids: Sequence[int], text: str
) -> list[int]:
    """Prompt that goes on behind a text and what the model wrote after it, as ids; see
    `encode_follow_up`."""
    return [*prompt_ids, *_without_stop(tokenizer, answer_ids), *tokenizer.encode(text)]


def _without_stop(tokenizer: Tokenizer, answer_ids: Sequence[int]) -> list[int]:
    answer = list(answer_ids)
    while answer and answer[-1] in tokenizer.stop_ids:
        answer.pop()
    return answer


def _turns(tokenizer: Tokenizer, messages: Iterable[Message]) -> list[int]:
    ids = []
    for message in messages:
        ids += _opening(tokenizer, message.role, message.text)
        ids += [tokenizer.special_id(END), *tokenizer.encode("\n")]
    return ids


def _opening(tokenizer: Tokenizer, role: Role, text: str = "") -> list[int]:
    return [tokenizer.special_id(START), *tokenizer.encode(f"{role}\n{text}")]
