"""VllmEngine: the unmodified scheduler of a vLLM release behind the Engine protocol.

    events --> vllm (this module) --> scheduler --> vllm_plans, vllm_state --> answers, snapshots
               vllm_build: how it is built      vllm_releases: what a release has and lacks
               vllm_groups: the mixes of KV-cache groups that a release takes
               vllm_known_crashes: events it is not given    vllm_block_keys: the key of a digest
               vllm_runner: plans for Model Runner V2    vllm_defaults: settings
               vllm_unaccounted: fields that disagree        vllm_fields: how a field is read
               vllm_audit: what we show, compared with its functions

There is no worker: what a worker would answer comes in as events. With `async_scheduling` it is
vLLM's `AsyncScheduler`; drafts then stay with the worker, and plans carry placeholders for them.
No code is patched, and results are translated without repair. What is no default of the release is
named in `vllm_defaults`. Three things are done to what goes
in:

* adapters are renamed, so that they cannot be taken for salts (`VllmEngine.separate_names`);
* several ids are aborted one at a time, because `finish_requests` goes through a set of strings,
  in an order that differs from process to process;
* without an encoder, items reach the block hasher and not the scheduler (see `vllm_build`).

It gives no typed rejections, so it must be handed only events that are legal in its state. It has
no counter of preemptions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

# imported first, because it says what to do if vLLM cannot be imported
from blockstep.conformance.engines.adapters.vllm_build import (
    RELEASE,
    Hasher,
    build_request,
    build_samples,
)

# isort: split
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits
from blockstep.conformance.engines.adapters.vllm_audit import Audit
from blockstep.conformance.engines.adapters.vllm_block_keys import RequestRecord
from blockstep.conformance.engines.adapters.vllm_counts import Lookups, leave_out
from blockstep.conformance.engines.adapters.vllm_defaults import list_settings
from blockstep.conformance.engines.adapters.vllm_grammars import (
    fail_compilation,
    finish_compilation,
)
from blockstep.conformance.engines.adapters.vllm_groups import fit_groups
from blockstep.conformance.engines.adapters.vllm_known_crashes import (
    WORKAROUNDS,
    find_reason,
    list_out_of_reach,
)
from blockstep.conformance.engines.adapters.vllm_known_crashes_store import (
    OUT_OF_REACH_WITH,
    SPARED_BY,
    find_store_reason,
)
from blockstep.conformance.engines.adapters.vllm_plans import read_mask, read_outputs, read_plan
from blockstep.conformance.engines.adapters.vllm_releases import get_release_note
from blockstep.conformance.engines.adapters.vllm_runner import check_runner, note_entering
from blockstep.conformance.engines.adapters.vllm_script import write_script
from blockstep.conformance.engines.adapters.vllm_state import (
    Run,
    add_counts,
    read_counts,
    read_snapshot,
)
from blockstep.conformance.engines.adapters.vllm_unaccounted import (
    NOTE,
    Asked,
    check_answer,
    check_plan,
    check_state,
)
from blockstep.spec import vocabulary as v

if RELEASE.has_events:
    from blockstep.conformance.engines.adapters.vllm_events import read_events
if RELEASE.has_store:
    from blockstep.conformance.engines.adapters.vllm_store import build_report, check_store
if RELEASE.has_pause:
    from vllm.v1.core.sched.interface import PauseState as VllmPauseState

IN_EVERY_RELEASE = frozenset(
    {
        *(Capability.SNAPSHOT, Capability.PRIORITY, Capability.RESET, Capability.MULTIMODAL),
        *(Capability.ABORT, Capability.PIPELINE, Capability.EMBEDS, Capability.GROUPS),
        *(Capability.KINDS, Capability.ADAPTERS),
    }
)
"""Some capabilities, listed: a new one of Blockstep is in no release before it was examined."""


class VllmEngine:
    """vLLM's scheduler, synchronous or not, as a system under test."""

    separate_names: bool = not RELEASE.has_tagged_names
    """Whether LoRA names get a prefix. Many releases put a LoRA name and a salt into one flat list
    of extra keys, so that equal strings give equal digests, which would hide other defects."""
    spare_unservable: bool = True
    """Whether requests that never fit are kept away."""
    spare_reuse: bool = True
    """Whether the id of an aborted request is kept away while a frame in flight has it."""
    abort_singly: bool = True
    """Whether several ids are aborted one at a time, in the given order."""
    spare_counters: bool = not RELEASE.has_sound_counters
    """Whether attempts that fail are taken out of its counters of the prefix cache; where they
    cannot be told apart, these counters and those of drafts are left out."""
    spare_late_drafts: bool = True
    """Whether drafts are kept away that their request cannot take now; the release would keep them,
    and schedule them later at another position."""

    spare_signals: bool = True
    """Whether reports of transfers that are not in flight are kept away."""
    spare_group_failures: bool = True
    """Whether invalid blocks are kept away if there are several groups."""
    spare_full_loads: bool = True
    """Whether a synchronous load never covers all known tokens."""
    shows_store: bool = RELEASE.follows_store
    """Whether it gets configs with a store."""

    traits = EngineTraits(
        fit_config=partial(fit_groups, RELEASE),
        max_depth=2,  # as many plans in flight as vLLM has without pipeline parallelism
        out_of_reach=list_out_of_reach(),
        out_of_reach_with=OUT_OF_REACH_WITH,
        workarounds=WORKAROUNDS,
        version=RELEASE.version,
        profile=RELEASE.profile,
        settings=list_settings(RELEASE.version, os.environ),
        notes=tuple(note for note in (get_release_note(RELEASE.version), NOTE) if note),
        write_script=write_script,
    )

    def __init__(self, config: v.Config) -> None:
        self.run = Run(config)
        self.scheduler = self.run.scheduler
        self.audit = Audit(self.scheduler, self.run.lora_ids, self.separate_names)
        self._fault: EngineFault | None = None
        """The first thing that contradicts the answer to the last event."""
        self.had_items_in_a_chunk = False
        """Whether an input of a session has had items. Its last output may be hashed before they
        arrive and published afterwards, so an event has items that no digest has."""

    @property
    def judges(self) -> frozenset[v.RejectCode]:
        """Return the reject codes that it should return, unless such events are kept away: no front
        end can check them."""
        spared = {
            v.RejectCode.NEVER_FITS: self.spare_unservable,
            v.RejectCode.REQUEST_IN_FLIGHT: self.spare_reuse,
        }
        return frozenset(code for code, is_spared in spared.items() if not is_spared)

    def capabilities(self) -> frozenset[str]:
        """Return what every release has, and what this one has as well; see also `WORKAROUNDS`."""
        some = {
            Capability.COMMON_PREFIX: RELEASE.has_common_prefix,
            Capability.CACHE_STATISTICS: RELEASE.has_countable_attempts or not self.spare_counters,
            Capability.LATE_DRAFTS: not self.spare_late_drafts,
            Capability.PAUSE: RELEASE.has_pause,
            Capability.GRAMMAR: RELEASE.has_plain_grammar,
            Capability.DRAFTS: RELEASE.has_drafts,
            Capability.ASYNC: RELEASE.has_async,
            Capability.SESSIONS: RELEASE.has_sessions,
            Capability.MASKS: RELEASE.has_frame_masks,
            # a plain cache (0.11.0) can be shown, but no profile follows it yet
            Capability.ENCODER: RELEASE.has_offers,
            Capability.EVENTS: RELEASE.has_events,
            Capability.TRANSFERS: self.shows_store,
            Capability.WORK: RELEASE.shows_work,
        }
        return IN_EVERY_RELEASE | {one for one, is_there in some.items() if is_there}

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event that is legal now.

        Raises:
            EngineFault: the answer contradicts itself or the state; it has the answer all the same.
        """
        self._fault = None
        try:
            answer = self._take(event)
        except Exception as error:
            raise self._fault or error from None
        if self._fault is not None:
            self._fault.answer = answer
            raise self._fault
        return answer

    def _check(self, check: Callable[..., None], *args: Any) -> None:
        """Make a check of an answer, and keep its fault until the whole answer is read."""
        try:
            check(*args)
        except EngineFault as fault:
            self._fault = self._fault or fault

    def _take(self, event: v.Event) -> v.Observation:
        """Return the answer to an event. Faults of it are in `_fault`."""
        match event:
            case v.Submit(request=request):
                return self._submit(request)
            case v.Schedule():
                return self._schedule()
            case v.Commit(frame_id=frame_id, sampled=sampled, transfers=transfers):
                return self._commit(frame_id, sampled, transfers)
            case v.TransfersReported(transfers=transfers):
                return self._report(transfers)
            case v.KVOffer(request_id=name):
                if self.run.store is not None and name in self.run.get_unfinished():
                    self.run.store.offers[name] = event
                return v.Ack()
            case v.Drafts(drafts=drafts):
                return self._drafts(drafts)
            case v.Abort(request_ids=request_ids):
                return self._abort(request_ids)
            case v.GrammarReady(request_id=request_id):
                # the compiling thread does this when it is done
                finish_compilation(self.scheduler.requests[request_id])
                return v.Ack()
            case v.GrammarFailed(request_id=request_id):
                fail_compilation(self.scheduler.requests[request_id])
                return v.Outputs(())
            case v.GrammarBitmask(frame_id=frame_id, drafts=drafts):
                return self._mask(frame_id, drafts)
            case v.EncoderReset():
                self.scheduler.reset_encoder_cache()
                return v.Ack()
            case v.EncoderOffer(identifiers=identifiers):
                if (
                    self.scheduler.ec_connector is not None
                ):  # without an encoder there is no connector
                    self.scheduler.ec_connector.identifiers = frozenset(identifiers)
                return v.Ack()
            case v.SetPause(pause_state=pause_state):
                self.scheduler.set_pause_state(VllmPauseState[pause_state.name])
                return v.Ack()
            case v.StreamingUpdate(request=request):
                return self._update(request)
            case v.Reset(reset_running_requests=flag, reset_connector=forgets):
                return self._reset(flag, forgets)
        raise EngineFault(f"no such event: {event!r}")

    def declines(self, event: v.Event) -> str | None:
        """Return what the release lacks, or the defect that would make it raise some steps
        later.
        """
        run = self.run
        reason = None if run.store is None else find_store_reason(run, event)
        flag = SPARED_BY.get(reason or "")
        if reason is not None and (flag is None or getattr(self, flag)):
            return reason
        return find_reason(run, event)

    def snapshot(self) -> v.Snapshot:
        """Return its state in canonical form, read from its own fields.

        Raises:
            EngineFault: the fields contradict one another; it has the state all the same.
        """
        run, scheduler = self.run, self.scheduler
        shown = read_snapshot(run)
        try:
            check_state(run)
            if run.store is not None:
                check_store(run.store, scheduler.requests, scheduler.finished_recving_kv_req_ids)
            self.audit.check_state(shown)
        except EngineFault as fault:
            fault.state = fault.state or shown
            raise
        return shown

    def _build(self, request: v.Request, hasher: Hasher | None) -> VllmRequest:
        run = self.run
        has_items = run.config.encoder_cache_size > 0 or hasher is not None
        return build_request(request, hasher, run.lora_ids, self.separate_names, has_items)

    def _submit(self, request: v.Request) -> v.Ack:
        """Submit a request. Source: `add_request`."""
        run = self.run
        known = run.known[request.request_id] = RequestRecord(request, moments=["QUEUED"])
        hasher = run.name_blocks(known)
        built = self._build(request, hasher)
        run.compile_grammar(built)
        self.scheduler.add_request(built)
        return v.Ack()

    def _update(self, request: v.Request) -> v.Ack | v.Aborted:
        """Add an input to a session. Source: `add_request`, of an id in use."""
        run, name = self.run, request.request_id
        known = run.known[name]
        # the front end hashes an input by itself, but these digests are not used
        built = self._build(request, run.hasher)
        if request.resumable:
            known.updates.append(request)
        self.had_items_in_a_chunk |= bool(request.items)
        self.scheduler.add_request(built)
        session = run.get_unfinished().get(name)
        if session is None:
            run.ended.add(name)
            return v.Aborted((name,))
        known.follow(session.prompt_token_ids, session.max_tokens)
        return v.Ack()

    def _schedule(self) -> v.Plan:
        """Plan a step. Source: `schedule`."""
        run, requests = self.run, self.scheduler.requests
        if run.store is not None:
            run.store.spares_full_loads = self.spare_full_loads
        entering = note_entering(requests)
        before = entering.placeholders
        running = [request.request_id for request in self.scheduler.running]
        if self.spare_counters and RELEASE.has_countable_attempts:
            stats = self.scheduler.kv_cache_manager.prefix_cache_stats
            lookups = Lookups.now(self.scheduler, read_counts(stats))
            output = self.scheduler.schedule()
            planned, now = output.num_scheduled_tokens, read_counts(stats)
            run.stats = leave_out(run.stats, lookups.list_failed(self.scheduler, planned, now))
        else:
            output = self.scheduler.schedule()
        self._check(check_plan, run, output, self.separate_names)
        self._check(check_runner, run, output, entering)
        frame_id, run.next_frame_id = run.next_frame_id, run.next_frame_id + 1
        if output.num_scheduled_tokens:
            run.frames[frame_id] = output
        if RELEASE.has_preemption_list:
            preempted = set(output.preempted_req_ids or ())
        else:
            preempted = {name for name in running if requests[name].status.name == "PREEMPTED"}
        for name in preempted:
            run.known[name].num_preemptions += 1
            if name in running:  # the others were preempted by a reset
                run.known[name].moments.append("PREEMPTED")
        for name in output.num_scheduled_tokens:
            if name not in running or name in preempted:
                run.known[name].moments.append("SCHEDULED")
        plan = read_plan(run, frame_id, output, preempted, entering)
        self._check(self.audit.check_plan, plan)
        run.planned = tuple(sorted(output.num_scheduled_tokens))
        for name in run.planned:
            request, known = requests[name], run.known[name]
            known.promised[frame_id] = request.num_output_placeholders - before[name]
            known.is_prefill_chunk = request.num_computed_tokens < request.num_tokens + before[name]
        self._note_cached(run.planned)
        return plan

    def _reset(self, resets_running: bool, forgets: bool) -> v.ResetDone:
        """Reset the prefix cache. Source: `reset_prefix_cache`."""
        run = self.run
        keywords = {"reset_running_requests": resets_running} if RELEASE.has_forced_reset else {}
        if forgets:
            keywords["reset_connector"] = True
        running = tuple(self.scheduler.running)
        done = self.scheduler.reset_prefix_cache(**keywords)
        for request in running:
            if request.status.name == "PREEMPTED":
                run.known[request.request_id].moments.append("PREEMPTED")
        if resets_running and run.has_second_runner:
            # the older runner's record of the last plan, which the release keeps there
            run.planned = ()
        return v.ResetDone(done, self._read_events())

    def _note_cached(self, names: Iterable[v.RequestId]) -> None:
        """Record cached tokens, which a release reports once, of these requests and of new
        loads.
        """
        if not RELEASE.has_prefill_stats:
            return
        requests, loading = self.scheduler.requests, self.run.store and self.run.store.loading
        for name in {*names, *(loading or ())} & requests.keys():
            if requests[name].prefill_stats is not None and not requests[name].is_finished():
                num_cached = requests[name].prefill_stats.num_cached_tokens
                self.run.known[name].num_cached_tokens = num_cached

    def _commit(
        self,
        frame_id: v.FrameId,
        sampled: tuple[v.RowTokens, ...],
        transfers: v.KVTransfers,
    ) -> v.Outputs:
        """Commit a frame. Source: `update_from_output`."""
        names = [row.request_id for row in sampled]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[build_samples(row.token_ids) for row in sampled],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        return self._answer(self.run.frames.pop(frame_id), result, transfers)

    def _report(self, transfers: v.KVTransfers) -> v.Outputs:
        """Report transfers.

        Source: a step without rows, which polls the workers' connectors as well.
        """
        if self.run.store is None:
            return v.Outputs()
        result = ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
        return self._answer(SchedulerOutput.make_empty(), result, transfers)

    def _answer(
        self, frame: SchedulerOutput, result: ModelRunnerOutput, transfers: v.KVTransfers
    ) -> v.Outputs:
        """Pass on a model output of a frame and, with a store, a report of transfers."""
        run, requests = self.run, self.scheduler.requests
        asked = Asked.now(run, frame, result)
        if run.store is not None:
            result.kv_connector_output = build_report(transfers)
            asked.has_failures = bool(transfers.invalid_block_ids)
        answer = self.scheduler.update_from_output(frame, result)
        if run.store is not None:
            run.store.forget((*transfers.finished_recving, *transfers.finished_sending), requests)
        unfinished = run.get_unfinished()
        for name in result.req_ids:
            if name in unfinished:
                request = unfinished[name]
                run.known[name].follow(request.prompt_token_ids, request.max_tokens)
        self._check(check_answer, run, answer, asked)
        for core in answer.values():
            stats = core.scheduler_stats
            if stats is not None:
                external = getattr(stats, "connector_prefix_cache_stats", None)
                run.stats = add_counts(
                    run.stats, stats.prefix_cache_stats, stats.spec_decoding_stats, external
                )
        rows = [row for core in answer.values() for row in read_outputs(run, core)]
        run.ended.update(asked.requests.keys() - unfinished.keys())
        return v.Outputs(tuple(rows), self._read_events())

    def _read_events(self) -> tuple[v.KVEvent, ...]:
        run = self.run
        if not run.config.enable_kv_cache_events:
            return ()
        publisher = self.scheduler.kv_event_publisher
        has_items = run.config.encoder_cache_size > 0
        hashed = partial(self.audit.get_event_extras, has_items=has_items)
        get_extras = None if self.had_items_in_a_chunk else hashed
        names = run.lora_ids, self.separate_names
        return read_events(publisher, run.digests, run.config.kv_groups, *names, get_extras)

    def _drafts(self, drafts: tuple[v.RowTokens, ...]) -> v.DraftsTaken:
        """Hand in drafts, and return the requests that kept theirs.

        Source: `update_draft_token_ids`.

        Synchronous only: the specification rejects drafts if the worker keeps them.
        """
        run, handed = self.run, {row.request_id: list(row.token_ids) for row in drafts}
        requests = self.scheduler.requests
        before = {name: requests[name].spec_token_ids for name in handed if name in requests}
        self.scheduler.update_draft_token_ids(DraftTokenIds([*handed], [*handed.values()]))
        taken = []
        for name, token_ids in handed.items():
            # a list of its own, or what a grammar left of it; but not the list from before
            if name in before and (kept := requests[name].spec_token_ids) is not before[name]:
                has_grammar = requests[name].use_structured_output
                is_cut = has_grammar and not run.known[name].is_prefill_chunk
                if kept == (token_ids[: len(kept)] if is_cut else token_ids):
                    taken.append(name)
        return v.DraftsTaken(tuple(taken))

    def _mask(self, frame_id: v.FrameId, drafts: tuple[v.RowTokens, ...]) -> v.GrammarOutput:
        """Return a bitmask.

        Source: what the loop of `EngineCore` calls before a frame samples.

        These are `update_draft_token_ids_in_output`, if drafts stay with the worker, and
        `get_grammar_bitmask`.
        """
        frame = self.run.frames[frame_id]
        if drafts:
            names = [row.request_id for row in drafts]
            proposed = DraftTokenIds(names, [list(row.token_ids) for row in drafts])
            self.scheduler.update_draft_token_ids_in_output(proposed, frame)
        return read_mask(self.run, frame, self.scheduler.get_grammar_bitmask(frame))

    def _abort(self, request_ids: tuple[v.RequestId, ...]) -> v.Aborted:
        """Abort requests.

        Source: `finish_requests`, one id at a time unless `abort_singly` is off.

        Its return value differs between releases; the finished ones are those that are no longer
        there.
        """
        ended: list[v.RequestId] = []
        batches = [(name,) for name in request_ids] if self.abort_singly else [request_ids]
        for batch in batches:
            unfinished = self.run.get_unfinished()
            there = [name for name in dict.fromkeys(batch) if name in unfinished]
            self.scheduler.finish_requests(batch, RequestStatus.FINISHED_ABORTED)
            unfinished = self.run.get_unfinished()
            ended += [name for name in there if name not in unfinished]
        self.run.ended.update(ended)
        return v.Aborted(tuple(ended))


class VllmWithStore(VllmEngine):
    """The same, with a store even if no profile follows it yet: for hunts (`--with transfers`).

    A release whose connectors the adapter cannot use says so by its capabilities.
    """

    shows_store = RELEASE.has_store
