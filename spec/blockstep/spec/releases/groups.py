"""Groups: quirks of releases with several KV groups, windows and attention chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeAlias

from blockstep.spec.copies import replace
from blockstep.spec.core import prefix_cache
from blockstep.spec.core.block_pool import Pool, count_free, find_block
from blockstep.spec.core.prefix_cache import get_group_keys
from blockstep.spec.core.requests import Frame, Hit, Holding, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import Growth
from blockstep.spec.core.work import Scheduled
from blockstep.spec.features import full_isl, groups
from blockstep.spec.features.groups.hits import count_runs, is_valid_hit
from blockstep.spec.features.groups.kinds import compute_num_skipped_blocks, count_taken
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, Config, GroupKind, KVGroup, RequestId

Range: TypeAlias = tuple[int, int]
"""A range of a block table: the index of the first block that is not null, and the end."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Groups of equal kind, which are looked up together: a block counts if all of them have it."""

    group: KVGroup
    found: dict[int, list[BlockId | None]]
    """For each group, by index, the published block at each place, or None."""
    runs: tuple[int, ...]
    """For each place, the number of consecutive blocks before it that all the groups have."""

    def get_runs(self, num_tokens: int) -> tuple[int, ...]:
        """Return the runs of the first `num_tokens` tokens."""
        return self.runs[: num_tokens // self.group.block_size + 1]


def get_alike(config: Config, pool: Pool, request: RequestState) -> list[Alike]:
    """Return the groups of one request by kind: full attention first, then in the config's order.

    Source: vLLM 0.19.1 `verify_and_split_kv_cache_groups`, when run.
    """
    kinds = sorted(dict.fromkeys(config.groups), key=lambda group: group.kind is not GroupKind.FULL)
    alike = []
    for kind in kinds:
        end = request.num_known_tokens // kind.block_size
        num_links = kind.block_size // config.block_size
        found: dict[int, list[BlockId | None]] = {}
        for index, group in enumerate(config.groups):
            if group == kind:
                keys = get_group_keys(request.block_keys, index, num_links, 0, end)
                found[index] = [find_block(pool, key) for key in keys]
        places = zip(*found.values(), strict=True)
        common = [None if None in blocks else blocks[0] for blocks in places]
        alike.append(Alike(kind, found, count_runs(common)))
    return alike


@dataclass(frozen=True, slots=True)
class Search:
    """A release's search for a hit: with these quirks, in multiples of all block sizes."""

    quirks: frozenset[str]
    unit: int
    """The number of tokens of which each hit is a multiple."""
    num_behind: int
    """The number of blocks after the hit that are dropped for a draft head."""

    def look_up(self, one: Alike, limit: int, last: int) -> Range:
        """Return the blocks of the longest hit of these groups alone within `limit` tokens.

        The block after it, which is dropped for a draft head, may end at `last`.
        """
        runs = one.get_runs(last)
        for num_tokens in range(limit // self.unit * self.unit, 0, -self.unit):
            found = self.get_range(one.group, runs, num_tokens, limit)
            if found is not None:
                return found
        return 0, 0

    def get_range(
        self, group: KVGroup, runs: Sequence[int], num_tokens: int, limit: int
    ) -> Range | None:
        """Return the blocks that a group shares for a hit of `num_tokens`; None if it is no hit.

        Source: vLLM 0.19.1 `find_longest_cache_hit` of each kind, when run.
        """
        size, end = group.block_size, num_tokens // group.block_size
        if group.kind is GroupKind.SLIDING_WINDOW:
            if Quirk.WINDOW_HIT_CUT_WITHOUT_CHECK in self.quirks and self.num_behind:
                num_wanted = -(-(group.sliding_window - 1) // size) + 1
                top = (num_tokens + self.unit) // size
                is_found = top < len(runs) and runs[top] >= min(num_wanted, top)
                return (max(top - num_wanted, 0), end) if is_found else None
            is_cut_twice = (
                Quirk.DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE in self.quirks and size < self.unit
            )
            if is_cut_twice and self.num_behind and num_tokens < group.sliding_window - 1:
                is_found = end + 1 < len(runs) and runs[end + 1] == end + 1
                return (0, end - self.unit // size) if is_found else None
            is_narrow = group.sliding_window == 1 and not self.num_behind
            if is_narrow and runs[end]:
                return end - 1, end
            if is_narrow and Quirk.WINDOW_OF_ONE_NEEDS_A_CACHED_BLOCK in self.quirks:
                return None
        if group.kind is GroupKind.CHUNKED_LOCAL:
            chunk = -(-num_tokens // group.attention_chunk_size) * group.attention_chunk_size
            is_begun = chunk < num_tokens + size and chunk <= limit
            if Quirk.FIRST_BLOCK_OF_AN_ATTENTION_CHUNK_IS_SKIPPED in self.quirks and is_begun:
                return end, end
        if is_valid_hit(group, runs, num_tokens, self.num_behind):
            return compute_num_skipped_blocks(group, num_tokens), end
        return None

    def find_by_turns(self, alike: Sequence[Alike], num_known: int) -> tuple[list[Range], int]:
        """Return the blocks that the groups share when each in turn shortens the hit of those
        before it, and the most tokens that any turn left.

        Full attention has one turn, and so has another kind if it is the only one.
        Source: vLLM 0.19.1 `HybridKVCacheCoordinator.find_longest_cache_hit`, when run.
        """
        is_full = [one.group.kind is GroupKind.FULL for one in alike]
        has_one_turn = len(alike) == 1 or (len(alike) == 2 and is_full[0])
        looked: set[int] = set()
        ranges = [(0, 0)] * len(alike)
        limit, length, longest = num_known, num_known - 1, 0
        while length < limit:
            is_first, limit = limit == num_known, length
            for number, one in enumerate(alike):
                if is_full[number] and not is_first:
                    continue
                search, last = self.get_turn(one, length, num_known, number in looked)
                ranges[number] = search.look_up(one, length, last)
                left = ranges[number][1] * one.group.block_size
                if search.num_behind:
                    looked.add(number)
                elif left < length:
                    looked.clear()
                length = left
                longest = max(longest, length)
            if has_one_turn:
                break
        return ranges, longest

    def get_turn(
        self, one: Alike, limit: int, num_known: int, has_looked: bool
    ) -> tuple[Search, int]:
        """Return how groups are searched in their turn, and where the last block looked up may end.

        `has_looked`: whether a block was dropped for the draft head in an earlier turn of these
        groups. Source: vLLM 0.33.0 `HybridKVCacheCoordinator.find_longest_cache_hit`, when run.
        """
        last = num_known - 1
        if Quirk.DRAFT_HEAD_DROP_PER_GROUP in self.quirks:
            return self, limit
        if Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE not in self.quirks:
            return self, last
        if has_looked:
            return replace(self, num_behind=0), limit
        end = num_known if Quirk.DRAFT_HEAD_DROPS_THE_LAST_PROMPT_BLOCK in self.quirks else last
        is_state = one.group.kind is GroupKind.RECURRENT
        return self, limit if is_state else min(limit + one.group.block_size * self.num_behind, end)

    def find(self, config: Config, pool: Pool, request: RequestState) -> Hit:
        """Return the hit, with the table of each group."""
        return self.find_longest(config, pool, request)[0]

    def find_longest(self, config: Config, pool: Pool, request: RequestState) -> tuple[Hit, int]:
        """Return the hit, and the most tokens that a turn of the groups left."""
        alike = get_alike(config, pool, request)
        num_known = request.num_known_tokens
        ranges, longest = self.find_by_turns(alike, num_known)
        num_tokens = ranges[-1][1] * alike[-1].group.block_size
        tables: dict[int, tuple[BlockId, ...]] = {}
        for number, one in enumerate(alike):
            end = num_tokens // one.group.block_size
            is_whole = number > 0 and one.group.kind is GroupKind.FULL
            if is_whole and Quirk.ONLY_FIRST_FULL_ATTENTION_GROUP_IS_CUT in self.quirks:
                end = ranges[number][1]
            first = ranges[number][0]
            if Quirk.WINDOW_OF_ONE_HOLDS_A_SKIPPED_BLOCK not in self.quirks:
                first = max(first, compute_num_skipped_blocks(one.group, num_tokens))
            for index, blocks in one.found.items():
                held = [block_id for block_id in blocks[first:end] if block_id is not None]
                tables[index] = (NULL_BLOCK,) * min(first, end) + tuple(held)
        block_tables = tuple(tables[index] for index in range(len(config.groups)))
        return Hit(num_tokens, block_tables), longest


def get_search(quirks: frozenset[str], config: Config) -> Search:
    """Return the search for hits with these quirks."""
    if len(config.groups) == 1:  # the last block is dropped, as in strict rules
        quirks -= {Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE}
    return Search(quirks, lcm(*config.block_sizes), int(config.drops_last_hit_block))


def hits_are_searched(rules: Rules, config: Config) -> Rules:
    """Hits are searched as the quirks of the rules have it: each changes one part of the search."""
    if not config.groups:
        return rules
    return rules.replacing(prefix_cache.find_hit, get_search(rules.changes, config).find)


def count_needed(
    pool: Pool, group: KVGroup, num_slots: int, num_held: int, hit: tuple[BlockId, ...]
) -> int:
    """Return the free blocks that one group needs for `num_slots`, without held and hit ones."""
    num_taken = count_taken(group, Growth(num_slots, num_slots, False), num_held, len(hit))
    return num_taken + count_free(pool, hit)


def window_reserves_the_full_request(rules: Rules, _config: Config) -> Rules:
    """The check of the full length counts a window as long as the whole request."""

    def count_reserved_blocks(
        config: Config,
        pool: Pool,
        group: KVGroup,
        num_slots: int,
        hit: tuple[BlockId, ...],
        holding: Holding,
        num_copies: int = 0,
    ) -> int:
        del config, num_copies
        return count_needed(pool, group, num_slots, len(holding.block_table), hit)

    return rules.replacing(full_isl.count_reserved_blocks, count_reserved_blocks)


def window_reserves_one_step(rules: Rules, config: Config) -> Rules:
    """The check of the full length counts a window, the budget of a step, and a block."""
    return windows_reserve(rules, config.max_num_batched_tokens)


def window_reserves_steps_in_flight(rules: Rules, config: Config) -> Rules:
    """The check of the full length counts a window, all steps that may be in flight, and a
    block."""
    return windows_reserve(rules, config.max_num_batched_tokens * config.max_frames_in_flight)


def windows_reserve(rules: Rules, num_more: int) -> Rules:
    """The check of the full length counts a window, `num_more` tokens, and a block."""

    def count_reserved_blocks(
        config: Config,
        pool: Pool,
        group: KVGroup,
        num_slots: int,
        hit: tuple[BlockId, ...],
        holding: Holding,
        num_copies: int = 0,
    ) -> int:
        del num_copies
        is_window = group.kind is GroupKind.SLIDING_WINDOW
        if is_window or group.kind is GroupKind.CHUNKED_LOCAL:
            num_behind = group.sliding_window - 1 if is_window else group.attention_chunk_size
            num_tokens = min(num_behind + num_more, config.max_model_len)
            num_blocks = -(-num_tokens // group.block_size) + is_window
            num_slots = min(num_slots, num_blocks * group.block_size)
        return count_needed(pool, group, num_slots, len(holding.block_table), hit)

    return rules.replacing(full_isl.count_reserved_blocks, count_reserved_blocks)


def attention_chunk_keeps_a_published_block(rules: Rules, _config: Config) -> Rules:
    """The last published one of the skipped blocks before an attention chunk is kept."""

    def count_skipped_blocks(group: KVGroup, holding: Holding, num_certain: int) -> int:
        num_skipped = rules[groups.count_skipped_blocks](group, holding, num_certain)
        if group.kind is GroupKind.CHUNKED_LOCAL and holding.num_cached_blocks:
            return min(num_skipped, holding.num_cached_blocks - 1)
        return num_skipped

    return rules.replacing(groups.count_skipped_blocks, count_skipped_blocks)


def window_moves_as_if_drafts_were_accepted(rules: Rules, _config: Config) -> Rules:
    """A window moves on as if all drafts in flight were accepted."""
    return rules.replacing(groups.get_num_in_doubt, get_num_in_doubt)


def get_num_in_doubt(row: Scheduled) -> int:
    """Modified `groups.get_num_in_doubt`: none."""
    del row
    return 0


def window_waits_for_commits(rules: Rules, _config: Config) -> Rules:
    """A window moves on only when steps in flight are committed, with drafts or without."""

    def get_num_in_doubt(row: Scheduled) -> int:
        return row.num_scheduled

    def count_in_doubt(frames: Sequence[Frame], request_id: RequestId) -> int:
        rows = [row for frame in frames for row in frame.rows if row.request_id == request_id]
        return sum([groups.IN_DOUBT.of(row) for row in rows])

    return rules.replacing(groups.get_num_in_doubt, get_num_in_doubt).replacing(
        groups.count_unverified, count_in_doubt
    )


STORIES = (
    QuirkStory(
        Quirk.DRAFT_HEAD_DROP_PER_GROUP,
        hits_are_searched,
        "groups shorten a hit in turns, and each turn drops a block for the draft head",
        ("P5",),
        "#32802 (named in its source)",
        "0.19.1",
        "a draft head, blocks of 1, full attention and a window of 2; 6 tokens are cached: 4 of "
        "them are hit, not 5; with a second window none",
    ),
    QuirkStory(
        Quirk.WINDOW_HIT_CUT_WITHOUT_CHECK,
        hits_are_searched,
        "a window's hit is cut to whole blocks of every group, even if blocks before the cut are "
        "missing",
        ("P5",),
        "not found upstream",
        "0.19.1",
        "a draft head, full attention in blocks of 4 and a window of 2 in blocks of 1, of which "
        "only the last 2 of 8 are cached: 4 tokens are hit, and the window reads a null block",
    ),
    QuirkStory(
        Quirk.FIRST_BLOCK_OF_AN_ATTENTION_CHUNK_IS_SKIPPED,
        hits_are_searched,
        "a block in which an attention chunk begins counts as skipped",
        ("P5",),
        "not found upstream",
        "0.19.1",
        "chunks of 3 in blocks of 2, nothing cached, a prompt of 5 tokens: 2 are hit, and the "
        "third reads a null block",
    ),
    QuirkStory(
        Quirk.WINDOW_OF_ONE_NEEDS_A_CACHED_BLOCK,
        hits_are_searched,
        "a window of one token, which reads no earlier token, has no hit without a cached block",
        ("P5",),
        "not found upstream",
        "0.19.1",
        "blocks of 1, full attention and a window of 1; the window's blocks were evicted: no hit",
    ),
    QuirkStory(
        Quirk.WINDOW_OF_ONE_HOLDS_A_SKIPPED_BLOCK,
        hits_are_searched,
        "a window of one token holds the last block of a hit until the next step",
        ("P8",),
        "ended by #30166 (in 0.14.0)",
        "0.11.0",
        "blocks of 1, a window of 1; the first of two tokens is cached: the row that computes the "
        "second holds the block of the first",
    ),
    QuirkStory(
        Quirk.ONLY_FIRST_FULL_ATTENTION_GROUP_IS_CUT,
        hits_are_searched,
        "further groups with full attention keep blocks that they found beyond the hit",
        ("P4", "P5"),
        "not found upstream",
        "0.19.1",
        "full attention in blocks of 1 and of 2, and a window that has nothing cached: no token is"
        " hit, but the request holds blocks of the second group",
    ),
    QuirkStory(
        Quirk.WINDOW_RESERVES_THE_FULL_REQUEST,
        window_reserves_the_full_request,
        "the check of the full length counts a window as long as the whole request",
        ("P10", "P11", "P15"),
        "#39734",
        "0.19.1",
        "blocks of 1, a budget of 1, a window of 2, 4 blocks: a prompt of 5 tokens, which never "
        "holds more than 3 blocks, is never admitted",
    ),
    QuirkStory(
        Quirk.ATTENTION_CHUNK_KEEPS_A_PUBLISHED_BLOCK,
        attention_chunk_keeps_a_published_block,
        "of the skipped blocks before an attention chunk the last published one is kept",
        ("P8",),
        "#25431 (merged; fixed in 0.11.1)",
        "0.11.0",
        "chunks of 1 in blocks of 1: the row that computes the second token holds the block of the"
        " first",
    ),
    QuirkStory(
        Quirk.WINDOW_MOVES_AS_IF_DRAFTS_WERE_ACCEPTED,
        window_moves_as_if_drafts_were_accepted,
        "a window moves on as if all drafts in flight were accepted",
        ("P5", "P14"),
        "not found upstream",
        "0.19.1",
        "asynchronous, one draft, blocks of 1, a window of 2: a draft in flight is rejected, and "
        "the token computed instead reads a null block",
    ),
    QuirkStory(
        Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE,
        hits_are_searched,
        "the block dropped for the draft head is looked up after a longer hit than the final one",
        ("P5",),
        "comes with the repair of #32802",
        "0.33.0",
        "a draft head, blocks of 1, full attention, windows of 4 and 3; of the second's blocks the"
        " fifth and sixth are evicted: 4 tokens are hit, and no block of that window follows them",
    ),
    QuirkStory(
        Quirk.DRAFT_HEAD_DROPS_THE_LAST_PROMPT_BLOCK,
        hits_are_searched,
        "the block dropped for the draft head may end with the prompt",
        ("P5",),
        "not found upstream (searched 2026-11-26: EAGLE block drop; near #32802)",
        "0.33.0",
        "a draft head, two groups in blocks of 1; 5 tokens are cached, and submitted again: 4 of "
        "them are hit, not 3",
        upon=(Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE,),
    ),
    QuirkStory(
        Quirk.DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE,
        hits_are_searched,
        "a hit that does not fill a window is cut to whole blocks of every group before the block "
        "is dropped for the draft head, and again after it",
        ("P5",),
        "not found upstream (searched 2026-11-27: sliding window, eagle, alignment; near #39450)",
        "0.20.2",
        "a draft head, full attention in blocks of 4 and a window of 6 in blocks of 2; 8 tokens "
        "are cached: none of them is hit, not 4",
    ),
    QuirkStory(
        Quirk.WINDOW_RESERVES_ONE_STEP,
        window_reserves_one_step,
        "the check of the full length counts a window, the budget of a step, and a block",
        ("P10", "P11", "P15"),
        "#39734 (named in its source)",
        "0.24.0",
        "blocks of 1, a budget of 1, a window of 2, 3 blocks: a prompt of 5 tokens, which never "
        "holds more than 2 blocks, is never admitted",
    ),
    QuirkStory(
        Quirk.WINDOW_RESERVES_STEPS_IN_FLIGHT,
        window_reserves_steps_in_flight,
        "the check of the full length counts a window, all steps that may be in flight, and a "
        "block",
        ("P10", "P11", "P15"),
        "#39734 (named in its source)",
        "0.33.0",
        "blocks of 1, a budget of 1, a window of 2, 3 blocks: a prompt of 5 tokens, which never "
        "holds more than 2 blocks, is never admitted",
    ),
    QuirkStory(
        Quirk.WINDOW_WAITS_FOR_COMMITS,
        window_waits_for_commits,
        "a window moves on only when steps in flight are committed, with drafts or without",
        ("P8",),
        "#47728 (merged)",
        "0.33.0",
        "two steps in flight, blocks of 1, a budget of 1, a window of 1: the row that computes the"
        " second token holds the block of the first",
    ),
)
