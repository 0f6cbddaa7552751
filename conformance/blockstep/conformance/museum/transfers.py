"""Transfers: KV that comes from a store, late or broken, and blocks that outlive their requests.

These are given a store beside what all others have; a page of their own has several KV groups, too.
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
PART = "transfers_type"
_PARKED = Status.WAITING_FOR_REMOTE_KVS


# Who is parked and has what it waits for.


@PAGE.exhibit("loads that have come stand behind a head that does not fit", "#57841, #45388", "P10")
class LoadedBehindTheHead(Defect):
    """They hold what the head lacks, and nobody looks at them."""

    def _admit_behind(self, _transfers: Any, _head: int, _step: Any) -> None:
        return None

    def _may_give(self, slot: int) -> Any:
        return self.table.statuses[slot] is not _PARKED and super()._may_give(slot)


@PAGE.exhibit(
    "behind a head that does not fit loads that have come are let in, and never give way",
    "#57841, #45406",
    "P10",
    wrong_fix_of="loaded-behind-the-head",
)
class LoadedNeverGiveWay(Defect):
    """Of two whose loads have come each may lack what the other holds."""

    def _may_give(self, slot: int) -> Any:
        return self.table.statuses[slot] is not _PARKED and super()._may_give(slot)


@PAGE.exhibit(
    "behind a head that does not fit loads that have come give way, and are never let in",
    "#57841",
    "P15 P16",
    wrong_fix_of="loaded-behind-the-head",
    invisible="efficiency: what was loaded is loaded again",
)
class LoadedGiveWayAlone(Defect):
    """What could go on at once is taken from them as soon as nobody runs."""

    def _admit_behind(self, _transfers: Any, _head: int, _step: Any) -> None:
        return None


@PAGE.exhibit(
    "who gives way gives blocks that are still being loaded",
    "#57841, #32255",
    "P17 P2",
    wrong_fix_of="loaded-behind-the-head",
)
class LoadUnderWayGivesWay(Defect):
    """What comes is written into blocks of somebody else."""

    def _list_idle(self, passed_over: Any = ()) -> Any:
        line = [*passed_over, *self.skipped_waiting, *self.waiting]
        parked = [slot for slot in line if self.table.statuses[slot] is _PARKED]
        return [*dict.fromkeys([*super()._list_idle(passed_over), *parked])]


@PAGE.exhibit("who comes back from a load is new to the worker", "#31583", "P26 P16")
class NewAfterALoad(Defect):
    """It was preempted before, and the worker has its outputs."""

    def _unpark(self, slot: int) -> None:
        super()._unpark(slot)
        self.table.statuses[slot] = Status.WAITING


@PAGE.exhibit(
    "who does not fit when its load has come is published all the same",
    "vLLM 0.19.1 _update_waiting_for_remote_kv",
    "P7",
)
class PublishedThoughNotLetIn(Defect):
    """A refused admission has told others of blocks."""

    def _try_go_on(self, slot: int, queue: Any, step: Any) -> Any:
        if self.table.statuses[slot] is _PARKED:
            self._publish(slot, self.table.num_computed[slot], 0)
        return super()._try_go_on(slot, queue, step)


# What a load is.


@PAGE.exhibit("all known tokens are loaded", "#30320, #11186", "P10 P12 P11 P13", part=PART)
class FullLoad(Defect):
    """There is nothing left to compute, and nothing to sample behind."""

    def find_load(self, request: Any, num_hit: int, num_known: int) -> Any:
        return super().find_load(request, num_hit, num_known + 1)


@PAGE.exhibit(
    "a token is left of what is offered",
    "#53706",
    "P15",
    part=PART,
    wrong_fix_of="full-load",
    invisible="efficiency: a token more is computed",
)
class OneTokenLessThanOffered(Defect):
    """Also where more tokens are known."""

    def find_load(self, request: Any, num_hit: int, num_known: int) -> Any:
        offer = self._find_offer(request)
        at_most = num_known if offer is None else min(offer.num_tokens or 0, num_known)
        return super().find_load(request, num_hit, at_most)


@PAGE.exhibit(
    "a full load is found, and its last token computed anew",
    "vLLM 0.19.1 _update_waiting_for_remote_kv",
    "P2 P4 P3",
    wrong_fix_of="full-load",
)
class FullLoadIsCutAtItsReturn(Defect):
    """One slot is written in a block that others may have taken by then."""

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


@PAGE.exhibit("who reads no prefix loads one", "#57269, #28194", "P26 P13 P21", part=PART)
class LoadedThoughItMustCompute(Defect):
    """It wants a logprob of every token of its prompt."""

    def _find_offer(self, request: Any) -> Any:
        return super()._find_offer(replace(request, skip_reading_prefix_cache=False))


@PAGE.exhibit("what is loaded is not charged", "#46892", "P8")
class LoadIsFree(Defect):
    """The check sees the tokens of the step alone, and more is taken."""

    def _fits(self, groups: Any, slot: int, hits: Any, extent: Any) -> Any:
        ahead = min(hits.num_tokens + 1, extent.num_tokens)
        return super()._fits(groups, slot, hits, type(extent)(ahead, ahead))


@PAGE.exhibit(
    "a load is found before it has come", "#49250; vLLM 0.19.1 allocate_slots", "P19 P4 P3"
)
class FoundBeforeItCame(Defect):
    """Who shares it computes on what may never come."""

    def _is_unsettled(self, _slot: int) -> bool:
        return False


@PAGE.exhibit(
    "a load that failed is found no more, by those who come then",
    "#49250, #26813",
    "P19 P4 P3",
    wrong_fix_of="found-before-it-came",
)
class WithdrawnFromNewcomersOnly(FoundBeforeItCame):
    """Whoever shares it already trusts the owner to compute it anew."""

    def _recompute(self, transfers: Any, slot: int, valid: int) -> None:
        self.groups.withdraw(self.table.holdings[slot], valid)
        super()._recompute(transfers, slot, valid)


# What is reported of it.


@PAGE.exhibit("a report that comes late or twice ends the engine", "#53049, #50546, #51595", "P18")
class LateReportKills(Defect):
    """Who is said to have been loaded must be waiting for it."""

    def _take_finished(self, transfers: Any, report: Any) -> None:
        for request_id in report.finished_recving:
            slot = self.table.slot_of.get(request_id)
            assert slot is None or self.table.statuses[slot] is _PARKED
        super()._take_finished(transfers, report)


@PAGE.exhibit(
    "a report that comes late is kept for the next load",
    "#53049",
    "P18 P19 P4",
    wrong_fix_of="late-report-kills",
)
class LateReportIsKept(Defect):
    """Parked anew, a request reads what has not come."""

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


@PAGE.exhibit("what could not be loaded is computed on", "#49250, rule", "P19")
class InvalidIsPassedOver(Defect):
    """The report is read, and nobody acts on it."""

    def _find_valid(self, _block_tables: Any, _firsts: Any, _invalid: Any) -> None:
        return None


@PAGE.exhibit(
    "the row that read a broken load is delivered",
    "#26813, #19330",
    "P19 P13",
    wrong_fix_of="invalid-is-passed-over",
)
class BrokenRowIsDelivered(Defect):
    """The tokens are computed anew behind the first that was sampled from nothing."""

    def _drop_rows_behind(self, slot: int) -> None:
        name = self.table.requests[slot].request_id
        if self.transfers is None or name not in self.transfers.unsettled:
            super()._drop_rows_behind(slot)


# Whose the blocks are.


@PAGE.exhibit("an abort frees what is being loaded", "#32255", "P17 P2", part=PART)
class AbortFreesALoad(Defect):
    """What comes is written into blocks of somebody else."""

    def end(self, request_id: str, block_tables: Any) -> Any:
        self.received.add(request_id)
        return super().end(request_id, block_tables)


@PAGE.exhibit(
    "whoever is parked leaves its blocks to the load",
    "#32255, review",
    "P17",
    part=PART,
    wrong_fix_of="abort-frees-a-load",
)
class HeldWithoutAnEnd(Defect):
    """It may have come already: then nobody ever says so again."""

    def end(self, request_id: str, block_tables: Any) -> Any:
        self.received.discard(request_id)
        return super().end(request_id, block_tables)


@PAGE.exhibit(
    "a load that is done is not heard of who was aborted", "#46283, #46289", "P17", part=PART
)
class AbortedLoadIsKept(Defect):
    """Its blocks are lost."""

    def release(self, request_id: str, is_recving: bool) -> Any:
        return () if is_recving else super().release(request_id, is_recving)


@PAGE.exhibit(
    "one report ends both transfers", "vLLM 0.19.1 _update_from_kv_xfer_finished", "P17", part=PART
)
class OneReportEndsBoth(Defect):
    """The store still reads what another request writes, or the other way round."""

    def release(self, request_id: str, is_recving: bool) -> Any:
        return super().release(request_id, is_recving) or super().release(
            request_id, not is_recving
        )


@PAGE.exhibit("a reset takes what is being loaded", "vLLM 0.19.1 reset_prefix_cache", "P17 P25")
class ResetUnderALoad(Defect):
    """Nobody asks whether a transfer is under way."""

    def _can_reset_transfers(self, reset_connector: bool) -> Any:
        return self.transfers is not None or not reset_connector


# Blocks that a frame in flight reads or writes.


@PAGE.exhibit(
    "blocks are free while a frame in flight writes them, and are loaded into",
    "#45357, #47728, #48481, vllm-ascend #14055",
    "P17",
)
class FramesHoldNoBlocks(Defect):
    """Nothing orders a store behind the frame: it writes over what was loaded."""

    def _find_fence(self, _slot: int) -> None:
        return None


@PAGE.exhibit(
    "blocks wait for the oldest frame that names them",
    "rule P17",
    "P17",
    wrong_fix_of="frames-hold-no-blocks",
)
class OldestFrameHolds(Defect):
    """The frames behind it still read and write them."""

    def _find_fence(self, slot: int) -> Any:
        if super()._find_fence(slot) is None:
            return None
        name = self.table.requests[slot].request_id
        last = self.transfers.last_answered
        in_flight = [frame_id for frame_id in self.frames if frame_id > last]
        return min(frame_id for frame_id in in_flight if name in self.frames[frame_id])


@PAGE.exhibit(
    "blocks that wait for a frame are never free",
    "rule P17",
    "P17 P1 P10",
    wrong_fix_of="frames-hold-no-blocks",
    part=PART,
)
class FrameHoldsForEver(Defect):
    """The wait has an owner and no end."""

    def take_deferred(self, _frame_id: int) -> Any:
        return []


@GROUPS.exhibit(
    "what a window leaves is free while a frame in flight reads it",
    "#45357, by the rule of P17",
    "P17",
    wrong_fix_of="frames-hold-no-blocks",
)
class WindowsLeaveTooEarly(Defect):
    """Ends and preemptions wait for the frame, windows do not."""

    def _leave_blocks(self, groups: Any, slot: int) -> None:
        in_doubt = self._count_drafts_in_flight(slot)
        groups.leave(self.table.holdings[slot], self.table.num_computed[slot], in_doubt)


# Several groups.


@GROUPS.exhibit("a load eats a hit of the next group", "#33775, #44409", "P2 P1 P8 P16")
class LoadEatsAHit(Defect):
    """Only who loads nothing holds all of its hits first."""

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
    """Hits are held by turns, but only of who loads something."""

    loads = False

    def adopt(self, holdings: Any, hits: Any) -> None:
        if self.loads:
            super().adopt(holdings, hits)
        else:
            super(GroupByGroup, self).adopt(holdings, hits)


@cache
def _by_turns(groups_type: type[Any]) -> type[Any]:
    """One class for all engines, so that one of them can be kept and revived."""
    return type("Groups", (_LoadsGroupByGroup, groups_type), {})


@GROUPS.exhibit("a load that fails in one group is there in the others", "#35223", "P19")
class FirstGroupAlone(Defect):
    """Only the blocks of the first group are looked at."""

    def _find_valid(self, block_tables: Any, firsts: Any, invalid: Any) -> Any:
        return super()._find_valid(block_tables, firsts, invalid & set(block_tables[0]))


@GROUPS.exhibit(
    "of what failed in several groups the last one counts",
    "#35223, #48216",
    "P19",
    wrong_fix_of="first-group-alone",
)
class LastGroupCounts(Defect):
    """Each group in turn says how much is left, and not the least of it is taken."""

    def _find_valid(self, block_tables: Any, firsts: Any, invalid: Any) -> Any:
        found = None
        for table in block_tables:
            valid = super()._find_valid(block_tables, firsts, invalid & set(table))
            found = found if valid is None else valid
        return found
