"""Prompt embeddings: part of what a block is named by, and of nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession


def test_a_request_with_embeddings_shares_with_its_like_alone(either: OpenSession) -> None:
    """P6: an embedding is part of a block's identity."""
    s = either(num_blocks=40, block_size=2)
    prompt, embeds = (1, 2, 3, 4, 5), (6, 7, 8, 9, 6)
    s.submit("a", prompt, prompt_embeds=embeds)
    s.submit("b", prompt)
    s.commit(s.plan(), a=(1,), b=(1,))
    asked = {
        "like a": (prompt, embeds, 4),
        "like b": (prompt, (), 4),
        "another one in the second block": (prompt, (6, 7, 8, 0, 6), 2),
        "another one in the first block": (prompt, (0, 7, 8, 9, 6), 0),
        "other tokens": ((1, 0, 3, 4, 5), embeds, 0),
    }
    for name, (tokens, given, _) in asked.items():
        s.submit(name, tokens, prompt_embeds=given)
    hits = {row.request_id: row.num_computed_tokens for row in s.plan().new}
    assert hits == {name: due for name, (_, _, due) in asked.items()}


def test_blocks_behind_the_prompt_have_no_embeddings(either: OpenSession) -> None:
    s = either(num_blocks=40, block_size=2)
    s.submit("a", (1, 2, 3), prompt_embeds=(6, 7, 8))
    for token in (4, 5, 6):
        s.step(a=(token,))
    s.plan()
    keys = [key for key in s.state().block_keys if key is not None]
    assert [key.embeds for key in keys] == [(6, 7), (8,), ()]
