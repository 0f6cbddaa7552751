"""What is known of a store: loads and holds under way, from events and answers up to now.

Part of the `Ledger`. What a report means is worked out here, for those who judge what came of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from blockstep.conformance.judge.properties.step import PlannedRow, Step, is_parked
from blockstep.conformance.protocol.transfers import Transfers, count_valid, loses_all
from blockstep.spec import vocabulary as v


def has_lost_all(config: v.Config, request: v.RequestSnapshot) -> bool:
    """Whether a request keeps its blocks only to give them back, once its load has come to its end:
    of that nothing is left."""
    return is_parked(request) and not request.num_computed_tokens and loses_all(config)


@dataclass(slots=True)
class StoreLedger:
    """Everything learnt of transfers. Without a connector nothing is."""

    config: v.Config
    transfers: Transfers = field(default_factory=Transfers)
    unsettled: dict[v.RequestId, v.FrameId] = field(default_factory=dict)
    """Who runs, and by which frame in flight it is loaded."""
    held: dict[v.RequestId, v.HeldBlocks] = field(default_factory=dict)
    """What ended requests have left with the store, as the last state shows."""
    parked: dict[v.RequestId, v.KVLoad] = field(default_factory=dict)
    """The last asynchronous load of each request; also behind its end."""
    parked_as: dict[v.RequestId, v.Status] = field(default_factory=dict)
    """What they were when they were parked."""

    def record(self, step: Step, live: Iterable[v.RequestId]) -> None:
        """Learn from an event of which the rest of the ledger has learnt already."""
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
        """A request ends."""
        self.transfers.end(name)
        self.unsettled.pop(name, None)

    # What an event that is not recorded yet means.

    def count_loaded(self, step: Step, row: PlannedRow) -> int:
        """Tokens before an admitted row that a store loaded: in the row's own plan, or while its
        request was parked."""
        name = row.request_id
        load = step.loads.get(name)
        if load is not None:
            return load.num_external_tokens
        old = step.old[name]
        if not (is_parked(old) and old.num_computed_tokens and name in self.parked):
            return 0
        return max(row.first - self.parked[name].num_computed_tokens, 0)

    def get_report(self, step: Step) -> v.KVTransfers:
        """What a worker reports with an event."""
        if isinstance(step.event, (v.Commit, v.TransfersReported)):
            return step.event.transfers
        return v.NO_TRANSFERS

    def list_arrived(self, step: Step) -> list[v.RequestId]:
        """Requests whose load is under way until this event reports its end."""
        return [it for it in self.get_report(step).finished_recving if it in self.transfers.loading]

    def list_read(self, step: Step) -> list[v.RequestId]:
        """Ended requests whose blocks the store reads until this event reports its end."""
        return [it for it in self.get_report(step).finished_sending if it in self.transfers.sending]

    def is_under_way(self, request: v.RequestSnapshot) -> bool:
        """Whether a request is parked, and the end of its load was not reported."""
        return is_parked(request) and request.request_id in self.transfers.loading

    def find_hold(self, request: v.RequestSnapshot) -> v.HeldBlocks | None:
        """What a request leaves with the store if it ends as it is: a load that is under way, or
        blocks that the store wants to read. None: it gives its blocks back."""
        name, is_recving = request.request_id, self.is_under_way(request)
        is_sending = self.transfers.get_offer(name).delays_free
        if not any(request.block_tables) or not (is_recving or is_sending):
            return None
        return v.HeldBlocks(name, request.block_tables, is_recving, is_sending)

    def is_unsettled_after(self, step: Step, name: v.RequestId) -> bool:
        """Whether one who has a row in a plan may not have what was loaded for it."""
        load = step.loads.get(name) if step.plan.kv_loads else None
        return name in self.unsettled or (load is not None and not load.is_async)

    def find_failed(self, step: Step) -> dict[v.RequestId, int]:
        """Parked ones of whose load a block is reported as invalid, in the order of the queues, and
        how many leading tokens of each are there."""
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
        """Whose row of the frame that is answered is void, for its load has failed, in the order of
        the plan, and how many leading tokens of each are there.

        Who runs and holds the blocks of that load still; and who does not run, and waits for tokens
        of frames in flight, `sampling`: those are void as well.
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
        """Who runs, and is preempted by a commit, for its load has failed and leaves nothing."""
        policy = self.config.kv_load_failure_policy
        if policy is not v.KVLoadFailurePolicy.RECOMPUTE or not loses_all(self.config):
            return []
        void = self.find_void(step, sampling)
        return [name for name in void if self.unsettled.get(name) == step.commit.frame_id]

    def list_settled(self, step: Step) -> list[v.RequestId]:
        """Who is settled by a commit: it runs, and all that was loaded for it is there."""
        if not (isinstance(step.event, v.Commit) and self.unsettled):
            return []
        frame_id = step.event.frame_id
        void = self.find_void(step, ())
        loads = self.transfers.at_once.get(frame_id, ())
        names = [load.request_id for load in loads]
        return [name for name in names if self.unsettled.get(name) == frame_id and name not in void]
