"""Host: where the engine on the host writes an expression otherwise. PYTEST_DONT_REWRITE.

Each law runs a method of the engine and the specification's function on the same symbolic counters
and demands one answer. The engine is looked up by name, as always, and built by its own
constructor; only its columns are lists here, because an array holds no symbolic number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.prove.harness import (
    Tokens,
    build_pool,
    build_request,
    build_runner,
    build_state,
    key_of,
    schedule,
    with_table,
)
from blockstep.conformance.prove.law import Room, instead_in
from blockstep.spec.hashing import get_item_keys
from blockstep.spec.lives.commit import get_rolled_back, publish_verified
from blockstep.spec.lives.drafts import can_take_drafts
from blockstep.spec.lives.endings import compute_stop, is_repeating
from blockstep.spec.memory.slots import (
    compute_max_slots,
    compute_num_blocks,
    compute_num_new_blocks,
    compute_num_publishable_blocks,
    compute_num_slots,
    revoke_slots,
)
from blockstep.spec.pool import allocate_blocks, free_blocks, touch_blocks
from blockstep.spec.requests import Frame, FrameRow, RequestState
from blockstep.spec.state import State
from blockstep.spec.step.queues import select_victim
from blockstep.spec.step.share import compute_num_drafts, compute_share, is_past_max_tokens
from blockstep.spec.strict import STRICT_RULES
from blockstep.spec.vocabulary import (
    MAX_INT,
    Config,
    FinishReason,
    MultiModalItem,
    Plan,
    Policy,
    RepetitionDetection,
    Request,
    SpecMethod,
    Status,
)

ROOM = Room("host")
HOST: Any = load_engine("host")
LINEAGE: Any = load_engine("blockstep.impl.host.lineage:Lineage")
COLUMNS = (
    "num_prompt", "num_known", "num_output_placeholders", "num_computed",
    "num_cached_tokens", "num_preemptions", "max_known", "last_frame", "is_watched",
    "is_prefill_chunk", "grammar_ready",
)  # fmt: skip


def build_empty_host(config: Config) -> Any:
    """The engine, with lists for columns."""
    host = HOST(config)
    for column in COLUMNS:
        setattr(host.table, column, list(getattr(host.table, column)))
    return host


def build_host(config: Config, *requests: RequestState) -> Any:
    """The engine with these requests in its slots 0, 1 and so on; the running ones run."""
    host = build_empty_host(config)
    table = host.table
    for slot, request in enumerate(requests):
        lineage = LINEAGE(request.request, config.block_size, host.digest)
        table.add(request.request, lineage, request.status, config.max_model_len)
        table.num_known[slot] = request.num_known_tokens
        table.num_computed[slot] = request.num_computed_tokens
        table.num_output_placeholders[slot] = request.num_output_placeholders
        table.spec_token_ids[slot] = request.spec_token_ids
        table.is_prefill_chunk[slot] = request.is_prefill_chunk
        (held,) = request.holdings
        table.holdings[slot][0].num_cached = held.num_cached_blocks
        table.last_frame[slot] = host.next_frame_id
        if request.status is Status.RUNNING:
            host.running.append(slot)
            table.holdings[slot][0].blocks.extend(held.block_table)
            host.pool.touch(held.block_table)
        else:
            host.waiting.append(slot)
    return host


def build_config(
    block_size: int = 16,
    max_model_len: int = 8192,
    threshold: int = 0,
    max_frames_in_flight: int = 1,
    num_speculative_tokens: int = 0,
) -> Config:
    """Five usable blocks, no caching."""
    return Config(
        num_blocks=6,
        block_size=block_size,
        max_model_len=max_model_len,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=False,
        max_frames_in_flight=max_frames_in_flight,
        async_scheduling=max_frames_in_flight > 1,
        spec_method=SpecMethod.DRAFT_MODEL if num_speculative_tokens else SpecMethod.NONE,
        num_speculative_tokens=num_speculative_tokens,
    )


# Mistakes.


def plain_decode_is_not_held_to_the_model_length(self: Any, slot: int, budget: int) -> Any:
    """The shortcut for a gap of one, without a look at the room."""
    table = self.table
    computed = table.num_computed[slot]
    gap = table.num_known[slot] + len(table.spec_token_ids[slot]) - computed
    if gap == 1:
        return 1
    return min(gap, self.max_tokens_per_row, budget, self.max_model_len - 1 - computed)


def threshold_is_for_newcomers_only(self: Any, slot: int, budget: int) -> Any:
    """A runner is not held to it."""
    computed = self.table.num_computed[slot]
    gap = self.table.num_known[slot] - computed
    return min(gap, budget, self.max_model_len - 1 - computed)


def exact_multiples_take_a_block_more(self: Any, slot: int, num_scheduled: int) -> Any:
    """The quotient and one more, also where nothing is left over."""
    end = self.table.num_computed[slot] + num_scheduled
    return end // self.block_size + 1 - len(self.table.holdings[slot][0].blocks)


def promised_tokens_are_no_gap(self: Any, slot: int, budget: int) -> Any:
    """What is in flight is not counted as known."""
    table = self.table
    computed = table.num_computed[slot]
    if table.num_output_placeholders[slot] and self._is_past_max_tokens(slot):
        return 0
    gap = table.num_known[slot] + len(table.spec_token_ids[slot]) - computed
    return min(gap, self.max_tokens_per_row, budget, self.max_model_len - 1 - computed)


def one_frame_ahead_is_enough(self: Any, slot: int) -> Any:
    """Known tokens and one more, instead of what computed tokens say."""
    table = self.table
    sure = table.num_known[slot] + table.num_output_placeholders[slot]
    return sure >= table.num_prompt[slot] + table.requests[slot].max_tokens


def lookahead_passes_the_model_length(self: Any, slot: int, num_scheduled: int) -> Any:
    """No cap."""
    end = self.table.num_computed[slot] + num_scheduled + self.num_lookahead_tokens
    missing = -(-end // self.block_size) - len(self.table.holdings[slot][0].blocks)
    return max(missing, 0)


def missing_blocks_may_be_negative(self: Any, slot: int, num_scheduled: int) -> Any:
    """Not cut at zero."""
    end = self.table.num_computed[slot] + num_scheduled + self.num_lookahead_tokens
    extent = -(-min(end, self.max_model_len) // self.block_size)
    return extent - len(self.table.holdings[slot][0].blocks)


def whole_prompt_must_fit_always(self: Any, slot: int, num_hit: int, budget: int) -> Any:
    """As if chunked prefill were off."""
    wanted = min(self.table.num_known[slot] - num_hit, self.max_tokens_per_row)
    return wanted if wanted <= budget else 0


def prompt_is_cut_always(self: Any, slot: int, num_hit: int, budget: int) -> Any:
    """As if chunked prefill were on."""
    return min(self.table.num_known[slot] - num_hit, self.max_tokens_per_row, budget)


def hits_are_taken_off_as_tokens(self: Any, num_tokens: int, num_hits: int) -> Any:
    """One hit counts as one token."""
    total = -(-min(num_tokens - num_hits, self.max_model_len) // self.block_size)
    return max(total, 0)


def newcomer_is_charged_for_its_first_chunk_only(self: Any, num_tokens: int, num_hits: int) -> Any:
    """Whatever its whole prompt takes."""
    chunk = min(num_tokens, self._step_budget())
    return max(-(-chunk // self.block_size) - num_hits, 0)


def last_output_is_computed_too(self: Any, request: Request) -> Any:
    """Prompt and all outputs, although nobody reads on behind the last one."""
    longest = len(request.prompt_token_ids) + request.max_tokens
    if request.max_tokens > 1:
        longest += self.config.num_speculative_tokens
    written = min(longest, self.config.max_model_len - 1)
    extent = min(written + self.config.num_lookahead_tokens, self.config.max_model_len)
    return -(-extent // self.block_size)


def cut_drafts_are_dispatched(self: Any, slot: int, num_scheduled: int) -> Any:
    """All attached drafts go along, whatever the budget left of them."""
    spec = self.table.spec_token_ids[slot]
    self.table.spec_token_ids[slot] = ()
    return spec


def own_token_counts_as_accepted(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
    """One token too few is taken back."""
    self.table.num_computed[slot] -= len(drafts) - len(tokens)


def min_tokens_hold_off_the_length(self: Any, slot: int, token: int) -> Any:
    """Below min_tokens nothing ends a request."""
    if not self._has_min_tokens(slot):
        return (None, None)
    is_long = self.table.num_known[slot] >= self.table.max_known[slot]
    return (FinishReason.LENGTH, None) if is_long else (None, None)


def stop_tokens_come_before_the_end_of_sequence(self: Any, slot: int, token: int) -> Any:
    """A token that is both is told as a stop token."""
    request = self.table.requests[slot]
    if self._has_min_tokens(slot):
        if token in request.stop_token_ids:
            return (FinishReason.STOP, token)
        if token == request.eos_token_id:
            return (FinishReason.STOP, None)
    is_long = self.table.num_known[slot] >= self.table.max_known[slot]
    return (FinishReason.LENGTH, None) if is_long else (None, None)


def drafts_are_taken_in_mid_prefill(self: Any, slot: int) -> Any:
    """Whoever runs takes drafts."""
    return bool(self.table.num_computed[slot] <= self.table.num_known[slot] - 1)


def drafts_are_published(self: Any, slot: int, num_computed: int, num_scheduled: int) -> None:
    """Whatever is scheduled counts, although drafts in it may be rejected."""
    full = (num_computed + num_scheduled) // self.block_size
    for holding in self.table.holdings[slot]:
        holding.num_cached = max(full, holding.num_cached)


def last_token_counts_as_computed(self: Any, slot: int) -> None:
    """A block is published that nobody has written to its end."""
    self._publish(slot, self.table.num_known[slot], 0)


def partly_computed_block_stays_published(self: Any, slot: int) -> None:
    """Rounded up: a block that the victim had begun keeps its key."""
    first = -(-self.table.num_computed[slot] // self.block_size)
    for holding in self.table.holdings[slot]:
        for block in holding.blocks[first:]:
            self.prefix.withdraw(block)


def ring_is_not_closed_behind_the_taken(self: Any, count: int) -> Any:
    """The head stays where it was: the next one takes the same blocks."""
    taken = self.free_queue()[:count]
    for block in taken:
        self.ref_counts[block] = 1
    self.num_free -= count
    return taken


def touched_block_stays_in_the_ring(self: Any, blocks: Any) -> None:
    """It can be taken by somebody else while it is held."""
    for block in blocks:
        self.ref_counts[block] += 1


def table_is_freed_from_its_head(self: Any, table: Any) -> None:
    """Its tail is evicted last."""
    for block in table:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._append(block)


def first_of_equals_goes(self: Any) -> Any:
    """The id is left out."""
    if self.config.policy is Policy.FCFS:
        return len(self.running) - 1
    rank_of, running = self.table.rank_of, self.running
    return max(range(len(running)), key=lambda position: rank_of(running[position])[:2])


def item_that_ends_at_the_block_is_named(self: Any, index: int) -> Any:
    """An item that ends just where the block begins counts as overlapping."""
    start = index * self._block_size
    return tuple(
        (item.identifier, item.offset - start)
        for item in self.request.items
        if item.offset < start + self._block_size and start <= item.offset + item.length
    )


def only_the_last_token_is_compared(self: Any, slot: int) -> Any:
    """The shortcut without what it is a shortcut for."""
    detection = self.table.requests[slot].repetition_detection
    tokens, num_outputs = self.table.lineages[slot].tokens, self.table.num_outputs(slot)
    longest = min(detection.max_pattern_size, num_outputs // detection.min_count)
    sizes = range(detection.min_pattern_size, longest + 1)
    return any(tokens[-1] == tokens[-1 - size] for size in sizes)


def victim_before_the_asker_does_not_shift_it(
    self: Any, slot: int, needed: int, position: int, step: Any
) -> Any:
    """The list gets shorter in front of it, and the one behind it is passed over."""
    while needed > self.pool.num_free:
        victim = self.running.pop(self._select_victim())
        self._preempt(victim)
        step.preempted_req_ids.append(self.table.requests[victim].request_id)
        if victim == slot:
            return -1
    return position


# Amounts.


@ROOM.law(
    "P9",
    "P15",
    witness=(20, 4, 2, 8, 6, 100),
    twins=(instead_in(HOST, "_tokens_to_run", plain_decode_is_not_held_to_the_model_length),),
)
def check_host_counts_the_tokens_of_a_runner_as_the_specification_does(
    num_known: int,
    num_computed: int,
    num_drafts: int,
    threshold: int,
    budget: int,
    max_model_len: int,
) -> bool:
    """A plain decode takes a shortcut, and a threshold of zero is the model length."""
    assert 1 <= num_known < max_model_len <= MAX_INT and 0 <= num_computed and 0 <= num_drafts
    assert 0 <= threshold <= MAX_INT and 1 <= budget
    config = build_config(max_model_len=max_model_len, threshold=threshold)
    request = replace(build_runner("a", num_known, num_computed), spec_token_ids=Tokens(num_drafts))
    host = build_host(config, request)
    due = compute_share(num_known + num_drafts, num_computed, threshold, budget, max_model_len - 1)
    assert max(host._tokens_to_run(0, budget), 0) == max(due, 0)
    return True


@ROOM.law(
    "P12",
    "P15",
    witness=(5, 2, 2, 8, 4),
    twins=(
        instead_in(HOST, "_tokens_to_run", promised_tokens_are_no_gap),
        instead_in(HOST, "_is_past_max_tokens", one_frame_ahead_is_enough),
    ),
)
def check_host_counts_promised_tokens_as_the_specification_does(
    num_prompt: int, num_outputs: int, num_placeholders: int, max_tokens: int, budget: int
) -> bool:
    """With frames in flight, by the law that computed tokens are one behind what is promised."""
    assert 1 <= num_prompt and 0 <= num_outputs < max_tokens and 0 <= num_placeholders
    assert num_prompt + max_tokens + num_placeholders < 8000 and 1 <= budget
    num_known = num_prompt + num_outputs
    num_computed = num_known + num_placeholders - 1
    request = replace(
        build_request("a", num_prompt, num_outputs, max_tokens),
        status=Status.RUNNING,
        num_computed_tokens=num_computed,
        num_output_placeholders=num_placeholders,
        spec_token_ids=(-1, -1),
    )
    host = build_host(build_config(max_frames_in_flight=3), request)
    num_with_spec = num_known + num_placeholders + 2
    is_past = is_past_max_tokens(num_computed, num_placeholders, num_prompt, max_tokens)
    due = compute_share(num_with_spec, num_computed, 0, budget, 8191)
    assert host._tokens_to_run(0, budget) == (0 if is_past else due)
    return True


@ROOM.law(
    "P8",
    "P9",
    witness=(20, 15, 16, 100),
    twins=(
        instead_in(HOST, "_blocks_needed", lookahead_passes_the_model_length),
        instead_in(HOST, "_blocks_needed", missing_blocks_may_be_negative),
    ),
)
def check_host_needs_as_many_blocks_for_a_runner(
    num_computed: int, num_new: int, block_size: int, max_model_len: int
) -> bool:
    """Two held blocks and two slots of lookahead."""
    assert 1 <= block_size <= MAX_INT and 2 <= max_model_len <= MAX_INT
    assert 0 <= num_computed and 1 <= num_new and num_computed + num_new < max_model_len
    config = build_config(block_size, max_model_len, num_speculative_tokens=2)
    host = build_host(config, build_runner("a", 1, num_computed, (1, 2)))
    num_slots = compute_num_slots(num_computed, num_new, 2, max_model_len)
    needed = host._blocks_needed(0, num_new)
    assert needed == compute_num_new_blocks(num_slots, block_size, 2)
    return True


@ROOM.law(
    "P8",
    witness=(40, 1, 16, 100),
    twins=(instead_in(HOST, "_blocks_to_admit", hits_are_taken_off_as_tokens),),
)
def check_host_needs_as_many_blocks_for_a_newcomer(
    num_tokens: int, num_hits: int, block_size: int, max_model_len: int
) -> bool:
    """Beside the hits, without lookahead."""
    assert 1 <= block_size <= MAX_INT and 2 <= max_model_len <= MAX_INT
    assert 1 <= num_tokens and 0 <= num_hits
    host = build_host(build_config(block_size, max_model_len))
    num_slots = compute_num_slots(0, num_tokens, 0, max_model_len)
    needed = host._blocks_to_admit(num_tokens, num_hits)
    assert needed == compute_num_new_blocks(num_slots, block_size, num_hits)
    return True


@ROOM.law(
    "P9",
    "P15",
    witness=(40, 16, 8, 20, 1),
    twins=(
        instead_in(HOST, "_tokens_to_admit", whole_prompt_must_fit_always),
        instead_in(HOST, "_tokens_to_admit", prompt_is_cut_always),
    ),
)
def check_host_admits_as_many_tokens(
    num_known: int, num_hit: int, threshold: int, budget: int, is_chunked: bool
) -> bool:
    """What the hit leaves, under threshold and budget; whole or not at all without chunking."""
    assert 0 <= num_hit < num_known < 8192 and 0 <= threshold <= MAX_INT and 1 <= budget
    config = replace(
        build_config(threshold=threshold),
        enable_chunked_prefill=bool(is_chunked),
        max_num_batched_tokens=8192,
    )
    host = build_host(config, build_request("a", num_known))
    due = compute_share(num_known, num_hit, threshold, budget, num_known, not is_chunked)
    assert host._tokens_to_admit(0, num_hit, budget) == due
    return True


@ROOM.law(
    "P11",
    witness=(10, 20, 100, 16),
    twins=(instead_in(HOST, "_most_blocks", last_output_is_computed_too),),
)
def check_host_refuses_the_same_requests_for_their_size(
    num_prompt: int, max_tokens: int, max_model_len: int, block_size: int
) -> bool:
    """Three drafts, with lookahead."""
    assert 1 <= num_prompt < max_model_len <= MAX_INT and 1 <= max_tokens
    assert 1 <= block_size <= MAX_INT
    host = build_host(build_config(block_size, max_model_len, num_speculative_tokens=3))
    most = host._most_blocks(Request("a", Tokens(num_prompt), max_tokens=max_tokens))
    num_slots = compute_max_slots(num_prompt, max_tokens, 3, 3, max_model_len)
    assert most == compute_num_blocks(num_slots, block_size)
    return True


# Drafts.


@ROOM.law(
    "P12",
    "P24",
    witness=(20, 19, 3),
    twins=(instead_in(HOST, "_take_drafts", cut_drafts_are_dispatched),),
)
def check_host_dispatches_as_many_drafts(
    num_known: int, num_computed: int, num_scheduled: int
) -> bool:
    """Of three that are attached."""
    assert 0 <= num_computed < num_known < 8192 and 1 <= num_scheduled
    assert num_computed + num_scheduled <= num_known + 3
    request = replace(build_runner("a", num_known, num_computed), spec_token_ids=(5, 6, 7))
    host = build_host(build_config(num_speculative_tokens=3), request)
    drafts = host._take_drafts(0, num_scheduled)
    assert drafts == (5, 6, 7)[: compute_num_drafts(num_computed, num_scheduled, num_known)]
    assert host.table.spec_token_ids[0] == ()
    return True


@ROOM.law(
    "P14",
    witness=(20, 3, 1, 1),
    twins=(instead_in(HOST, "_roll_back", own_token_counts_as_accepted),),
)
def check_host_takes_back_as_much(
    num_known: int, num_drafts: int, num_accepted: int, is_running: bool
) -> bool:
    """From a request that runs; a preempted one has nothing computed."""
    assert 1 <= num_known < 8000 and 0 <= num_accepted <= num_drafts <= 3
    request = build_runner("a", num_known, num_known + num_drafts)
    if not is_running:
        request = replace(request, status=Status.WAITING, num_computed_tokens=0)
    host = build_host(build_config(num_speculative_tokens=3), request)
    host._roll_back(0, (5, 6, 7)[:num_drafts], (5, 6, 7, 8)[: num_accepted + 1])
    due = get_rolled_back(request, num_drafts, num_accepted + 1)
    assert host.table.num_computed[0] == due.num_computed_tokens
    return True


@ROOM.law(
    "P24",
    witness=(20, 19, 0, 0),
    twins=(instead_in(HOST, "_may_draft", drafts_are_taken_in_mid_prefill),),
)
def check_host_takes_drafts_without_a_look_at_the_frames(
    num_known: int, num_computed: int, is_in_flight: bool, is_prefill_chunk: bool
) -> bool:
    """A row in flight leaves a prefill chunk or no known token uncomputed: that is enough."""
    assert 1 <= num_known < 8000 and 0 <= num_computed <= num_known
    assert not is_in_flight or is_prefill_chunk == (num_computed < num_known)
    request = replace(
        build_runner("a", num_known, num_computed), is_prefill_chunk=bool(is_prefill_chunk)
    )
    config = build_config(num_speculative_tokens=1)
    state = build_state(config, (request,))
    if is_in_flight:
        state = replace(state, frames=(Frame(0, (FrameRow("a", (), not is_prefill_chunk),)),))
    host = build_host(config, request)
    assert bool(host._may_draft(0)) == can_take_drafts(state, request)
    return True


# Ends of requests.


@ROOM.law(
    "P13",
    witness=(5, 3, 3, 5, 100),
    twins=(instead_in(HOST, "_stop_verdict", min_tokens_hold_off_the_length),),
)
def check_host_ends_a_request_for_its_length_at_the_same_token(
    num_prompt: int, num_outputs: int, max_tokens: int, min_tokens: int, max_model_len: int
) -> bool:
    """One bound, computed when it was submitted, in the place of two."""
    assert 1 <= num_prompt < max_model_len <= 8192 and 1 <= num_outputs <= max_tokens <= 8192
    assert 0 <= min_tokens and num_prompt + num_outputs <= max_model_len
    request = build_request("a", num_prompt, num_outputs, max_tokens)
    request = replace(request, request=replace(request.request, min_tokens=min_tokens))
    host = build_empty_host(build_config(block_size=8192, max_model_len=max_model_len))
    host._submit(request.request)
    host.table.num_known[0] = num_prompt + num_outputs
    due = compute_stop(request, request.output_token_ids, request.num_known_tokens, max_model_len)
    assert host._stop_verdict(0, 1) == due
    return True


@ROOM.law(
    "P13",
    witness=(7, 7, 9, 3, 2, 5),
    twins=(instead_in(HOST, "_stop_verdict", stop_tokens_come_before_the_end_of_sequence),),
)
def check_host_ends_a_request_for_its_text_at_the_same_token(
    last: int, eos: int, stop: int, num_outputs: int, min_tokens: int, max_tokens: int
) -> bool:
    """Looked for only in requests that name such tokens, which is settled when they come."""
    assert 0 <= last and 0 <= eos and 0 <= stop and 0 <= min_tokens
    assert 1 <= num_outputs <= max_tokens < 8000
    request = build_request("a", 1, max_tokens=max_tokens)
    asked = replace(
        request.request, eos_token_id=eos, stop_token_ids=(stop,), min_tokens=min_tokens
    )
    request = replace(request, request=asked, output_token_ids=Tokens(num_outputs, last))
    host = build_empty_host(build_config(block_size=8192))
    host._submit(asked)
    host.table.num_known[0] = 1 + num_outputs
    due = compute_stop(request, request.output_token_ids, 1 + num_outputs, 8192)
    assert host._stop_verdict(0, last) == due
    return True


@ROOM.law(
    "P13",
    witness=(1, 2, 1, 2, 2),
    twins=(instead_in(HOST, "_repeats", only_the_last_token_is_compared),),
)
def check_host_sees_the_same_repetitions(
    first: int, second: int, third: int, fourth: int, max_size: int
) -> bool:
    """Four outputs, patterns of one or two tokens, twice. A shortcut precedes the comparison."""
    assert 0 <= first and 0 <= second and 0 <= third and 0 <= fourth and 1 <= max_size <= 3
    detection = RepetitionDetection(max_size)
    request = build_request("a", 1)
    request = replace(request, request=replace(request.request, repetition_detection=detection))
    host = build_host(build_config(), request)
    host.table.lineages[0].tokens = [1, first, second, third, fourth]
    host.table.num_known[0] = 5
    due = is_repeating((first, second, third, fourth), detection)
    assert host._repeats(0) == due
    return True


# Blocks.


class Published:
    """In the place of the prefix map: notes which blocks are published."""

    def __init__(self, *blocks: int) -> None:
        self.blocks = list(blocks)

    def publish(self, block: int, _lineage: object, _index: int) -> None:
        """Note it."""
        self.blocks.append(block)

    def withdraw(self, block: int) -> None:
        """Note that it is not any more."""
        self.blocks = [other for other in self.blocks if other != block]


@ROOM.law(
    "P3",
    "P4",
    witness=(16, 20, 33, 1, 16),
    twins=(instead_in(HOST, "_publish", drafts_are_published),),
)
def check_host_publishes_the_same_blocks(
    num_computed: int, num_scheduled: int, num_known: int, num_settled: int, block_size: int
) -> bool:
    """Those of the table that are full now and not settled yet."""
    assert 1 <= block_size <= MAX_INT and 0 <= num_computed and 1 <= num_scheduled
    assert 1 <= num_known <= 3 * block_size and num_known < 8192 and 0 <= num_settled <= 3
    request = with_table(build_runner("a", num_known, num_computed), (1, 2, 3), num_settled)
    host = build_host(replace(build_config(block_size), enable_prefix_caching=True), request)
    host.prefix = Published()
    host._publish(0, num_computed, num_scheduled)
    full = compute_num_publishable_blocks(num_computed, num_scheduled, num_known, block_size)
    assert tuple(host.prefix.blocks) == (1, 2, 3)[num_settled:full]
    assert host.table.holdings[0][0].num_cached == max(num_settled, full)
    return True


@ROOM.law(
    "P3",
    "P4",
    witness=(40, 1, 16),
    twins=(instead_in(HOST, "_publish_verified", last_token_counts_as_computed),),
)
def check_host_publishes_the_same_blocks_of_what_a_commit_verified(
    num_known: int, num_settled: int, block_size: int
) -> bool:
    """With frames in flight: full blocks before the last known token."""
    assert 1 <= block_size <= MAX_INT and 1 <= num_known <= 3 * block_size and num_known < 8192
    assert 0 <= num_settled <= 3
    config = replace(
        build_config(block_size, max_frames_in_flight=2),
        enable_prefix_caching=True,
    )
    request = replace(
        with_table(build_runner("a", num_known, num_known), (1, 2, 3), num_settled),
        block_keys=tuple(map(key_of, (1, 2, 3))),
    )
    pool = build_pool((0, 1, 1, 1, 0, 0), (4, 5), published=(1, 2, 3)[:num_settled])
    after, due = publish_verified(build_state(config, (request,)), pool, request)
    host = build_host(config, request)
    host.prefix = Published(*(1, 2, 3)[:num_settled])
    host._publish_verified(0)
    assert host.prefix.blocks == [b for b in (1, 2, 3) if after.block_keys[b] is not None]
    assert host.table.holdings[0][0].num_cached == due.holdings[0].num_cached_blocks
    return True


@ROOM.law(
    "P4",
    witness=(20, 2, 16),
    twins=(instead_in(HOST, "_withdraw_unwritten", partly_computed_block_stays_published),),
)
def check_host_withdraws_the_same_keys_from_a_victim(
    num_computed: int, num_settled: int, block_size: int
) -> bool:
    """Asked of every block that was not full before, also where there is no key to withdraw."""
    assert 1 <= block_size <= MAX_INT and 0 <= num_computed <= 3 * block_size
    assert num_computed < 8192 and 0 <= num_settled <= 3
    request = with_table(build_runner("a", 1, num_computed), (1, 2, 3), num_settled)
    pool = build_pool((0, 1, 1, 1, 0, 0), (4, 5), published=(1, 2, 3)[:num_settled])
    after = revoke_slots(pool, request, block_size, STRICT_RULES)
    host = build_host(build_config(block_size), request)
    host.prefix = Published(*(1, 2, 3)[:num_settled])
    host._withdraw_unwritten(0)
    assert host.prefix.blocks == [b for b in (1, 2, 3) if after.block_keys[b] is not None]
    return True


@ROOM.law(
    "P1",
    "P16",
    witness=(1, 2, 1, 2),
    twins=(
        instead_in(HOST.pool_type, "take", ring_is_not_closed_behind_the_taken),
        instead_in(HOST.pool_type, "touch", touched_block_stays_in_the_ring),
        instead_in(HOST.pool_type, "free", table_is_freed_from_its_head),
    ),
)
def check_ring_of_the_host_is_the_free_queue(
    first: int, second: int, third: int, num_taken: int
) -> bool:
    """A table freed, a block touched in the middle, some taken: one order, one count."""
    assert 1 <= first and 1 <= second and 1 <= third and 0 <= num_taken <= 2
    host = build_host(build_config())
    host.pool.touch((1, 2, 3))
    host.pool.ref_counts = [0, first, second, third, 0, 0]
    pool = build_pool((0, first, second, third, 0, 0), (4, 5), published=())
    host.pool.free((1, 2, 3))
    pool = free_blocks(pool, (1, 2, 3))
    host.pool.touch((5, 2))
    pool = touch_blocks(pool, (5, 2))
    num_taken = min(num_taken, len(pool.free_queue))
    taken = host.pool.take(num_taken)
    pool, due = allocate_blocks(pool, num_taken)
    assert tuple(taken) == due
    assert tuple(host.pool.free_queue()) == pool.free_queue
    assert host.pool.num_free == len(pool.free_queue)
    assert tuple(host.pool.ref_counts) == pool.ref_counts
    return True


@ROOM.law(
    "P10",
    "P16",
    witness=(1, 5, 1, 5),
    twins=(instead_in(HOST, "_select_victim", first_of_equals_goes),),
)
def check_host_preempts_the_same_request(
    priority_a: int, arrival_a: int, priority_b: int, arrival_b: int
) -> bool:
    """Ties included."""
    assert 0 <= arrival_a and 0 <= arrival_b
    first, second = build_runner("a", 1, 0, (1,)), build_runner("b", 1, 0, (2,))
    requests = (
        replace(first, request=replace(first.request, priority=priority_a, arrival_time=arrival_a)),
        replace(
            second, request=replace(second.request, priority=priority_b, arrival_time=arrival_b)
        ),
    )
    host = build_host(replace(build_config(), policy=Policy.PRIORITY), *requests)
    by_id = {request.request_id: request for request in requests}
    due = select_victim(Policy.PRIORITY, ["a", "b"], by_id)
    assert host._select_victim() == due
    return True


@ROOM.law(
    "P6",
    witness=(3, 4, 9, 2, 1, 4),
    twins=(instead_in(LINEAGE, "items_of", item_that_ends_at_the_block_is_named),),
)
def check_host_names_the_same_items_of_a_block(
    offset: int, length: int, next_offset: int, next_length: int, index: int, block_size: int
) -> bool:
    """Found by bisection instead of one by one."""
    assert 0 <= offset and 1 <= length and offset + length <= next_offset and 1 <= next_length
    assert 0 <= index <= 3 and 1 <= block_size <= MAX_INT
    items = (MultiModalItem("x", offset, length), MultiModalItem("y", next_offset, next_length))
    request = build_request("a", 1)
    request = replace(request, request=replace(request.request, items=items))
    host = build_host(build_config(block_size), request)
    start = index * block_size
    due = get_item_keys(request.request, start, start + block_size)
    assert host.table.lineages[0].items_of(index) == due
    return True


# Whole plans. a holds 1 and 2, b holds 3; 4 and 5 are free.


def schedule_both(
    config: Config, runners: tuple[RequestState, ...], waiting: tuple[RequestState, ...] = ()
) -> tuple[State, Plan, Any, Plan]:
    """The same step by the specification and by the host: state and plan of each."""
    host = build_host(config, *runners, *waiting)
    host.prev_frame_id = host.next_frame_id = 5
    state = replace(build_state(config, runners, waiting), next_frame_id=5)
    after, due = schedule(state)
    return after, due, host, host._schedule()


@ROOM.law(
    "P9",
    "P15",
    "P26",
    witness=(50, 20, 30, 8, 16),
    twins=(
        instead_in(HOST, "_tokens_to_run", threshold_is_for_newcomers_only),
        instead_in(HOST, "_blocks_needed", exact_multiples_take_a_block_more),
    ),
    is_slow=True,
)
def check_host_plans_one_runner_as_the_specification_does(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> bool:
    """The whole plan, the counters and the free queue after it; preemption of itself included."""
    assert 1 <= block_size <= MAX_INT and 1 <= budget <= MAX_INT and 0 <= threshold <= MAX_INT
    assert block_size < num_computed <= 2 * block_size and num_computed < num_known < 8192
    config = replace(build_config(block_size, threshold=threshold), max_num_batched_tokens=budget)
    runner = build_runner("a", num_known, num_computed, (1, 2))
    after, due, host, plan = schedule_both(config, (runner,))
    assert plan == due
    assert host.table.num_computed[0] == after.requests["a"].num_computed_tokens
    assert bool(host.table.is_prefill_chunk[0]) == after.requests["a"].is_prefill_chunk
    assert tuple(host.pool.free_queue()) == after.pool.free_queue
    return True


@ROOM.law(
    "P7",
    "P8",
    "P15",
    "P26",
    witness=(50, 60, 30, 16),
    twins=(
        instead_in(HOST, "_tokens_to_admit", whole_prompt_must_fit_always),
        instead_in(HOST, "_blocks_to_admit", newcomer_is_charged_for_its_first_chunk_only),
    ),
    is_slow=True,
)
def check_host_admits_two_newcomers_as_the_specification_does(
    known_a: int, known_b: int, budget: int, block_size: int
) -> bool:
    """The whole plan, the places and the free queue after it, refusals included."""
    assert 1 <= block_size <= MAX_INT and 1 <= budget <= MAX_INT
    assert 1 <= known_a < 8192 and 1 <= known_b < 8192
    config = replace(build_config(block_size), max_num_batched_tokens=budget)
    waiting = (build_request("a", known_a), build_request("b", known_b))
    after, due, host, plan = schedule_both(config, (), waiting)
    assert plan == due
    assert len(host.running) == len(after.running)
    assert len(host.waiting) == len(after.waiting)
    assert tuple(host.pool.free_queue()) == after.pool.free_queue
    return True


@ROOM.law(
    "P9",
    "P15",
    "P16",
    "P26",
    witness=(60, 20, 30, 20, 16),
    twins=(
        instead_in(HOST, "_make_room", victim_before_the_asker_does_not_shift_it),
        instead_in(HOST, "_select_victim", first_of_equals_goes),
    ),
    is_slow=True,
)
def check_host_plans_two_runners_as_the_specification_does(
    known_a: int, known_b: int, computed_a: int, budget: int, priority_a: int
) -> bool:
    """By priority, with preemption, in blocks of 16: one plan, one order, one free queue."""
    assert 0 <= computed_a <= 32 and computed_a < known_a < 8192 and 1 <= known_b < 8192
    assert 1 <= budget <= MAX_INT
    config = replace(build_config(), max_num_batched_tokens=budget, policy=Policy.PRIORITY)
    first, second = (
        build_runner("a", known_a, computed_a, (1, 2)),
        build_runner("b", known_b, 0, (3,)),
    )
    first = replace(first, request=replace(first.request, priority=priority_a))
    after, due, host, plan = schedule_both(config, (first, second))
    assert plan == due
    names = [host.table.requests[slot].request_id for slot in host.running]
    assert tuple(names) == after.running
    assert tuple(host.table.num_computed[:2]) == tuple(
        after.requests[name].num_computed_tokens for name in "ab"
    )
    assert tuple(host.pool.free_queue()) == after.pool.free_queue
    return True
