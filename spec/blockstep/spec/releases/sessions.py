"""Sessions: quirks of releases with requests that continue after a stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import admission, endings
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import Frame, Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Step
from blockstep.spec.features import common_prefix, reclaim, sessions
from blockstep.spec.features.kv_transfer.transfers import TRANSFERS
from blockstep.spec.features.structured_output.grammar import GRAMMAR
from blockstep.spec.releases import block_pool as memory
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import (
    BlockId,
    Config,
    FinishReason,
    FrameId,
    OutputRow,
    Request,
    RequestId,
    Status,
    TokenId,
    TokenIds,
)


def sessions_keep_their_blocks(rules: Rules, _config: Config) -> Rules:
    """An idle or waiting session keeps its blocks under memory pressure and under any reset."""

    def list_queued(step: Step) -> list[RequestId]:
        parked = Status.WAITING_FOR_REMOTE_KVS
        queued = rules[reclaim.list_queued](step)
        return [name for name in queued if step.requests[name].status is parked]

    return rules.replacing(reclaim.list_queued, list_queued)


def sessions_keep_max_tokens(rules: Rules, _config: Config) -> Rules:
    """Each input of a session may sample as many tokens as the first."""

    def get_joined(asked: Request, update: Request, kept: TokenIds, offset: int) -> Request:
        joined = rules[sessions.get_joined](asked, update, kept, offset)
        return replace(joined, max_tokens=asked.max_tokens)

    return rules.replacing(sessions.get_joined, get_joined)


def sessions_keep_their_grammar(rules: Rules, _config: Config) -> Rules:
    """The grammar of a session continues from input to input, even after the discarded last
    token."""

    def get_continued(
        config: Config, request: RequestState, update: Request, within: Rules
    ) -> RequestState:
        after = rules[sessions.get_continued](config, request, update, within)
        return GRAMMAR.put(after, GRAMMAR.of(request))

    return rules.replacing(sessions.get_continued, get_continued)


def session_keys_are_appended(rules: Rules, _config: Config) -> Rules:
    """The key of a block that the discarded last token completed stays, and later keys follow
    it."""
    return rules.replacing(sessions.get_num_kept_keys, get_num_kept_keys)


def get_num_kept_keys(request: RequestState, num_kept: int, block_size: int) -> int:
    """Modified `sessions.get_num_kept_keys`: all keys."""
    del num_kept, block_size
    return len(request.block_keys)


def sessions_keep_what_is_computed(rules: Rules, _config: Config) -> Rules:
    """A session keeps as many tokens as are computed, even those after its stop."""

    def get_num_kept(request: RequestState) -> int:
        return request.num_computed_tokens

    def get_stopped(
        config: Config, pool: Pool, request: RequestState, rules: Rules, fence: FrameId | None
    ) -> tuple[Pool, RequestState]:
        del config, rules, fence
        return pool, replace(request, num_output_placeholders=0, spec_token_ids=())

    return rules.replacing(sessions.get_num_kept, get_num_kept).replacing(
        sessions.get_stopped, get_stopped
    )


def sessions_keep_placeholders(rules: Rules, _config: Config) -> Rules:
    """Tokens of frames in flight after a session's stop are delivered, and its drafts stay."""

    def get_stopped(
        config: Config, pool: Pool, request: RequestState, within: Rules, fence: FrameId | None
    ) -> tuple[Pool, RequestState]:
        pool, after = rules[sessions.get_stopped](config, pool, request, within, fence)
        return pool, replace(
            after,
            num_output_placeholders=request.num_output_placeholders,
            spec_token_ids=request.spec_token_ids,
        )

    return rules.replacing(sessions.get_stopped, get_stopped).replacing(
        sessions.get_frames_behind_stop, get_frames_behind_stop
    )


def get_frames_behind_stop(frames: tuple[Frame, ...], request_id: RequestId) -> tuple[Frame, ...]:
    """Modified `sessions.get_frames_behind_stop`: its rows still deliver their tokens."""
    del request_id
    return frames


def sessions_admitted_with_lookahead(rules: Rules, _config: Config) -> Rules:
    """A continued session is admitted with lookahead slots, other requests are not."""

    def allocate_first_slots(
        step: Step, pool: Pool, request: RequestState, num_new: int, hit: Hit
    ) -> tuple[Pool, RequestState] | None:
        if not request.num_computed_tokens:
            return rules[admission.allocate_first_slots](step, pool, request, num_new, hit)
        return memory.allocate_first_slots(step, pool, request, num_new, hit)

    return rules.replacing(admission.allocate_first_slots, allocate_first_slots)


def refused_session_frees_skipped_blocks(rules: Rules, _config: Config) -> Rules:
    """A session that does not fit has already freed its skipped blocks."""

    def process_first_slots(
        step: Step, pool: Pool, request: RequestState, num_new: int, hit: Hit
    ) -> tuple[Pool, RequestState] | None:
        pool, request = rules[admission.get_skipped_at_admission](step, request)
        name, step.pool = request.request_id, pool
        step.requests[name] = replace(step.requests[name], holdings=request.holdings)
        return rules[admission.allocate_first_slots](step, pool, request, num_new, hit)

    return rules.replacing(admission.get_skipped_at_admission, get_skipped_at_admission).replacing(
        admission.allocate_first_slots, process_first_slots
    )


def get_skipped_at_admission(step: Step, request: RequestState) -> tuple[Pool, RequestState]:
    """Modified `admission.get_skipped_at_admission`: nothing is skipped before the gate."""
    return step.pool, request


def session_keeps_blocks_without_check(rules: Rules, _config: Config) -> Rules:
    """A session keeps its blocks at a stop even if blocks that it must read are gone."""

    def get_stopped(
        config: Config, pool: Pool, request: RequestState, within: Rules, fence: FrameId | None
    ) -> tuple[Pool, RequestState]:
        del config, fence
        num_kept = within[sessions.get_num_kept](request)
        return pool, replace(
            request,
            num_computed_tokens=min(request.num_computed_tokens, num_kept),
            num_output_placeholders=0,
            spec_token_ids=(),
        )

    return rules.replacing(sessions.get_stopped, get_stopped)


def common_prefix_counts_idle_sessions(rules: Rules, _config: Config) -> Rules:
    """Common prefix blocks of running requests are counted only if idle sessions hold them, too."""
    return rules.replacing(common_prefix.list_common_prefixes, list_common_prefixes)


def list_common_prefixes(step: Step) -> list[int]:
    """Modified `common_prefix.list_common_prefixes`: those that all requests with blocks hold."""
    return [count_held_by_all(step, table) for table in step.requests[step.running[0]].block_tables]


def count_held_by_all(step: Step, table: Sequence[BlockId]) -> int:
    """Return the leading blocks of a table whose ref count is the number of requests with blocks.

    Source: vLLM 0.19.1 `FullAttentionManager.get_num_common_prefix_blocks`, which counts a request
    that holds a block in two tables twice; P26.
    """
    waiting = [step.requests[name].block_tables for name in (*step.waiting, *step.skipped)]
    ended = TRANSFERS.of(step).held
    held = [ended[name].block_tables for name in sorted(ended)]
    num_holders = len(step.running) + sum(map(any, (*waiting, *held)))
    refs = step.pool.ref_counts
    return next((i for i, b in enumerate(table) if refs[b] != num_holders), len(table))


def session_repeats_its_stop_token(rules: Rules, _config: Config) -> Rules:
    """Once a stop token has ended an input, it is reported with each output of the following
    inputs."""

    def get_extended(
        request: RequestState, tokens: TokenIds, max_model_len: int, within: Rules
    ) -> tuple[RequestState, OutputRow]:
        extend, last = rules[endings.get_extended], LAST_STOP.of(request)
        after, row = extend(request, tokens, max_model_len, within)
        if row.stop_token_id is None and row.finish_reason is not FinishReason.REPETITION:
            row = replace(row, stop_token_id=last)
        return LAST_STOP.put(after, last if row.finish_reason is None else row.stop_token_id), row

    return rules.replacing(endings.get_extended, get_extended)


LAST_STOP: Final = Part[TokenId | None]("last_stop", None)
"""The stop token of a session that was reported at the end of its last input."""


STORIES = (
    QuirkStory(
        Quirk.SESSIONS_KEEP_THEIR_BLOCKS,
        sessions_keep_their_blocks,
        "an idle or waiting session keeps its blocks under memory pressure and under any reset",
        ("P10", "P17", "P25"),
        "#49439 (open)",
        "0.19.1",
        "an idle session holds two of three blocks, and a prompt needs two: it is never admitted; "
        "a forced reset stops with an error",
    ),
    QuirkStory(
        Quirk.SESSIONS_KEEP_MAX_TOKENS,
        sessions_keep_max_tokens,
        "each input of a session may sample as many tokens as the first",
        ("P11", "P13"),
        "not found upstream (fixed by 0.32.0)",
        "0.19.1",
        "a session of max_tokens 1 continues with max_tokens 2: it stops after one token",
    ),
    QuirkStory(
        Quirk.SESSIONS_KEEP_THEIR_GRAMMAR,
        sessions_keep_their_grammar,
        "the grammar of a session continues from input to input, even after the discarded last "
        "token",
        ("P23",),
        "not found upstream",
        "0.19.1",
        "a grammar of one token; a session samples it, and continues: no mask applies to the next "
        "input",
    ),
    QuirkStory(
        Quirk.SESSION_KEYS_ARE_APPENDED,
        session_keys_are_appended,
        "the key of a block that the discarded last token completed stays, and later keys follow "
        "it",
        ("P3", "P6"),
        "not found upstream (fixed by 0.32.0)",
        "0.19.1",
        "blocks of 2; a session of one token that samples one becomes idle, and continues with "
        "another token: its first block has the key of the discarded token",
    ),
    QuirkStory(
        Quirk.SESSIONS_KEEP_WHAT_IS_COMPUTED,
        sessions_keep_what_is_computed,
        "a session keeps as many tokens as are computed, even those after its stop",
        ("P3", "P12", "P13"),
        "not found upstream (fixed in 0.33.0)",
        "0.19.1",
        "drafts; a session of max_tokens 2 accepts two drafts at once after its first token: it "
        "stops at the first of them, and the next input follows the second",
    ),
    QuirkStory(
        Quirk.SESSIONS_KEEP_PLACEHOLDERS,
        sessions_keep_placeholders,
        "tokens of frames in flight after a session's stop are delivered, and its drafts stay",
        ("P12", "P13", "P24"),
        "not found upstream",
        "0.19.1",
        "asynchronous; a session samples its end-of-sequence token while its next row is in "
        "flight: it becomes idle, and then another token is delivered",
    ),
    QuirkStory(
        Quirk.COMMON_PREFIX_COUNTS_IDLE_SESSIONS,
        common_prefix_counts_idle_sessions,
        "common prefix blocks of running requests are counted only if idle sessions hold them, too",
        (),
        "not found upstream",
        "0.19.1",
        "a session is idle; another request runs, alone: the plan has no common block",
    ),
    QuirkStory(
        Quirk.SESSION_REPEATS_ITS_STOP_TOKEN,
        session_repeats_its_stop_token,
        "once a stop token has ended an input, it is reported with each output of the following "
        "inputs",
        ("P13",),
        "#57584 (open)",
        "0.19.1",
        "a session ends an input by a stop token and continues: its next output, which ends "
        "nothing, is reported with the earlier stop token",
    ),
    QuirkStory(
        Quirk.SESSIONS_ADMITTED_WITH_LOOKAHEAD,
        sessions_admitted_with_lookahead,
        "a continued session is admitted with lookahead slots, other requests are not",
        ("P8",),
        "not found upstream",
        "0.19.1",
        "blocks of 2, a draft model; a session continues with tokens that fill its block: it is "
        "given one block more",
    ),
    QuirkStory(
        Quirk.REFUSED_SESSION_FREES_SKIPPED_BLOCKS,
        refused_session_frees_skipped_blocks,
        "a session that does not fit has already freed its skipped blocks",
        ("P7", "P16"),
        "not found upstream",
        "0.19.1",
        "several groups, one of a window; a session continues in a pool without a free block: it "
        "is not admitted, but the blocks outside its window are free",
    ),
    QuirkStory(
        Quirk.SESSION_KEEPS_BLOCKS_WITHOUT_CHECK,
        session_keeps_blocks_without_check,
        "a session keeps its blocks at a stop even if blocks that it must read are gone",
        ("P3", "P14"),
        "not found upstream",
        "0.33.0",
        "a recurrent group with a block for a draft; a session stops, and only the worker knows "
        "which block of its table has the state",
    ),
)
