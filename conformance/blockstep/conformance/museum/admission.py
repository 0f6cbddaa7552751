"""Seeded bugs in admission: prefix hits, the capacity check and the first row of a request."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.admission import (
    get_slots_at_admission,
    get_waiting_share,
    process_admission,
    process_entrance,
    process_waiting_phase,
)
from blockstep.spec.core.block_pool import (
    Pool,
    allocate_blocks,
    count_free,
    get_num_free_blocks,
    touch_blocks,
)
from blockstep.spec.core.endings import get_ended
from blockstep.spec.core.parts import Note, Part
from blockstep.spec.core.plans import get_frame_rows, get_plan
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.prefix_cache import compute_max_hit_blocks, find_hit, find_published
from blockstep.spec.core.requests import FrameRow, Hit, Holding, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.schedule import process_running_phase
from blockstep.spec.core.slots import count_taken
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features.groups.kinds import compute_max_row
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import Config, Plan, RequestId, Status

PAGE = Page()
Granted = tuple[Pool, RequestState] | Verdict


@PAGE.exhibit(
    "a prefix hit on the whole prompt leaves no token to compute",
    "#30320, #11186; nano-vllm #117, #144",
    "P5 P10 P15",
)
@instead(compute_max_hit_blocks)
def full_hit(num_known: int, block_size: int) -> int:
    """No token runs, so there are no logits to sample from."""
    return num_known // block_size


@PAGE.exhibit(
    "the capacity check forgets that a hit uses a free block",
    "#11562; TensorRT-LLM #11731",
    "P8 P1 P2",
)
def hit_counts_as_free(rules: Rules, _config: Config) -> Rules:
    """The check treats hit blocks as held, so the admission needs more blocks than are free."""
    return rules.replacing(count_free, lambda _pool, _block_ids: 0)


@PAGE.exhibit(
    "hits are touched before the capacity check and leak if it fails",
    "#11565; SGLang #16067",
    "P1 P7",
)
@instead(get_slots_at_admission)
def touch_before_check(right: Right[Granted], step: Step, hit: Hit) -> Granted:
    """Each failed admission leaks a reference to every block of the request's prefix hit."""
    granted = right()
    if isinstance(granted, Verdict):
        step.pool = touch_blocks(step.pool, sum(hit.block_tables, ()))
    return granted


_HIDDEN = Note[tuple[RequestId, ...]]("hidden", ())


@PAGE.exhibit(
    "requests are admitted in a step that preempted",
    "vLLM V1: Admission Gate",
    "P16 P15",
    invisible="policy: which request is admitted when",
)
def admission_after_preemption(rules: Rules, _config: Config) -> Rules:
    """The admission takes the blocks that a preemption freed, and the next step preempts again."""

    def run(step: Step) -> None:
        rules[process_running_phase](step)
        _HIDDEN.set(step, tuple(step.preempted))
        step.preempted.clear()

    def get_rows(step: Step) -> tuple[FrameRow, ...]:
        step.preempted += _HIDDEN.of(step)
        return rules[get_frame_rows](step)

    def make_plan(step: Step, frame_rows: Sequence[FrameRow]) -> Plan:
        plan = rules[get_plan](step, frame_rows)
        rows = [
            replace(row, all_token_ids=step.requests[row.request_id].all_token_ids)
            if row.resumed
            else row
            for row in plan.cached
        ]
        return replace(plan, cached=tuple(rows))  # they may be those of the last plan

    changed = rules.replacing(process_running_phase, run)
    return changed.replacing(get_frame_rows, get_rows).replacing(get_plan, make_plan)


@PAGE.exhibit(
    "a hit on the whole prompt is shortened by one token instead of one block",
    "#53706, #53514",
    "P5 P2 P10 P16",
    wrong_fix_of="full-hit",
)
def hit_cut_inside_a_block(rules: Rules, _config: Config) -> Rules:
    """A shared block is held whole but counted in part, so its last slot is written again."""

    def find(config: Config, pool: Pool, request: RequestState) -> Hit:
        hit = rules[find_hit](config, pool, request)
        return replace(hit, num_tokens=min(hit.num_tokens, request.num_known_tokens - 1))

    return full_hit(rules, _config).replacing(find_hit, find)


@PAGE.exhibit(
    "the last block of a hit is always dropped, even if tokens are left to compute",
    "#52617",
    "P5 P15",
    wrong_fix_of="full-hit",
    invisible="efficiency: a block is computed again",
)
@instead(compute_max_hit_blocks)
def hit_limit_off_by_one(num_known: int, block_size: int) -> int:
    """A partly filled last block would have left tokens to compute anyway."""
    return max(num_known // block_size - 1, 0)


@PAGE.exhibit(
    "the capacity check credits a hit block that the allocation then drops",
    "TensorRT-LLM #12404",
    "P8 P1 P2",
)
@instead(get_slots_at_admission)
def boundary_hit_credited(
    right: Right[Granted], step: Step, request: RequestState, hit: Hit
) -> Granted:
    """If a hit ends with the prompt, its last block is dropped, and then one block is missing."""
    pool, num_hit = step.pool, len(sum(hit.block_tables, ()))
    credited = find_published(pool, request.block_keys)[num_hit:] if num_hit else ()
    step.pool = replace(pool, free_queue=pool.free_queue + credited)
    granted = right()
    step.pool = pool
    if isinstance(granted, Verdict) or not credited:
        return granted
    after, request = granted
    num_left = max(len(after.free_queue) - len(credited), 0)
    return replace(after, free_queue=after.free_queue[:num_left]), request


@PAGE.exhibit(
    "hit blocks that were free are charged to the token budget",
    "TensorRT-LLM #11731, #15066",
    "P15",
    wrong_fix_of="hit-counts-as-free",
    invisible="efficiency: a step schedules fewer tokens than it could",
)
@instead(process_entrance)
def free_hits_charged(right: Right[None], step: Step, hit: Hit) -> None:
    """A hit on a free block uses it up; here its tokens are charged to the budget as well."""
    right()
    num_free = sum(step.pool.ref_counts[block] == 1 for block in sum(hit.block_tables, ()))
    step.budget = max(step.budget - num_free * step.state.config.block_size, 0)


@PAGE.exhibit(
    "hit blocks are subtracted twice from the blocks to allocate", "#11562, #11565", "P8 P26"
)
@instead(count_taken)
def hits_credited_twice(right: Right[int], num_hit: int) -> int:
    """Hits reduce the tokens to compute, and then once more the blocks that hold these."""
    return right(num_hit=2 * num_hit)


_IS_FULL = Part("is_full", False)


def remember_full(rules: Rules) -> Rules:
    """Return rules by which an admission that fails makes all later ones fail."""

    def admit(step: Step, request: RequestState) -> Verdict:
        if _IS_FULL.of(step):
            return Verdict.NO_ROOM
        verdict = rules[process_admission](step, request)
        _IS_FULL.set(step, verdict in (Verdict.NO_ROOM, Verdict.NO_BLOCKS))
        return verdict

    return rules.replacing(process_admission, admit)


@PAGE.exhibit(
    "a flag that the pool is full is cleared only by a preemption",
    "SGLang #22518, #23284",
    "P15 P10",
)
def sticky_full_flag(rules: Rules, _config: Config) -> Rules:
    """One failed admission stops all others until a running request is preempted."""

    def preempt(step: Step, victim_index: int) -> RequestId:
        _IS_FULL.set(step, False)
        return rules[process_preemption](step, victim_index)

    return remember_full(rules).replacing(process_preemption, preempt)


@PAGE.exhibit(
    "a flag that the pool is full is cleared only when a request finishes",
    "SGLang #23138, #35537",
    "P15",
    wrong_fix_of="sticky-full-flag",
    invisible="efficiency: a request waits longer than needed, but not for ever",
)
def full_until_someone_ends(rules: Rules, _config: Config) -> Rules:
    """A long prompt that used up the token budget makes the next request wait long after it."""

    def end(state: State, request_ids: Sequence[RequestId]) -> State:
        if request_ids:
            state = _IS_FULL.put(state, False)
        return rules[get_ended](state, request_ids)

    def admit(step: Step) -> None:
        _IS_FULL.set(step, _IS_FULL.of(step) and bool(step.running))
        rules[process_waiting_phase](step)

    changed = remember_full(rules).replacing(get_ended, end)
    return changed.replacing(process_waiting_phase, admit)


_FIRST_LOOKS = Part("first_looks", FrozenMap[RequestId, int]())


@PAGE.exhibit(
    "the tokens of a row are counted before its prefix hit is known",
    "nano-vllm #207, #211",
    "P12 P9 P26 P24",
)
@instead(get_waiting_share)
def share_counted_before_hits(
    right: Right[int | Verdict], step: Step, request: RequestState, num_start: int
) -> int | Verdict:
    """A hit found after the first look raises the computed tokens; the row is then too long."""
    looks = _FIRST_LOOKS.of(step)
    num_first = min(looks.get(request.request_id, num_start), num_start)
    _FIRST_LOOKS.set(step, looks.having(request.request_id, num_first))
    return right(num_start=num_first)


@PAGE.exhibit(
    "a request whose admission fails keeps a block that was taken for it",
    "review of nano-vllm #207; Dynamo #11016",
    "P7 P12",
    wrong_fix_of="share-counted-before-hits",
)
@instead(process_admission)
def refused_keeps_blocks(right: Right[Verdict], step: Step, request: RequestState) -> Verdict:
    """Blocks are taken before the last check, so two waiting requests can block each other."""
    verdict = right()
    if verdict in (Verdict.NO_ROOM, Verdict.NO_BLOCKS):
        step.pool, taken = allocate_blocks(step.pool, min(get_num_free_blocks(step.pool), 1))
        (held,) = request.holdings
        held = Holding(held.block_table + taken, held.num_cached_blocks)
        step.requests[request.request_id] = replace(request, holdings=(held,))
    return verdict


@PAGE.exhibit("a chunk is admitted although the token budget is used up", "SGLang #30743", "P9")
@instead(process_waiting_phase)
def chunk_beyond_the_budget(right: Right[None], step: Step) -> None:
    """Every admission gets at least one token."""
    step.budget = max(step.budget, 1)
    right()


@PAGE.exhibit(
    "a request between two chunks is running and in the waiting queue as well",
    "review of SGLang #26266",
    "P16 P12 P15",
)
@instead(process_waiting_phase)
def chunked_stays_queued(right: Right[None], step: Step) -> None:
    """The request waits in the queue for its next chunk, although it is in the running list."""
    right()
    for row in step.rows:
        num_left = step.requests[row.request_id].num_known_tokens - row.num_computed
        if row.status is not Status.RUNNING and row.num_scheduled < num_left:
            step.waiting.insert(0, row.request_id)


@PAGE.exhibit(
    "the prefix cache is searched for the first chunk only",
    "Dynamo #13188, #13312",
    "P5",
    invisible="efficiency: blocks are computed again",
)
@instead(find_hit)
def hits_within_a_chunk(right: Right[Hit], config: Config) -> Hit:
    """The prompt is cut to a chunk before the lookup, so no hit is longer than a chunk."""
    (table,) = right().block_tables
    table = table[: compute_max_row(config) // config.block_size]
    return Hit(len(table) * config.block_size, (table,))
