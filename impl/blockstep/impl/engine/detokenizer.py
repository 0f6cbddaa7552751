"""Text: incremental detokenization, and stop strings.

    tokens -> whole characters -> pending text -> text that cannot be part of a stop string

A token may hold part of a character, and a piece of text may be the beginning of a stop string.
Both are held back until they are decided, so text that was streamed is never withdrawn.

The text of a token depends on those before it (a leading space is dropped, bytes make up a
character), so new tokens are decoded together with some that were decoded already:

    prompt's last | decoded last time        | new ...
                  ^ first                    ^ read      new text = [first:] less [first:read]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from blockstep.impl.engine.errors import CheckpointError

HALF = "\ufffd"
"""The text that a tokenizer returns for bytes that are not a (complete) character."""
CONTEXT_MAX = 16
"""Most prompt tokens used as context: a character may take four tokens, more do not help."""


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint; None if it has none.

    Raises `CheckpointError` if the file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()  # as in transformers: the file truncates no prompt
    tokenizer.no_padding()
    return tokenizer


class Detokenizer:
    """The text of one output, token by token."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        """Whether a stop string was found; the text ends before it."""
        self._token_ids = self._get_context(prompt_token_ids)
        self._first, self._read = 0, len(self._token_ids)
        self._decoded = ""
        """The text of the tokens, as far as their characters are complete."""
        self._num_given = 0

    def append(self, token_id: int) -> str:
        """Add a token; return the text that became certain, and "" after a stop string."""
        if self.stopped:
            return ""
        self._token_ids.append(token_id)
        new = self._decode_new()
        if new and not new.endswith(HALF):
            self._decoded += new
            self._first, self._read = self._read, len(self._token_ids)
            self._cut()
        held = 0 if self.stopped else self._count_held()
        return self._give(len(self._decoded) - held)

    def finish(self) -> str:
        """Return the rest of the text after the last token, including incomplete characters."""
        if not self.stopped:
            self._decoded += self._decode_new()
            self._cut()
        return self._give(len(self._decoded))

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _decode_new(self) -> str:
        """Return the text that the tokens from `_read` on add to those before."""
        before = self._decode(self._token_ids[self._first : self._read])
        return self._decode(self._token_ids[self._first :])[len(before) :]

    def _get_context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt, as few as give whole characters."""
        tails = (list(prompt[-size:]) for size in range(1, CONTEXT_MAX + 1))
        whole = (tail for tail in tails if (text := self._decode(tail)) and HALF not in text)
        return next(whole, [])

    def _give(self, end: int) -> str:
        given = self._decoded[self._num_given : end]
        self._num_given = max(end, self._num_given)
        return given

    def _cut(self) -> None:
        """End the text before the first stop string in it."""
        places = (self._decoded.find(stop, self._num_given) for stop in self.stop)
        found = [place for place in places if place >= 0]
        if found:
            self.stopped = True
            self._decoded = self._decoded[: min(found)]

    def _count_held(self) -> int:
        """Return the number of characters at the end that may begin a stop string."""
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
