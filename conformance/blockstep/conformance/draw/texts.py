"""Texts: token ids of the prompts of a file that has texts, by the tokenizer of a model."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from blockstep.conformance.draw.formats import Tokenize
from blockstep.conformance.protocol.features import UsageError

TEXTS_KEPT = 1 << 12
"""Token ids are kept of this many texts: the turns of a conversation come again with each reply."""


def load_tokenizer(path: Path) -> Tokenize:
    """Return the tokenizer of a `tokenizer.json`, or of the folder that holds it.

    It adds no special tokens and no chat template, so that the ids of a conversation begin with
    those of its first turns. Raises UsageError.
    """
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UsageError(f"--tokenizer: {error}: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise UsageError(f"--tokenizer {path}: {error}; give a tokenizer.json") from None

    @lru_cache(maxsize=TEXTS_KEPT)
    def tokenize(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return tokenize
