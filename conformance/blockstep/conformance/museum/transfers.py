"""Seeded bugs in KV transfers: late or failed loads, and blocks that a transfer still uses.

Their episodes have a store; those of the page `GROUPS` have several KV groups as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.conformance.museum.groups import GroupByGroup
from blockstep.spec.vocabulary import Status

PAGE = Page(takes="transfers")
GROUPS = Page(takes_groups=True, takes="transfers")
STATES = Page(takes_groups=True, takes_states=True, takes="transfers")
PART = "transfers_type"
_PARKED = Status.WAITING_FOR_REMOTE_KVS


# Asynchronous loads that are complete.


@PAGE.exhibit(
    "completed loads wait behind a head of the queue that does not fit", "#57841, #45388", "P10"
)
class LoadedBehindTheHead(Defect):
    """They hold the blocks that the head lacks, and are neither admitted nor reclaimed."""

    def _admit_behind(self, _transfers: Any, _head: int, _step: Any) -> None:
        return None

    def _may_give(self, slot: int) -> Any:
        return self.table.statuses[slot] is not _PARKED and super()._may_give(slot)


@PAGE.exhibit(
    "behind a head that does not fit, completed loads are admitted, but never reclaimed",
    "#57841, #45406",
    "P10",
    wrong_fix_of="loaded-behind-the-head",
)
class LoadedNeverGiveWay(Defect):
    """Two requests with completed loads may each hold the blocks that the other one needs."""

    def _may_give(self, slot: int) -> Any:
        return self.table.statuses[slot] is not _PARKED and super()._may_give(slot)


@PAGE.exhibit(
    "behind a head that does not fit, completed loads are reclaimed, but never admitted",
    "#57841",
    "P15 P16",
    wrong_fix_of="loaded-behind-the-head",
    invisible="efficiency: blocks are loaded again",
)
class LoadedGiveWayAlone(Defect):
    """Requests that could run at once lose their blocks as soon as nothing runs."""

    def _admit_behind(self, _transfers: Any, _head: int, _step: Any) -> None:
        return None


@PAGE.exhibit(
    "blocks that are still being loaded are reclaimed",
    "#57841, #32255",
    "P17 P2",
    wrong_fix_of="loaded-behind-the-head",
)
class LoadUnderWayGivesWay(Defect):
    """The load writes into blocks that belong to another request by then."""

    def _list_idle(self, passed_over: Any = ()) -> Any:
        line = [*passed_over, *self.skipped_waiting, *self.waiting]
        parked = [slot for slot in line if self.table.statuses[slot] is _PARKED]
        return [*dict.fromkeys([*super()._list_idle(passed_over), *parked])]


@PAGE.exhibit("a preempted request is sent as new after a load", "#31583", "P26 P16")
class NewAfterALoad(Defect):
    """The worker has its outputs from before the preemption."""

    def _unpark(self, slot: int) -> None:
        super()._unpark(slot)
        self.table.statuses[slot] = Status.WAITING


@PAGE.exhibit(
    "blocks of a completed load are published although the request is not admitted",
    "vLLM 0.19.1 _update_waiting_for_remote_kv",
    "P7",
)
class PublishedThoughNotLetIn(Defect):
    """An admission that fails changes the prefix cache."""

    def _try_go_on(self, slot: int, queue: Any, step: Any) -> Any:
        if self.table.statuses[slot] is _PARKED:
            self._publish(slot, self.table.num_computed[slot], 0)
        return super()._try_go_on(slot, queue, step)


# How many tokens are loaded.


@PAGE.exhibit("all known tokens are loaded", "#30320, #11186", "P10 P12 P11 P13", part=PART)
class FullLoad(Defect):
    """No token is left to compute, so nothing can be sampled."""

    def find_load(self, request: Any, num_hit: int, num_known: int) -> Any:
        return super().find_load(request, num_hit, num_known + 1)


@PAGE.exhibit(
    "the last token that the store offers is never loaded",
    "#53706",
    "P15",
    part=PART,
    wrong_fix_of="full-load",
    invisible="efficiency: one more token is computed",
)
class OneTokenLessThanOffered(Defect):
    """This is needed only if the offer covers all known tokens."""

    def find_load(self, request: Any, num_hit: int, num_known: int) -> Any:
        offer = self._find_offer(request)
        at_most = num_known if offer is None else min(offer.num_tokens or 0, num_known)
        return super().find_load(request, num_hit, at_most)


@PAGE.exhibit(
    "after a load of all known tokens the last one is computed again",
    "vLLM 0.19.1 _update_waiting_for_remote_kv",
    "P2 P4 P3",
    wrong_fix_of="full-load",
)
class FullLoadIsCutAtItsReturn(Defect):
    """One slot is written again in a block that other requests may have hit by then."""

    def _find_load(self, slot: int, num_hit: int) -> Any:
        num_tokens, is_async = super()._find_load(slot, num_hit)
        if not is_async:
            return num_tokens, is_async
        request, num_known = self.table.requests[slot], self.table.num_known[slot]
        return self.transfers.find_load(request, num_hit, num_known + 1)

    def _try_go_on(self, slot: int, queue: Any, step: Any) -> Any:
        table = self.table
        if table.num_computed[slot] == table.num_known[slot]:
            self._publish(slot, table.num_computed[slot], 0)
            table.num_computed[slot] -= 1
        return super()._try_go_on(slot, queue, step)


@PAGE.exhibit(
    "a request that must not read the prefix cache loads from the store",
    "#57269, #28194",
    "P26 P13 P21",
    part=PART,
)
class LoadedThoughItMustCompute(Defect):
    """It needs prompt logprobs, so every token of its prompt has to be computed."""

    def _find_offer(self, request: Any) -> Any:
        return super()._find_offer(replace(request, skip_reading_prefix_cache=False))


@PAGE.exhibit("the capacity check does not count loaded tokens", "#46892", "P8")
class LoadIsFree(Defect):
    """The check counts the tokens of the step only; blocks for the load are taken as well."""

    def _fits(self, groups: Any, slot: int, hits: Any, extent: Any) -> Any:
        ahead = min(hits.num_tokens + 1, extent.num_tokens)
        return super()._fits(groups, slot, hits, type(extent)(ahead, ahead))


@PAGE.exhibit(
    "blocks of an unconfirmed load are published", "#49250; vLLM 0.19.1 allocate_slots", "P19 P4 P3"
)
class FoundBeforeItCame(Defect):
    """Other requests hit blocks whose load may still fail."""

    def _is_unsettled(self, _slot: int) -> bool:
        return False


@PAGE.exhibit(
    "after a failed load only new requests cannot hit its blocks",
    "#49250, #26813",
    "P19 P4 P3",
    wrong_fix_of="found-before-it-came",
)
class WithdrawnFromNewcomersOnly(FoundBeforeItCame):
    """Requests that already share these blocks rely on the owner to compute them again."""

    def _recompute(self, transfers: Any, slot: int, valid: int) -> None:
        self.groups.withdraw(self.table.holdings[slot], valid)
        super()._recompute(transfers, slot, valid)


# Reports of loads.


@PAGE.exhibit(
    "a late or repeated report of a load crashes the engine", "#53049, #50546, #51595", "P18"
)
class LateReportKills(Defect):
    """The code assumes that the reported request still waits for its load."""

    def _take_finished(self, transfers: Any, report: Any) -> None:
        for request_id in report.finished_recving:
            slot = self.table.slot_of.get(request_id)
            assert slot is None or self.table.statuses[slot] is _PARKED
        super()._take_finished(transfers, report)


@PAGE.exhibit(
    "a late report of a load counts for the next load",
    "#53049",
    "P18 P19 P4",
    wrong_fix_of="late-report-kills",
)
class LateReportIsKept(Defect):
    """A request that loads again reads blocks that are not loaded yet."""

    def _take_finished(self, transfers: Any, report: Any) -> None:
        super()._take_finished(transfers, report)
        self.__dict__.setdefault("early", set()).update(report.finished_recving)

    def _try_park(
        self, groups: Any, transfers: Any, slot: int, hits: Any, n: int, step: Any
    ) -> Any:
        is_parked = super()._try_park(groups, transfers, slot, hits, n, step)
        name = self.table.requests[slot].request_id
        if is_parked and name in self.__dict__.get("early", ()):
            transfers.received.add(name)
        return is_parked


@PAGE.exhibit("a request computes on after a failed load", "#49250, rule", "P19")
class InvalidIsPassedOver(Defect):
    """The report of invalid blocks is read, but ignored."""

    def _find_valid(self, _block_tables: Any, _firsts: Any, _invalid: Any) -> None:
        return None


@PAGE.exhibit(
    "the token of a row that read a failed load is delivered",
    "#26813, #19330",
    "P19 P13",
    wrong_fix_of="invalid-is-passed-over",
)
class BrokenRowIsDelivered(Defect):
    """The tokens are computed again, but after a token that was sampled from invalid KV."""

    def _drop_rows_behind(self, slot: int) -> None:
        name = self.table.requests[slot].request_id
        if self.transfers is None or name not in self.transfers.unsettled:
            super()._drop_rows_behind(slot)


# Which blocks a transfer holds.


@PAGE.exhibit("an abort frees blocks that are being loaded", "#32255", "P17 P2", part=PART)
class AbortFreesALoad(Defect):
    """The load writes into blocks that belong to another request by then."""

    def end(self, request_id: str, block_tables: Any) -> Any:
        self.received.add(request_id)
        return super().end(request_id, block_tables)


@PAGE.exhibit(
    "an aborted request leaves its blocks to a load that is already complete",
    "#32255, review",
    "P17",
    part=PART,
    wrong_fix_of="abort-frees-a-load",
)
class HeldWithoutAnEnd(Defect):
    """No other report will come for this load, so the blocks are never freed."""

    def end(self, request_id: str, block_tables: Any) -> Any:
        self.received.discard(request_id)
        return super().end(request_id, block_tables)


@PAGE.exhibit(
    "a completed load of an aborted request does not free its blocks",
    "#46283, #46289",
    "P17",
    part=PART,
)
class AbortedLoadIsKept(Defect):
    """The blocks leak."""

    def release(self, request_id: str, is_recving: bool) -> Any:
        return () if is_recving else super().release(request_id, is_recving)


@PAGE.exhibit(
    "the report of one transfer ends both transfers of a request",
    "vLLM 0.19.1 _update_from_kv_xfer_finished",
    "P17",
    part=PART,
)
class OneReportEndsBoth(Defect):
    """The store still reads or writes blocks of the transfer that was not reported."""

    def release(self, request_id: str, is_recving: bool) -> Any:
        return super().release(request_id, is_recving) or super().release(
            request_id, not is_recving
        )


# Blocks that a frame in flight reads or writes.


@PAGE.exhibit(
    "blocks are freed while a frame in flight writes them, and a load writes into them",
    "#45357, #47728, #48481, vllm-ascend #14055",
    "P17",
)
class FramesHoldNoBlocks(Defect):
    """The load is not ordered after the frame, so the frame overwrites the loaded KV."""

    def _find_fence(self, _slot: int) -> None:
        return None


@PAGE.exhibit(
    "blocks that wait for a frame are never freed",
    "rule P17",
    "P17 P1 P10",
    wrong_fix_of="frames-hold-no-blocks",
    part=PART,
)
class FrameHoldsForEver(Defect):
    """The wait is recorded, but never ends."""

    def take_deferred(self, _frame_id: int) -> Any:
        return []


@GROUPS.exhibit(
    "blocks that leave a sliding window are freed while a frame in flight reads them",
    "#45357, breaks P17",
    "P17",
    wrong_fix_of="frames-hold-no-blocks",
)
class WindowsLeaveTooEarly(Defect):
    """Finished and preempted requests wait for the frame; windows do not."""

    def _leave_blocks(self, groups: Any, slot: int) -> None:
        in_doubt = self._count_drafts_in_flight(slot)
        groups.leave(self.table.holdings[slot], self.table.num_computed[slot], in_doubt)


# Several KV groups.


@GROUPS.exhibit(
    "a load takes a hit of the next KV group as its new block", "#33775, #44409", "P2 P1 P8 P16"
)
class LoadEatsAHit(Defect):
    """Only requests without a load touch all of their hits first."""

    def __init__(self, *args: Any) -> None:
        clean: Any = type(self)
        self.groups_type = _by_turns(clean.groups_type)
        super().__init__(*args)

    def _find_load(self, slot: int, num_hit: int) -> Any:
        found = super()._find_load(slot, num_hit)
        if self.groups is not None:
            self.groups.loads = found[0] > 0
        return found


class _LoadsGroupByGroup(GroupByGroup):
    """Hits are touched one group after the other, but only for requests that load."""

    loads = False

    def adopt(self, holdings: Any, hits: Any) -> None:
        if self.loads:
            super().adopt(holdings, hits)
        else:
            super(GroupByGroup, self).adopt(holdings, hits)


@cache
def _by_turns(groups_type: type[Any]) -> type[Any]:
    """Return one class for all engines, so that an engine can be pickled."""
    return type("Groups", (_LoadsGroupByGroup, groups_type), {})


@GROUPS.exhibit("only the first KV group is checked for failed loads", "#35223", "P19")
class FirstGroupAlone(Defect):
    """Invalid blocks of the other groups are ignored."""

    def _find_valid(self, block_tables: Any, firsts: Any, invalid: Any) -> Any:
        return super()._find_valid(block_tables, firsts, invalid & set(block_tables[0]))


@GROUPS.exhibit(
    "of failed loads in several KV groups only the last one counts",
    "#35223, #48216",
    "P19",
    wrong_fix_of="first-group-alone",
)
class LastGroupCounts(Defect):
    """Each group gives the number of valid tokens, but the minimum is not taken."""

    def _find_valid(self, block_tables: Any, firsts: Any, invalid: Any) -> Any:
        found = None
        for table in block_tables:
            valid = super()._find_valid(block_tables, firsts, invalid & set(table))
            found = found if valid is None else valid
        return found


# Loads of states.


@STATES.exhibit(
    "a state is loaded that includes the last token, which then runs once more",
    "#37310, #51094",
    "P3 P19 P5",
    part=PART,
)
class LoadedStateRunsTwice(Defect):
    """The store's state includes all tokens; all but the last count as loaded."""

    def find_load(self, request: Any, num_hit: int, num_known: int) -> Any:
        self.has_states = False
        return super().find_load(request, num_hit, num_known)


@STATES.exhibit("a plan has blocks zeroed that a store writes meanwhile", "#48481", "P17")
class ZeroedWhileLoaded(Defect):
    """The worker may zero a block after the store has written it."""

    def _try_park(
        self, groups: Any, transfers: Any, slot: int, hits: Any, num_external: int, step: Any
    ) -> bool:
        is_parked: bool = super()._try_park(groups, transfers, slot, hits, num_external, step)
        if is_parked:
            pairs = zip(self.table.holdings[slot], hits.tables, strict=True)
            step.taken.append(tuple([tuple(held.blocks[len(hit) :]) for held, hit in pairs]))
        return is_parked
