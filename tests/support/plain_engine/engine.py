"""PlainEngine: converts events for the scheduler, and its results into observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from blockstep.impl import rejections
from blockstep.impl.capabilities import list_config_problems
from blockstep.spec import vocabulary as v
from plain_engine.scheduler import Row, Scheduler
from plain_engine.store import count_valid
from plain_engine.text import Text

CAPABILITIES: Final = frozenset(
    (
        *("snapshot", "priority", "pause", "reset", "grammar", "multimodal", "embeds", "abort"),
        *(
            "rejection",
            "statistics",
            "cache statistics",
            "forks",
            "pins",
            "transfers",
            "tiers",
            "work",
        ),
    )
)


@dataclass
class Frame:
    """A plan that awaits its commit: its rows, and the drafts of each that samples."""

    frame_id: v.FrameId
    rows: list[Row]
    drafts: dict[v.RequestId, v.TokenIds | None]


class PlainEngine:
    """The smallest conforming engine: one KV group, one plan at a time, and no drafts.

    Raises:
        ConfigError: the config is invalid, or needs what this engine lacks.
    """

    def __init__(self, config: v.Config) -> None:
        problems = list_config_problems(config, CAPABILITIES)
        if problems:
            raise v.ConfigError(problems)
        self.config = config
        self.scheduler = Scheduler(config)
        self.texts: dict[v.RequestId, Text] = {}
        self.frame: Frame | None = None
        self.next_frame_id = 0
        self.ended: set[v.RequestId] = set()
        self.last: set[v.RequestId] = set()

    def capabilities(self) -> frozenset[str]:
        """Return what the engine implements."""
        return CAPABILITIES

    def apply(self, event: v.Event) -> v.Observation:
        """Apply one event; return its observation."""
        problem = v.event_problem(event) or rejections.brought_problem(event)
        if problem is not None:
            return problem
        take: Callable[..., v.Observation] | None = getattr(
            self, f"_take_{type(event).__name__.lower()}", None
        )
        if take is None:
            kind = type(event).__name__
            return v.Rejected(
                v.RejectCode.MALFORMED_EVENT, f"{kind}: this engine does not support it"
            )
        answer = take(event)
        self.scheduler.pins.forget([text.request.job_id for text in self.texts.values()])
        return answer

    def _is_in_flight(self, name: v.RequestId) -> bool:
        return self.frame is not None and name in self.frame.drafts

    def _take_submit(self, event: v.Submit) -> v.Observation:
        request = event.request
        if request.request_id in self.scheduler.store.held:
            return rejections.held_by_transfer(request.request_id)
        problem = rejections.submit_problem(
            self.config,
            request,
            rejections.most_blocks(self.config, request),
            request.request_id in self.texts,
            self._is_in_flight(request.request_id),
        )
        if problem is not None:
            return problem
        text = self.texts[request.request_id] = Text(request)
        self.scheduler.add(text)
        return v.Ack()

    def _take_fork(self, event: v.Fork) -> v.Observation:
        parent = self.texts.get(event.request_id)
        begun = (v.Status.RUNNING, v.Status.PREEMPTED)
        problem = rejections.fork_problem(
            self.config,
            event,
            is_unfinished=parent is not None,
            is_child_unfinished=event.child_id in self.texts,
            is_child_in_flight=self._is_in_flight(event.child_id),
            may_fork=parent is not None and parent.status in begun,
            is_in_flight=self._is_in_flight(event.request_id),
        )
        if problem is not None or parent is None:
            return problem or v.Ack()
        child = Text(replace(parent.request, request_id=event.child_id))
        for token in event.output_token_ids:
            if child.append(token, self.config.max_model_len) is not None:
                return rejections.bad_fork(event, f"it ends with output {token}; leave that out")
        child.num_cached_tokens = parent.num_cached_tokens
        child.grammar_ready = parent.grammar_ready
        self.texts[child.name] = child
        self.scheduler.branch(parent, child)
        return v.Ack()

    def _take_schedule(self, _event: v.Schedule) -> v.Observation:
        problem = rejections.schedule_problem(self.config, int(self.frame is not None))
        if problem is not None:
            return problem
        scheduler = self.scheduler
        scheduler.step()
        rows = scheduler.rows
        plan = v.Plan(
            frame_id=self.next_frame_id,
            new=tuple(self._show_new(row) for row in rows if row.is_new),
            cached=tuple(
                self._show_cached(row)
                for row in sorted(rows, key=lambda row: row.resumed)
                if not row.is_new
            ),
            finished_req_ids=tuple(sorted(self.ended)),
            preempted_req_ids=tuple(sorted(text.name for text in scheduler.preempted)),
            remapped_req_ids=tuple(sorted(row.text.name for row in rows if is_remapped(row))),
            block_copies=tuple(copy for row in rows for copy in row.copies),
            kv_loads=tuple(scheduler.loads),
            kv_saves=tuple(scheduler.saves),
        )
        self.next_frame_id += 1
        self.ended = set()
        self.last = {row.text.name for row in rows}
        if rows:
            drafts: dict[v.RequestId, v.TokenIds | None] = {
                row.text.name: () if row.samples else None for row in rows
            }
            self.frame = Frame(plan.frame_id, rows, drafts)
        return plan

    def _show_new(self, row: Row) -> v.NewRow:
        text = row.text
        return v.NewRow(
            text.request, (tuple(text.table),), row.start, row.count, tuple(text.outputs)
        )

    def _show_cached(self, row: Row) -> v.CachedRow:
        text = row.text
        is_whole = row.resumed or is_remapped(row)
        return v.CachedRow(
            request_id=text.name,
            resumed=row.resumed,
            new_block_ids=(tuple(text.table if is_whole else row.new_blocks),),
            all_token_ids=None if text.name in self.last else text.tokens,
            num_computed_tokens=row.start,
            num_output_tokens=len(text.outputs),
            num_scheduled_tokens=row.count,
        )

    def _take_commit(self, event: v.Commit) -> v.Observation:
        frame = self.frame
        in_flight = () if frame is None else (frame.frame_id,)
        problem = rejections.frame_problem(event.frame_id, in_flight)
        if problem is not None or frame is None:
            return problem or v.Ack()
        answers = {row.request_id: row.token_ids for row in event.sampled}
        problem = rejections.answer_problem(
            event.frame_id, len(event.sampled), frame.drafts, answers, lambda _all, few: not few
        )
        if problem is not None:
            return problem
        self.frame = None
        failed = self._fail_loads(event.transfers, frame)
        rows = []
        for row in frame.rows:
            text = row.text
            if text in failed or self.texts.get(text.name) is not text:
                continue
            if row.load is not None and row.load is text.load:
                self._settle(text)
            if answers[text.name]:
                rows.append(self._deliver(text, *answers[text.name]))
        return v.Outputs((*rows, *self._take_transfers(event.transfers, failed)))

    def _take_transfersreported(self, event: v.TransfersReported) -> v.Observation:
        failed = self._fail_loads(event.transfers, None)
        return v.Outputs(self._take_transfers(event.transfers, failed))

    def _fail_loads(self, report: v.KVTransfers, frame: Frame | None) -> list[Text]:
        """Return the requests whose load has failed, waiting ones first; shorten their computed
        tokens.

        A request preempted meanwhile is included if the frame would deliver a token to it. Under
        FAIL they are not shortened, since they will finish.
        """
        found: list[tuple[Text, v.KVLoad]] = []
        found += [(text, text.load) for text in self.scheduler.skipped if text.load]
        for row in frame.rows if frame else ():
            text, load = row.text, row.load
            is_waiting_for_it = self.texts.get(text.name) is text and (text.load or row.samples)
            if load and is_waiting_for_it:
                found.append((text, load))
        failed = []
        for text, load in found:
            valid = count_valid(load, report.invalid_block_ids, self.config.block_size)
            if valid is not None:
                failed.append(text)
                if self.config.kv_load_failure_policy is v.KVLoadFailurePolicy.RECOMPUTE:
                    self._shorten(text, valid)
        return failed

    def _shorten(self, text: Text, valid: int) -> None:
        """Roll a request back to the `valid` tokens before its failed load."""
        if text.load is not None:
            text.computed = min(text.computed, valid)
        if text.status is v.Status.RUNNING:
            text.is_prefill_chunk = True
            self._settle(text)

    def _settle(self, text: Text) -> None:
        """Confirm the load of a request, and publish its computed tokens."""
        text.load = None
        self.scheduler.tables.publish(text, text.computed)

    def _take_transfers(self, report: v.KVTransfers, failed: list[Text]) -> tuple[v.OutputRow, ...]:
        """End transfers, after the rows of a commit; return the rows of requests that fail by
        them."""
        rows = []
        if self.config.kv_load_failure_policy is v.KVLoadFailurePolicy.FAIL:
            for text in failed:
                self._end(text)
                cached = max(text.num_cached_tokens, 0)
                rows.append(v.OutputRow(text.name, (), v.FinishReason.ERROR, None, cached))
        scheduler = self.scheduler
        scheduler.store.finish(report, list(filter(scheduler.store.is_loading, scheduler.skipped)))
        return tuple(rows)

    def _deliver(self, text: Text, token: v.TokenId) -> v.OutputRow:
        reason = text.append(token, self.config.max_model_len)
        stop = None
        if reason is not None:
            self.scheduler.pins.keep(text)
            self._end(text)
        if reason is v.FinishReason.STOP and token != text.request.eos_token_id:
            stop = token
        return v.OutputRow(text.name, (token,), reason, stop, text.num_cached_tokens)

    def _end(self, text: Text) -> None:
        self.scheduler.drop(text)
        del self.texts[text.name]
        self.ended.add(text.name)

    def _take_abort(self, event: v.Abort) -> v.Observation:
        named = [name for name in dict.fromkeys(event.request_ids) if name in self.texts]
        for name in named:
            self._end(self.texts[name])
        return v.Aborted(tuple(named))

    def _take_drafts(self, event: v.Drafts) -> v.Observation:
        return rejections.drafts_problem(self.config, event) or v.DraftsTaken()

    def _take_grammarready(self, event: v.GrammarReady) -> v.Observation:
        text = self.texts.get(event.request_id)
        request = None if text is None else text.request
        problem = rejections.grammar_problem(request, event.request_id)
        if problem is not None or text is None:
            return problem or v.Ack()
        text.grammar_ready = True
        return v.Ack()

    def _take_streamingupdate(self, event: v.StreamingUpdate) -> v.Observation:
        name = event.request.request_id
        return rejections.update_problem(name, name in self.texts)

    def _take_setpause(self, event: v.SetPause) -> v.Observation:
        self.scheduler.pause = event.pause_state
        return v.Ack()

    def _take_reset(self, event: v.Reset) -> v.Observation:
        if event.reset_connector and not self.config.kv_connector:
            return v.ResetDone(success=False)
        success = self.scheduler.reset(event.reset_running_requests)
        if success and event.reset_running_requests:
            self.last = set()
        if success and event.reset_connector:
            self.scheduler.store.offers.clear()
        return v.ResetDone(success)

    def _take_kvoffer(self, event: v.KVOffer) -> v.Observation:
        if self.config.kv_connector and event.request_id in self.texts:
            self.scheduler.store.offers[event.request_id] = event
        return v.Ack()

    def _take_clock(self, event: v.Clock) -> v.Observation:
        self.scheduler.pins.now = max(self.scheduler.pins.now, event.now)
        return v.Ack()

    def _take_pinestimate(self, event: v.PinEstimate) -> v.Observation:
        if self.config.policy is v.Policy.CONTINUUM:  # no other policy keeps blocks of a job
            self.scheduler.pins.estimate(event.job_id, event.ttl)
        return v.Ack()

    def _has_work(self) -> bool:
        """Whether a plan is of any use before the next event."""
        scheduler = self.scheduler
        if (
            self.ended
            or scheduler.store.held
            or any(map(scheduler.store.is_loading, scheduler.skipped))
        ):
            return True
        if scheduler.pause is v.PauseState.UNPAUSED:
            return bool(self.texts)
        return scheduler.pause is v.PauseState.PAUSED_NEW and bool(scheduler.running)

    def snapshot(self) -> v.Snapshot:
        """Return the canonical state."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return v.Snapshot(
            pause_state=scheduler.pause,
            waiting=tuple(text.name for text in scheduler.waiting),
            skipped_waiting=tuple(text.name for text in scheduler.skipped),
            running=tuple(text.name for text in scheduler.running),
            requests=tuple(text.show() for _, text in sorted(self.texts.items())),
            ref_counts=tuple(pool.refs),
            free_queue=tuple(pool.free),
            block_keys=tuple(pool.keys),
            cached={key: tuple(blocks) for key, blocks in pool.cached.items()},
            frames_in_flight=() if self.frame is None else (self.frame.frame_id,),
            next_frame_id=self.next_frame_id,
            finished_req_ids=tuple(sorted(self.ended)),
            prev_scheduled_req_ids=tuple(sorted(self.last)),
            stats=scheduler.stats,
            transfers=scheduler.store.show(scheduler.running) if self.config.kv_connector else None,
            pins=scheduler.pins.show() if self.config.has_pins else None,
            admission_closed=scheduler.is_closed,
            has_work=self._has_work(),
        )


def is_remapped(row: Row) -> bool:
    """Whether a running row brings its whole block table again."""
    return bool(row.copies) and not (row.is_new or row.resumed)
