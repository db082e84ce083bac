"""The text of an answer, put together as its tokens come."""

from collections.abc import Callable, Iterable

from .tokenizer import Tokenizer


class AnswerText:
    """Gives `on_text` pieces that joined are `text`; no piece ends within a character."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], None]) -> None:
        self._stream = tokenizer.text_stream()
        self._on_text = on_text
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token_ids: Iterable[int], *, is_last: bool) -> None:
        """The next tokens; no others follow if `is_last`. Raises what `on_text` raises."""
        piece = "".join([self._stream.push(token_id) for token_id in token_ids])
        if is_last:
            piece += self._stream.finish()
        if piece:
            self._pieces.append(piece)
            self._on_text(piece)
