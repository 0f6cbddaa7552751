"""The state of a store that follows from events and answers: loads, reads and holds.

Part of the `Ledger`. It also works out what a report of transfers means, for the checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from blockstep.conformance.judge.properties.observed_step import PlannedRow, Step, is_parked
from blockstep.conformance.protocol.transfer_tracker import Transfers, count_valid, loses_all
from blockstep.spec import vocabulary as v


def has_lost_all(config: v.Config, request: v.RequestSnapshot) -> bool:
    """Whether nothing of a request's load is present, so that it keeps its blocks only to give them
    back."""
    return is_parked(request) and not request.num_computed_tokens and loses_all(config)


@dataclass(slots=True)
class StoreHistory:
    """Everything learnt about transfers; empty without a connector."""

    config: v.Config
    transfers: Transfers = field(default_factory=Transfers)
    unsettled: dict[v.RequestId, v.FrameId] = field(default_factory=dict)
    """Running requests with an unconfirmed load, and the frame in flight that loads it."""
    held: dict[v.RequestId, v.HeldBlocks] = field(default_factory=dict)
    """Blocks of ended requests that transfers hold, as the last state shows."""
    parked: dict[v.RequestId, v.KVLoad] = field(default_factory=dict)
    """The last asynchronous load of each request, kept after its end."""
    parked_as: dict[v.RequestId, v.Status] = field(default_factory=dict)
    """The status of each request before its asynchronous load."""

    def record(self, step: Step, live: Iterable[v.RequestId]) -> None:
        """Learn from an event; the rest of the history has recorded it already."""
        transfers = self.transfers
        match step.event, step.observation:
            case v.KVOffer(request_id=name) as offer, _ if name in live:
                transfers.offer(offer)
            case _, v.Plan() as plan:
                for name in plan.preempted_req_ids if self.unsettled else ():
                    self.unsettled.pop(name, None)
                transfers.plan(plan)
                for load in plan.kv_loads:
                    if load.is_async:
                        self.parked[load.request_id] = load
                        old = step.old.get(load.request_id)
                        if old is not None and not is_parked(old):
                            self.parked_as[load.request_id] = old.status
                    else:
                        self.unsettled[load.request_id] = plan.frame_id
            case v.Commit(frame_id=frame_id, transfers=report), _:
                transfers.at_once.pop(frame_id, None)
                for name in [name for name, at in self.unsettled.items() if at == frame_id]:
                    del self.unsettled[name]
                transfers.take(report, live)
            case v.TransfersReported(transfers=report), _:
                transfers.take(report, live)
            case v.Reset(reset_running_requests=forced, reset_connector=both), v.ResetDone(
                success=True
            ):
                if forced:
                    self.unsettled.clear()
                if both:
                    transfers.forget_offers()
        after = step.after.transfers
        self.held = {} if after is None else {held.request_id: held for held in after.held}

    def end(self, name: v.RequestId) -> None:
        """Note that a request ended."""
        self.transfers.end(name)
        self.unsettled.pop(name, None)

    # The meaning of an event that is not recorded yet.

    def count_loaded(self, step: Step, row: PlannedRow) -> int:
        """Tokens before an admitted row that a store loaded, by the plan of the row or
        asynchronously."""
        name = row.request_id
        load = step.loads.get(name)
        if load is not None:
            return load.num_external_tokens
        old = step.old[name]
        if not (is_parked(old) and old.num_computed_tokens and name in self.parked):
            return 0
        return max(row.first - self.parked[name].num_computed_tokens, 0)

    def get_report(self, step: Step) -> v.KVTransfers:
        """The report of transfers in an event."""
        if isinstance(step.event, (v.Commit, v.TransfersReported)):
            return step.event.transfers
        return v.NO_TRANSFERS

    def list_arrived(self, step: Step) -> list[v.RequestId]:
        """Requests whose load this event reports as done."""
        return [it for it in self.get_report(step).finished_recving if it in self.transfers.loading]

    def list_read(self, step: Step) -> list[v.RequestId]:
        """Ended requests whose blocks the store has read, as this event reports."""
        return [it for it in self.get_report(step).finished_sending if it in self.transfers.sending]

    def is_under_way(self, request: v.RequestSnapshot) -> bool:
        """Whether a request waits for a load whose end was not reported."""
        return is_parked(request) and request.request_id in self.transfers.loading

    def find_hold(self, request: v.RequestSnapshot) -> v.HeldBlocks | None:
        """The hold that a request leaves if it ends now: for its load, or for the store's read of
        its blocks. None if its blocks become free."""
        name, is_recving = request.request_id, self.is_under_way(request)
        is_sending = self.transfers.get_offer(name).delays_free
        if not any(request.block_tables) or not (is_recving or is_sending):
            return None
        return v.HeldBlocks(name, request.block_tables, is_recving, is_sending)

    def is_unsettled_after(self, step: Step, name: v.RequestId) -> bool:
        """Whether the load of a request with a row is unconfirmed after a plan."""
        load = step.loads.get(name) if step.plan.kv_loads else None
        return name in self.unsettled or (load is not None and not load.is_async)

    def find_failed(self, step: Step) -> dict[v.RequestId, int]:
        """Requests with an asynchronous load of which a block is reported as invalid, in queue
        order, with the number of leading tokens that are present."""
        invalid = self.get_report(step).invalid_block_ids
        found: dict[v.RequestId, int] = {}
        if invalid:
            before = step.before
            for name in (*before.skipped_waiting, *before.waiting):
                if is_parked(step.old[name]) and name in self.parked:
                    valid = count_valid(self.parked[name], self.config, invalid)
                    if valid is not None:
                        found[name] = valid
        return found

    def find_void(self, step: Step, sampling: Iterable[v.RequestId]) -> dict[v.RequestId, int]:
        """Requests whose row in the committed frame is void because their load failed, in the order
        of the plan, with the number of leading tokens that are present.

        A running request must still hold the blocks of that load. A request that does not run is
        included if it waits for tokens of frames in flight (`sampling`), which are void, too.
        """
        report, found = self.get_report(step), dict[v.RequestId, int]()
        if not (isinstance(step.event, v.Commit) and report.invalid_block_ids):
            return found
        frame_id, names = step.event.frame_id, set(sampling)
        for load in self.transfers.at_once.get(frame_id, ()):
            valid, name = count_valid(load, self.config, report.invalid_block_ids), load.request_id
            if valid is None or name not in step.old:
                continue
            waits = name in names and step.old[name].status is not v.Status.RUNNING
            if self.unsettled.get(name) == frame_id or waits:
                found[name] = valid
        return found

    def list_lost(self, step: Step, sampling: Iterable[v.RequestId]) -> list[v.RequestId]:
        """Running requests that a commit preempts because nothing of their load is present."""
        policy = self.config.kv_load_failure_policy
        if policy is not v.KVLoadFailurePolicy.RECOMPUTE or not loses_all(self.config):
            return []
        void = self.find_void(step, sampling)
        return [name for name in void if self.unsettled.get(name) == step.commit.frame_id]

    def list_confirmed(self, step: Step) -> list[v.RequestId]:
        """Running requests whose load a commit confirms."""
        if not (isinstance(step.event, v.Commit) and self.unsettled):
            return []
        frame_id = step.event.frame_id
        void = self.find_void(step, ())
        loads = self.transfers.at_once.get(frame_id, ())
        names = [load.request_id for load in loads]
        return [name for name in names if self.unsettled.get(name) == frame_id and name not in void]
