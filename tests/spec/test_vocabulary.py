"""Block keys and configs: keys are equal if and only if their content is equal."""

import pickle

import pytest

from blockstep.spec import Config, MultiModalItem, Request, SpecMethod
from blockstep.spec.core.prefix_cache import extend_block_keys
from blockstep.spec.core.requests import RequestState
from blockstep.spec.features import get_config_rules
from blockstep.spec.vocabulary import BlockKey, Status, config_problems

RULES = get_config_rules(Config(num_blocks=9))


def key_of(request: Request, block_size: int = 2) -> BlockKey:
    return extend_block_keys(RequestState(request, Status.WAITING), block_size, RULES)[-1]


def test_equal_content_gives_equal_keys() -> None:
    first = key_of(Request("A", (1, 2, 3, 4)))
    second = key_of(Request("B", (1, 2, 3, 4, 5), priority=3))
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    "other",
    [
        Request("B", (1, 2, 3, 5)),
        Request("B", (1, 9, 3, 4)),
        Request("B", (3, 4)),
        Request("B", (1, 2, 3, 4), adapter="x"),
        Request("B", (1, 2, 3, 4), cache_salt="x"),
        Request("B", (1, 2, 3, 4), items=(MultiModalItem("x", 2, 1),)),
        Request("B", (1, 2, 3, 4), items=(MultiModalItem("x", 0, 1),)),
        Request("B", (1, 2, 3, 4), prompt_embeds=(0, 0, 0, 7)),
        Request("B", (1, 2, 3, 4), prompt_embeds=(7, 0, 0, 0)),
    ],
    ids=[
        *("last token", "earlier token", "no prefix", "adapter", "salt", "item", "earlier item"),
        *("embedding", "earlier embedding"),
    ],
)
def test_different_content_gives_different_keys(other: Request) -> None:
    assert key_of(Request("A", (1, 2, 3, 4))) != key_of(other)


def test_keys_of_different_kinds_do_not_collide() -> None:
    """Upstream keeps adapter and salt in one flat list, where "x" is "x" (P6)."""
    adapter, salt = Request("A", (1, 2), adapter="x"), Request("A", (1, 2), cache_salt="x")
    assert key_of(adapter) != key_of(salt)


def test_the_key_includes_the_offset_of_an_item() -> None:
    """Upstream #36708."""
    first = Request("A", (7, 7, 7, 7), items=(MultiModalItem("cat", 0, 3),))
    second = Request("A", (7, 7, 7, 7), items=(MultiModalItem("cat", 1, 3),))
    assert key_of(first) != key_of(second)


def test_an_item_marks_only_the_blocks_it_overlaps() -> None:
    request = Request("A", tuple(range(8)), items=(MultiModalItem("cat", 3, 2),))
    keys = extend_block_keys(RequestState(request, Status.WAITING), 2, RULES)
    assert [key.items for key in keys] == [(), (("cat", 1),), (("cat", -1),), ()]


def test_keys_of_outputs_continue_those_of_the_prompt() -> None:
    whole = Request("A", (1, 2, 3, 4, 5, 6))
    split = RequestState(Request("B", (1, 2, 3)), Status.RUNNING, output_token_ids=(4, 5, 6))
    assert extend_block_keys(split, 2, RULES)[-1] == key_of(whole)


def test_a_long_chain_compares_and_pickles_without_recursion() -> None:
    first = key_of(Request("A", tuple(range(20_000))), 1)
    second = key_of(Request("B", tuple(range(20_000))), 1)
    assert first == second
    assert pickle.loads(pickle.dumps(first)) == first
    assert first.index == 19_999


def test_a_key_cannot_be_changed() -> None:
    key = BlockKey(None, (1,))
    with pytest.raises(AttributeError, match="immutable"):
        key.adapter = "x"
    with pytest.raises(AttributeError, match="immutable"):
        del key.adapter


def test_a_key_differs_from_a_tuple_and_shows_its_salt() -> None:
    assert BlockKey(None, (1,)) != (1,)
    assert "salt" in repr(BlockKey(None, (1,), cache_salt="pepper"))


def test_the_spec_method_decides_lookahead_slots_and_the_hit_drop() -> None:
    def derived(method: SpecMethod) -> tuple[int, bool]:
        config = Config(num_blocks=2, spec_method=method, num_speculative_tokens=3)
        return config.num_lookahead_tokens, config.drops_last_hit_block

    assert derived(SpecMethod.NGRAM) == (0, False)
    assert derived(SpecMethod.DRAFT_MODEL) == (3, False)
    assert derived(SpecMethod.EAGLE) == (3, True)


@pytest.mark.parametrize(("count", "fix"), [(1, "use at least 2"), (1 << 31, "use at most 2147")])
def test_the_fix_of_a_count_out_of_range_names_the_bound_it_breaks(count: int, fix: str) -> None:
    (problem,) = config_problems(Config(num_blocks=9, max_model_len=count))
    assert fix in str(problem)
