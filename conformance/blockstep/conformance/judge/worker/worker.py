"""Worker: runs plans on tagged KV and finds what is wrong with them (architecture D6).

    plan -> drop ended requests -> update views -> write every row -> read every row -> sample

It decides by itself what each request holds, which rows sample and which drafts are right. A plan
runs when it is dispatched. Its model output may be committed much later; by then the worker is
ahead of the scheduler by the tokens that frames in flight have sampled, and by the drafts they
rejected.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Self, TypeAlias

from blockstep.conformance.engine import EngineTraits, PartOfState
from blockstep.conformance.judge.attention_ranges import is_across, without_given_back
from blockstep.conformance.judge.worker.drafter import Drafter
from blockstep.conformance.judge.worker.request_view import FrameRow, RequestView, is_outdated
from blockstep.conformance.judge.worker.sampling import NextToken
from blockstep.conformance.judge.worker.store_transfers import Stored
from blockstep.conformance.protocol.findings import Difference, Finding, shown
from blockstep.spec import vocabulary as v

Tables: TypeAlias = list[list[v.BlockId]]
"""Per KV group, positions in order."""
RUNNING, PREEMPTED = v.Status.RUNNING, v.Status.PREEMPTED
_VIEWED = ("output_token_ids", "num_output_placeholders", "block_tables", "num_computed_tokens")
_get_viewed = attrgetter(*_VIEWED)


class Worker(Drafter, Stored):
    """A model worker, for one run."""

    drops_tokens_in_flight = False
    """Whether its engine drops what frames in flight sample for a request that it preempts
    (`EngineTraits`)."""
    keeps_requests = True
    """Whether it keeps a request until a plan names it as finished."""

    def __init__(self, config: v.Config, next_token: NextToken) -> None:
        super().__init__(config, next_token)
        self.last_plan: v.Plan | None = None
        self.acceptance: tuple[int, ...] = (0,)
        """Numbers of right drafts, used in turns, where the worker keeps its drafts to itself."""
        self._least = [
            1 if group.kind is v.GroupKind.FULL or is_across(group) else v.NULL_BLOCK
            for group in self.groups
        ]
        """Per group: 1, or the null block where a table may have it, which is where some blocks are
        skipped."""
        self._num_proposals = 0
        self._remapped: tuple[v.RequestId, ...] = ()
        """Remapped requests of the plan that runs."""
        self._last_scheduled: set[v.RequestId] = set()
        self.num_run_again = 0
        """Number of requests resumed before a position whose token had been dropped."""
        self._gets_commits = False
        """Whether it gets commits, and so resets; otherwise it cannot know of forced resets."""

    def fork(self) -> Self:
        """Return a worker with the same memory, which can be given another answer than this one.

        Both share what is never changed in place, and the names, which only grow.
        """
        shared = (self.config, self.names, self.next_token, self.last_plan)
        memo: dict[int, Any] = {id(one): one for one in shared}
        memo[id(self._checked)] = list(self._checked)  # keys are long chains, compared by identity
        return copy.deepcopy(self, memo)

    def observe(self, event: v.Event, observation: v.Observation) -> list[Finding]:
        """Take one event of the engine under test with its answer; return the findings."""
        if self.config.kv_connector:
            self.follow_store(event, observation)
        match event, observation:
            case _, v.Plan() as plan:
                return self.execute(plan)
            case v.Commit() as commit, v.Outputs(rows=rows):
                self.commit(commit)
                self.note_ends([it.request_id for it in rows if it.finish_reason is not None])
            case v.Abort(), v.Aborted(request_ids=request_ids):
                self.note_ends(request_ids)
            case v.Reset(reset_running_requests=forced), v.ResetDone(success=True):
                self.reset(forced)
            case v.EncoderReset(), v.Ack():
                self.forget_items()
            case v.GrammarBitmask() as asked, v.GrammarOutput() as mask:
                return self.check_mask(asked, mask)
            case v.GrammarFailed(request_id=request_id), v.Outputs():
                self.note_ends((request_id,))
        return []

    # Plans.

    def execute(self, plan: v.Plan) -> list[Finding]:
        """Run a plan and return what is wrong with it. Call it when the plan is dispatched."""
        if plan is self.last_plan:
            return []
        self._findings = []
        self.last_plan, self.frame_id, self._remapped = plan, plan.frame_id, plan.remapped_req_ids
        config = self.config
        while len(self._frames) >= config.max_frames_in_flight:
            # The limit of frames in flight implies the oldest one's commit, even if none was shown.
            frame_id = next(iter(self._frames))
            self._settle(frame_id, self.answer(frame_id))
        if plan.kv_saves:
            self.save(plan)
        if plan.finished_req_ids:
            self._drop_ended(plan.finished_req_ids)
        for request_id in plan.preempted_req_ids:
            self._preempt(request_id)
        rows = [self._start_new(row) for row in plan.new]
        for cached in plan.cached:
            started = self._start_cached(cached)
            if started is not None:
                rows.append(started)
        if plan.remapped_req_ids:
            self._check_remapped(plan)
        if config.encoder_cache_size:
            self.encode(plan, rows)
        if plan.block_copies:
            self.copy(plan.block_copies)
            self.copy_drafts(plan.block_copies)
        if plan.new_block_ids_to_zero:
            self.zero(plan.new_block_ids_to_zero)
        self._last_scheduled = {row.request_id for row in plan.rows}
        if config.kv_connector:
            self.load(plan, rows)
            self.load_drafts(plan.kv_loads)
        if rows:
            self._write(rows)
        for row in rows:
            self._read(row)
        self.run_drafter(rows, plan)
        if rows and any(plan.num_common_prefix_blocks):
            # After the defects of rows themselves, which may make a hint wrong, too.
            self._check_common(plan.num_common_prefix_blocks, rows)
        if config.async_scheduling:
            for view in self.views.values():
                view.proposal = ()
        for row in rows:
            self._finish(row)
        if plan.new or plan.cached:
            self._frames[plan.frame_id] = rows
        return self._findings

    def _drop_ended(self, names: Sequence[v.RequestId]) -> None:
        """Forget requests that a plan says have ended; an abort may have taken effect with it."""
        self.note_ends(names)
        for request_id in names:
            gone = self.views.pop(request_id, None)
            if gone is not None:
                self.give_back(request_id, gone.tables, "ended")

    def _finish(self, row: FrameRow) -> None:
        """Sample the next tokens of a row and propose drafts."""
        view = row.view
        self._promise(row)
        self._deliver(row, self._sample(row) if row.samples else ())
        if row.samples:
            self.propose_in_slots(row)
        if self.recurrent:
            self.keep_states(row)
        if row.samples and self.config.async_scheduling:
            count, right = self.config.num_speculative_tokens, self.acceptance
            num_right = right[self._num_proposals % len(right)]
            self._num_proposals += 1
            view.proposal = self._guess(view, count, num_right)

    def _promise(self, row: FrameRow) -> None:
        """Count the tokens that a row computes, and those that it may bring."""
        row.view.num_computed = row.end
        row.view.num_promised += row.num_promised

    def _deliver(self, row: FrameRow, sampled: v.TokenIds) -> None:
        """Append the sampled tokens; rejected drafts count as never computed."""
        view, row.sampled = row.view, sampled
        view.cut_names(row.num_known)
        view.tokens.extend(sampled)
        num_rejected = row.num_rejected
        view.num_computed -= num_rejected
        view.num_unreported += len(sampled)
        view.num_rejected += num_rejected

    def _preempt(self, request_id: v.RequestId) -> None:
        view = self.views.get(request_id)
        if view is None:
            what = f"{request_id!r} is not known here"
            self._complain("P26", "preempted_request_was_known", what, subjects=request_id)
            return
        self.give_back(request_id, view.tables, "was preempted")
        view.is_preempted = True
        view.tables = [[] for _ in view.tables]
        view.num_computed = 0
        self._drop_tokens(view)

    def _drop_tokens(self, view: RequestView) -> None:
        """Forget what frames in flight sample for a preempted request, if its engine drops these
        tokens."""
        if not self.drops_tokens_in_flight or not view.num_promised:
            return
        if view.request.request_id in self._ended:
            return
        rows = [row for frame in self._frames.values() for row in frame if row.view is view]
        first = next(row for row in rows if row.samples and not row.is_void)
        self.forsake(view, first, view.num_computed).num_dropped = view.num_unreported

    def _check_common(self, nums_common: tuple[int, ...], rows: Sequence[FrameRow]) -> None:
        """Check that the common prefix blocks are the first blocks of every row."""
        tables = [row.view.tables for row in rows]
        for at, (group, count) in enumerate(zip(self.groups, nums_common, strict=False)):
            shared = tables[0][at][:count]
            is_right = group.kind is v.GroupKind.FULL and len(shared) == count
            if count and not (is_right and all(of[at][:count] == shared for of in tables)):
                what = f"{count} blocks of group {at}, which not all rows attend to"
                self._complain("P26", "common_prefix_is_of_every_row", what)

    def _check_remapped(self, plan: v.Plan) -> None:
        """Check that a remapped request has a row, which is where its new table is."""
        continued = {row.request_id for row in plan.cached if not row.resumed}
        for request_id in plan.remapped_req_ids:
            if request_id not in continued:
                what = f"{request_id!r} has no row that tells its new block table"
                self._complain("P26", "remapped_request_has_a_row", what, subjects=request_id)

    def _start_new(self, row: v.NewRow) -> FrameRow:
        known = self.views.get(row.request_id)
        if known is not None and known.request.resumable and row.request.resumable:
            # A session that has continued: it gave back the blocks that it no longer holds.
            kept = set(chain(*row.block_ids))
            gone = [[block for block in table if block not in kept] for table in known.tables]
            self.give_back(row.request_id, gone, "was reclaimed, or continued")
        elif known is not None:
            self._complain(
                "P26",
                "new_row_is_new",
                f"{row.request_id!r} is known already",
                subjects=row.request_id,
            )
        self.views[row.request_id] = view = self.make_view(row.request)
        view.tokens += row.output_token_ids
        view.tables = self._blocks(row.request_id, row.block_ids)
        view.num_computed = row.num_computed_tokens
        return self._start(row.request_id, view, row.num_scheduled_tokens, self._fill_in(row, view))

    def _start_cached(self, row: v.CachedRow) -> FrameRow | None:
        view = self.views.get(row.request_id)
        if view is None:
            self._complain(
                "P26",
                "cached_row_is_known",
                f"{row.request_id!r} is not known here",
                subjects=row.request_id,
            )
            return None
        blocks = self._blocks(row.request_id, row.new_block_ids)
        if row.resumed:
            self._resume(row, view, blocks)
        else:
            self._continue(row, view, blocks)
        self._take_tokens(row, view)
        self._count_outputs(row, view)
        if row.resumed and view.num_unreported and row.all_token_ids is not None:
            view = self._disown(row.all_token_ids, view)
        if row.resumed:
            self.num_run_again += view.num_dropped > 0
            view.num_dropped = 0
        drafts = self._fill_in(row, view)
        return self._start(row.request_id, view, row.num_scheduled_tokens, drafts)

    def _disown(self, tokens: v.TokenIds, view: RequestView) -> RequestView:
        """Return a view of the request without the tokens that its frames in flight sampled.

        The plan continues without them, which was complained about already. Their model output will
        not be delivered, so they stay with the old view; otherwise every later row of the request
        would be wrong.
        """
        fresh = self.make_view(view.request)
        fresh.replace_tokens(tokens)
        fresh.tables, fresh.num_computed = view.tables, view.num_computed
        self.views[view.request.request_id] = fresh
        return fresh

    def _fill_in(self, row: v.NewRow | v.CachedRow, view: RequestView) -> v.TokenIds:
        """The drafts of a row, its placeholders replaced by the proposed drafts (P24)."""
        drafts, proposal = row.draft_token_ids, view.proposal
        if not drafts or v.DRAFT_PLACEHOLDER not in drafts:
            return drafts
        if len(proposal) < len(drafts):
            what = (
                f"{row.request_id!r}: {len(drafts)} placeholders, {len(proposal)} drafts proposed"
            )
            self._complain(
                "P24",
                "placeholder_stands_for_a_draft_after_the_last_plan",
                what,
                subjects=row.request_id,
            )
            # A token that is never sampled, as a worker might find in an old buffer.
            return (*proposal, *drafts)[: len(drafts)]
        return proposal[: len(drafts)]

    def _resume(self, row: v.CachedRow, view: RequestView, blocks: Tables) -> None:
        may_resume = view.is_preempted or view.may_resume or not self._gets_commits
        if not may_resume:
            what = f"{row.request_id!r} was running"
            self._complain("P26", "resumed_request_was_preempted", what, subjects=row.request_id)
        if view.num_unreported:
            what = f"{row.request_id!r}: {view.num_unreported} of its tokens are not reported yet"
            self._complain(
                "P13", "resumed_request_has_no_token_in_flight", what, subjects=row.request_id
            )
        self.give_back(
            row.request_id, view.tables, "was preempted"
        )  # by a reset, which no plan shows
        view.is_preempted = view.may_resume = False
        view.tables = blocks
        view.state_indices.clear()
        view.num_computed = row.num_computed_tokens
        view.num_rejected = 0
        view.proposal = ()  # it is for the position before the preemption

    def _continue(self, row: v.CachedRow, view: RequestView, blocks: Tables) -> None:
        if view.is_preempted:
            what = f"{row.request_id!r} holds no block here"
            self._complain(
                "P26", "preempted_request_returns_resumed", what, subjects=row.request_id
            )
        elif view.num_unreported and not self.config.async_scheduling:
            what = f"{row.request_id!r} runs again before its token in flight is known"
            self._complain(
                "P13", "row_waits_for_the_token_of_its_request", what, subjects=row.request_id
            )
        if row.request_id in self._remapped:
            gone = set(chain(*view.tables)) - set(chain(*blocks))
            self.give_back(row.request_id, [gone], "was remapped")
            view.tables = blocks  # the content must be the same, which its reads check
        else:
            for table, gained in zip(view.tables, blocks, strict=True):
                table.extend(gained)
        expected = view.num_computed + view.num_rejected
        if row.num_computed_tokens != expected:
            what = f"{row.request_id!r}: {row.num_computed_tokens} computed in the plan"
            difference = Difference(
                "num_computed_tokens", str(expected), str(row.num_computed_tokens)
            )
            self._complain(
                "P26",
                "plan_counts_the_computed_tokens_of_the_worker",
                what,
                difference,
                subjects=row.request_id,
            )
            view.num_computed = row.num_computed_tokens - view.num_rejected

    def _take_tokens(self, row: v.CachedRow, view: RequestView) -> None:
        sent = row.all_token_ids
        if sent is None:
            if row.resumed or row.request_id not in self._last_scheduled:
                what = f"{row.request_id!r} was not in the plan before, and its tokens are not sent"
                self._complain("P26", "tokens_are_sent_after_a_gap", what, subjects=row.request_id)
        elif view.num_dropped and len(sent) > len(view.tokens) and self._begins_alike(sent, view):
            what = (
                f"{row.request_id!r} is resumed behind position {len(view.tokens)}, whose token "
                "was dropped when it was preempted: it must run again"
            )
            difference = Difference("all_token_ids", shown(view.tokens, 80), shown(sent, 80))
            self._complain(
                "P13", "dropped_position_runs_again", what, difference, subjects=row.request_id
            )
            view.replace_tokens(sent)
        elif list(sent) != view.reported_token_ids:
            what = f"{row.request_id!r}: the tokens in the plan are not those it sampled"
            difference = Difference(
                "all_token_ids", shown(view.reported_token_ids, 80), shown(sent, 80)
            )
            self._complain(
                "P26",
                "sent_tokens_are_those_of_the_worker",
                what,
                difference,
                subjects=row.request_id,
            )
            if not view.num_unreported:
                view.replace_tokens(sent)

    def _begins_alike(self, sent: v.TokenIds, view: RequestView) -> bool:
        """Whether the tokens that a plan sends begin with those that the worker knows."""
        return list(sent[: len(view.tokens)]) == view.tokens

    def _count_outputs(self, row: v.CachedRow, view: RequestView) -> None:
        num_known = len(view.tokens) - view.num_prompt - view.num_unreported
        num_output = max(num_known, 0) + view.num_promised
        if row.num_output_tokens != num_output:
            what = f"{row.request_id!r}: {row.num_output_tokens} outputs in the plan"
            difference = Difference(
                "num_output_tokens", str(num_output), str(row.num_output_tokens)
            )
            self._complain(
                "P26",
                "plan_counts_the_outputs_of_the_worker",
                what,
                difference,
                subjects=row.request_id,
            )

    def _blocks(self, request_id: v.RequestId, tables: v.BlockTables) -> Tables:
        """Per group: the blocks that a plan names."""
        if not any(tables) and len(tables) == len(self.groups):
            return [[] for _ in tables]
        if len(tables) != len(self.groups):
            what = f"{request_id!r}: {len(tables)} tables"
            self._complain("P26", "plan_has_one_table_per_group", what, subjects=request_id)
            missing = len(self.groups) - len(tables)
            tables = (*tables, *[()] * missing)[: len(self.groups)]
        return [
            self._real_blocks(request_id, least, table) if table else []
            for least, table in zip(self._least, tables, strict=True)
        ]

    def _real_blocks(
        self, request_id: v.RequestId, least: v.BlockId, table: tuple[v.BlockId, ...]
    ) -> list[v.BlockId]:
        """The named blocks that exist."""
        blocks, num_blocks = list(table), self.config.num_blocks
        if not (least <= min(blocks) and max(blocks) < num_blocks):
            self._complain(
                "P1",
                "plan_names_real_blocks",
                f"{request_id!r} gets blocks {blocks}",
                subjects=request_id,
            )
            blocks = [block for block in blocks if least <= block < num_blocks]
        return blocks

    def _start(
        self, request_id: v.RequestId, view: RequestView, num_scheduled: int, drafts: v.TokenIds
    ) -> FrameRow:
        known = len(view.tokens)
        first = max(view.num_computed, 0)
        end = first + num_scheduled
        if num_scheduled < 1:
            self._complain(
                "P12",
                "row_runs_a_token",
                f"{request_id!r}: {num_scheduled} tokens",
                subjects=request_id,
            )
        if max(end - known, 0) != len(drafts):
            what = (
                f"{request_id!r}: positions {first} to {end - 1} with {known} known tokens "
                f"and {len(drafts)} drafts"
            )
            self._complain("P24", "drafts_are_the_last_scheduled_tokens", what, subjects=request_id)
        room = self._count_slots(view)
        if end > room:
            what = f"{request_id!r}: {end} tokens, {room} slots"
            self._complain("P26", "table_holds_the_scheduled_tokens", what, subjects=request_id)
        # Run as much of a wrong row as makes sense, to find further defects.
        end = max(min(end, known + len(drafts), room), 0)
        first = min(first, end)
        row = FrameRow(view, first, end, drafts, end >= known, known)
        if view.automaton is not None and drafts and not self.config.async_scheduling:
            self.check_drafts(row)
        return row

    def _count_slots(self, view: RequestView) -> int:
        """Tokens for which each of the request's block tables has slots."""
        if not self.config.groups:
            return len(view.table) * self.config.block_size
        held = zip(self.groups, view.tables, strict=True)
        return min(
            [
                (len(table) - group.num_speculative_blocks) * group.block_size
                for group, table in held
                if not is_across(group)
            ],
            default=self.config.max_model_len,
        )

    # Answers.

    def answer(self, frame_id: v.FrameId) -> tuple[v.RowTokens, ...]:
        """The sampled tokens of each row of a dispatched plan, in plan order; () for an unknown
        frame."""
        rows = self._frames.get(frame_id, ())
        return tuple(
            [v.RowTokens(row.view.request.request_id, self.get_masked(row)) for row in rows]
        )

    def list_awaited(self, frame_id: v.FrameId) -> list[v.RequestId]:
        """Requests for which a dispatched plan sampled tokens to deliver."""
        rows = self._frames.get(frame_id, ())
        return [row.view.request.request_id for row in rows if row.sampled and not row.is_void]

    def commit(self, event: v.Commit) -> None:
        """Note that a model output was committed. Without this call the worker's own output
        counts."""
        self._gets_commits = True
        self._settle(event.frame_id, event.sampled)

    def _settle(self, frame_id: v.FrameId, sampled: Sequence[v.RowTokens]) -> None:
        """Follow a commit; tokens committed instead of the worker's own replace them."""
        rows = self._frames.pop(frame_id, [])
        tokens_of = {row.request_id: row.token_ids for row in sampled}
        for row in rows:
            view, num_promised = row.view, row.num_promised
            view.num_unreported -= len(row.sampled)
            view.num_promised -= num_promised
            view.num_rejected = max(view.num_rejected - (num_promised - len(row.sampled)), 0)
            tokens = tokens_of.get(view.request.request_id, ())
            if tokens != row.sampled and len(view.tokens) == row.num_known + len(row.sampled):
                view.replace_tokens([*view.tokens[: row.num_known], *tokens])
                view.num_computed -= len(row.sampled) - len(tokens)
                for at in view.state_indices:
                    view.state_indices[at] -= len(row.sampled) - len(tokens)

    # Comparison with the state.

    def reset(self, forced: bool) -> None:
        """Note a reset: KV written so far must not be read again (P25)."""
        self.forget()
        self.forget_drafts()
        if forced:
            for view in list(self.views.values()):
                view.may_resume = True
                self._drop_tokens(view)

    def check_view(
        self, snapshot: v.Snapshot, planned: Container[v.RequestId] | None = None
    ) -> list[Finding]:
        """Check that the plans told the worker what the state says (P26).

        For a running request these are its outputs, block tables and computed tokens, at any time,
        since a plan brings each of them to the worker before it can change again. For a preempted
        one these are the outputs only: its blocks are gone. The worker need not know other requests
        yet.

        Where a block may be exchanged between two plans, `planned` are the requests whose tables
        the last plan has; of others only the length is compared. None: all tables are compared.
        """
        self._findings = []
        is_part = isinstance(snapshot, PartOfState)
        is_async = self.config.async_scheduling
        for request in snapshot.requests:
            is_running = request.status is RUNNING
            if not (is_running or request.status is PREEMPTED):
                continue
            view = self.views.get(request.request_id)
            if view is None:
                what = f"{request.request_id!r} is unknown"
                self._complain("P26", "running_request_is_known", what, subjects=request.request_id)
                continue
            if not is_running and is_outdated(view, request):
                continue
            shown_by_state = _get_viewed(request)
            _, promised, tables, computed = shown_by_state
            if is_async and (promised or not is_part):
                promised = view.num_promised
            if is_running:
                computed = view.num_computed + view.num_rejected
                tables = self._tables_seen(view, request)
                if planned is not None and request.request_id not in planned:
                    is_as_long = [*map(len, tables)] == [*map(len, request.block_tables)]
                    tables = request.block_tables if is_as_long else tables
            seen_here = (view.output_token_ids, promised, tables, computed)
            if shown_by_state == seen_here:
                continue
            for name, state, seen in zip(_VIEWED, shown_by_state, seen_here, strict=True):
                if state != seen:
                    what = f"{request.request_id!r}: state and worker differ in {name}"
                    difference = Difference(
                        name, shown(state, 80), shown(seen, 80), "state; worker"
                    )
                    self._complain(
                        "P26",
                        "plans_alone_rebuild_the_request",
                        what,
                        difference,
                        subjects=request.request_id,
                    )
        return self._findings

    def _tables_seen(self, view: RequestView, request: v.RequestSnapshot) -> v.BlockTables:
        """The request's tables, with null blocks where the state has some, which no plan shows."""
        if not self.config.groups:
            return (tuple(view.tables[0]),)
        tables = tuple([tuple(table) for table in view.tables])
        if len(tables) != len(request.block_tables):
            return tables
        pairs = zip(tables, request.block_tables, strict=True)
        return tuple([without_given_back(*pair) for pair in pairs])


def make_worker(traits: EngineTraits, config: v.Config, next_token: NextToken) -> Worker:
    """Return the worker for the plans of engines with these traits."""
    worker: Worker = (traits.make_worker or Worker)(config, next_token)
    worker.drops_tokens_in_flight = traits.drops_tokens_in_flight
    return worker
