"""Text: tokens become text as they come, and stop strings end it.

    tokens -> decode stream -> pending text -> what cannot be the beginning of a stop string

A token may hold part of a character, and a piece of text may be the beginning of a stop string.
Both are held back until they are decided, so nothing that was streamed is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from blockstep.impl.engine.errors import CheckpointError


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None if it has none. Raises `CheckpointError`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from error


class Detokenizer:
    """The text of one output, token by token."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        """A stop string was found; the text ends before it."""
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._decoded = ""
        """What the tokens say, as far as their characters are complete."""
        self._num_given = 0

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before; nothing more after a stop string."""
        if self.stopped:
            return ""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._decoded += self._stream.step(self.tokenizer, token_id) or ""
        self._cut()
        held = 0 if self.stopped else self._count_held()
        return self._give(len(self._decoded) - held)

    def finish(self) -> str:
        """The rest, when no more tokens come: what was held back, broken characters too."""
        if not self.stopped:
            whole = self.tokenizer.decode(self._token_ids, skip_special_tokens=True)
            if whole.startswith(self._decoded):
                self._decoded = whole
            self._cut()
        return self._give(len(self._decoded))

    def _give(self, end: int) -> str:
        given = self._decoded[self._num_given : end]
        self._num_given = max(end, self._num_given)
        return given

    def _cut(self) -> None:
        """End the text before the first stop string in it."""
        found = [at for at in (self._decoded.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped = True
            self._decoded = self._decoded[: min(found)]

    def _count_held(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self.stop), default=1) - 1
        text = self._decoded
        return next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self.stop)
            ),
            0,
        )
