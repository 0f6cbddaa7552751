"""HostEngine: applies one event at a time and returns its observation."""

from __future__ import annotations

from typing import assert_never

from blockstep.impl.capabilities import HOST
from blockstep.impl.grammars import make_matcher
from blockstep.impl.host.drafts import Proposals
from blockstep.impl.host.forks import Forks
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.planning import Planning
from blockstep.impl.host.table import Session
from blockstep.impl.host.view import take_snapshot
from blockstep.impl.refusals import held_by_transfer, submit_problem
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    Clock,
    Commit,
    Drafts,
    EncoderOffer,
    EncoderReset,
    Event,
    Fork,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    KVOffer,
    Observation,
    PinEstimate,
    Rejected,
    Request,
    RequestId,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    Snapshot,
    Status,
    StreamingUpdate,
    Submit,
    TransfersReported,
    event_problem,
)


class HostEngine(Planning, Forks, Proposals):
    """The scheduler and its paged KV memory on one CPU core.

    Args:
        config: the constants of the run.
        digest: hashes block contents: "sha256", "crc32" (then each hit is verified), or your own.

    Raises:
        ConfigError: `list_config_problems` finds a problem in the config.
        ValueError: no digest has this name.
    """

    def apply(self, event: Event) -> Observation:
        """Apply one event and return its observation.

        Never raises; a rejected event changes nothing.
        """
        problem = event_problem(event)
        if problem is not None:
            return problem
        match event:
            case Schedule():
                return self._schedule()
            case Commit():
                return self._commit(event)
            case Submit(request=request):
                answer = self._submit(request)
                if isinstance(answer, Ack) and self.config.enable_prefix_caching:
                    # Now, and not in the step that admits it: a step has others waiting.
                    self.table.lineages[self.table.slot_of[request.request_id]].name_blocks()
                return answer
            case Drafts():
                return self._take_proposals(event)
            case Abort(request_ids=request_ids):
                return self._abort(request_ids)
            case GrammarReady(request_id=request_id):
                return self._set_grammar_ready(request_id)
            case GrammarFailed(request_id=request_id):
                return self._fail_grammar(request_id)
            case GrammarBitmask():
                return self._make_mask(event)
            case StreamingUpdate(request=request):
                return self._update(request)
            case SetPause(pause_state=pause_state):
                self.pause_state = pause_state
                return Ack()
            case Reset():
                is_done = self._reset_both(event)
                return ResetDone(is_done, self._tell() if is_done else ())
            case TransfersReported(transfers=transfers):
                return self._take_report(transfers)
            case Fork():
                return self._fork(event)
            case _:
                self._take_message(event)
                return Ack()

    def _take_message(
        self, event: EncoderReset | EncoderOffer | KVOffer | Clock | PinEstimate
    ) -> None:
        """Take a message about the encoder cache, the store or the pins."""
        match event:
            case EncoderReset():
                if self.encoder is not None:
                    self.encoder.reset()
            case EncoderOffer(identifiers=identifiers):
                if self.encoder is not None:
                    self.encoder.offered = frozenset(identifiers)
            case KVOffer(request_id=request_id):
                if self.transfers is not None and request_id in self.table.slot_of:
                    self.transfers.take_offer(event)
            case Clock(now=now):
                if self.pins is not None:
                    self.pins.tell_time(now)
            case PinEstimate():
                if self.pins is not None:
                    self.pins.take_estimate(event)
            case _:
                assert_never(event)

    def snapshot(self) -> Snapshot:
        """Return the whole state in canonical form. O(blocks and tokens); not used by a step."""
        return take_snapshot(self)

    def capabilities(self) -> frozenset[str]:
        """Return the engine's capabilities, as values of conformance's `Capability`."""
        return HOST

    def _submit(self, request: Request) -> Ack | Rejected:
        problem = self._submit_problem(request)
        if problem is not None:
            return problem
        max_known = min(len(request.prompt_token_ids) + request.max_tokens, self.max_model_len)
        lineage = Lineage(request, self.block_size, self.digest)
        matcher = make_matcher(self.config, request)
        if matcher is not None:
            self.matchers[request.request_id] = matcher
        if request.resumable:
            self.sessions[request.request_id] = Session()
        if self.pins is not None:
            self.pins.begin_turn(request.job_id)
        if request.structured_output:
            status = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.skipped_waiting.append(self.table.add(request, lineage, status, max_known))
        else:
            self.waiting.append(self.table.add(request, lineage, Status.WAITING, max_known))
        return Ack()

    def _submit_problem(self, request: Request) -> Rejected | None:
        if self.transfers is not None and request.request_id in self.transfers.held:
            return held_by_transfer(request.request_id)
        return submit_problem(
            self.config,
            request,
            self._most_blocks(request),
            request.request_id in self.table.slot_of,
            self.is_in_flight(request.request_id),
        ) or self._other_size_problem(request)

    def _abort(self, request_ids: tuple[RequestId, ...]) -> Aborted:
        ended: list[RequestId] = []
        for request_id in request_ids:
            slot = self.table.slot_of.get(request_id)
            if slot is not None:
                self._finish(slot)
                ended.append(request_id)
        return Aborted(tuple(ended))

    def _reset_both(self, event: Reset) -> bool:
        """Empty the prefix cache and, if asked, the store's offers; return whether it was
        possible."""
        may_reset = self._can_reset_transfers(event.reset_connector)
        if not may_reset or not self._reset(event.reset_running_requests):
            return False
        if event.reset_connector and self.transfers is not None:
            self.transfers.offers.clear()
        return True

    def _reset(self, reset_running_requests: bool) -> bool:
        """Empty the prefix cache; return whether it was possible (P25)."""
        if reset_running_requests:
            while self.running:
                self._preempt(self.running.pop())
            for slot in self._list_idle():
                self._take_back(slot)
            self.prev_scheduled_req_ids = ()
        elif not self._is_unused():
            return False
        if self.pins is not None:
            self._end_pins([*self.pins.pins])
        self.prefix.clear()
        return True

    def _is_unused(self) -> bool:
        """Return whether no block is held, except by pins."""
        if self.pins is None:
            return self.pool.is_unused()
        return sum(self.pool.ref_counts) == self.pins.count_holds()

    def _can_reset_transfers(self, reset_connector: bool) -> bool:
        """Return whether a reset is possible: no load is under way and no transfer holds blocks
        (P17)."""
        if self.transfers is None:
            return not reset_connector
        statuses, parked = self.table.statuses, Status.WAITING_FOR_REMOTE_KVS
        under_way = any(
            statuses[slot] is parked and not self._has_received(slot)
            for slot in self.table.slot_of.values()
        )
        return not under_way and not self.transfers.held
