"""Step: one event with its answer, the states before and after it, and what follows from these.

A step is judged by its own facts. The `Ledger` has what the engine was given and answered before.
Nothing here knows how a scheduler decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar

from blockstep.conformance.judge.attention_ranges import blocks_of_drafts
from blockstep.conformance.protocol.feature import Kept
from blockstep.conformance.protocol.features import PARTS, list_kept
from blockstep.spec import vocabulary as v
from blockstep.spec.copies import wide_dataclass

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 - stands where a decorator does
    """A property of a step that is computed on first access and kept.

    `functools.cached_property` does the same under a lock, and a step is asked ten times.
    """

    def __init__(self, work_out: Callable[[Any], T]) -> None:
        self._work_out = work_out
        self.__doc__ = work_out.__doc__
        self._name = work_out.__name__

    def __get__(self, step: object, _kind: type) -> T:
        found = step.__dict__[self._name] = self._work_out(step)
        return found


_get_standing = attrgetter(
    *("requests", "waiting", "skipped_waiting", "running", "ref_counts", "free_queue"),
    *("block_keys", "cached", "transfers", *[part.name for part in PARTS]),
)
"""The parts of a state that most events leave unchanged; identical objects compare at once."""


def is_parked(request: v.RequestSnapshot) -> bool:
    """Whether a request waits for an asynchronous load, or for its admission after one."""
    return request.status is v.Status.WAITING_FOR_REMOTE_KVS


def keeps_blocks(request: v.RequestSnapshot) -> bool:
    """Whether a request that is not running may hold blocks: a session, one with an asynchronous
    load, or a branch before its first row."""
    status = request.status
    if request.prompt_token_ids or status is v.Status.WAITING_FOR_REMOTE_KVS:
        return True
    return status is v.Status.WAITING and any(request.block_tables)


class RowKind(StrEnum):
    """The way in which a request got into a plan."""

    RUNNING = "running"
    NEW = "new"
    RESUMED = "resumed"
    CONTINUED = "continued"
    """A session, a branch or a request whose load is done: admitted with the blocks that it kept.
    """
    PARKED = "parked"
    """No row: the request gets blocks for an asynchronous load."""


@wide_dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of a plan, new or cached."""

    request_id: v.RequestId
    kind: RowKind
    first: int
    """Computed tokens before the step: position of the first token that runs."""
    num_scheduled: int
    gained_tables: v.BlockTables
    """Per KV group. Running: blocks appended. Admitted: blocks after the hits."""
    hit_tables: v.BlockTables
    """Per KV group: the part of the table that the prefix hit fills, with null blocks for skipped
    blocks; empty for a running row that is not remapped."""
    drafts: v.TokenIds = ()
    is_remapped: bool = False
    """Running, with another block table: `hits` and `gained` are the whole table."""
    moved: frozenset[v.BlockId] = frozenset()
    """State blocks of drafts; where one is appended again it is not a new block."""
    num_external: int = 0
    """Tokens after the hit that a store loads, before the first token that runs."""
    kept_tables: v.BlockTables = ()
    """Per KV group, for a request that continues with copied blocks: the blocks in the places of
    its old ones; empty for others."""
    copies: tuple[tuple[v.BlockCopy, ...], ...] = ()
    """Per KV group, for the same requests: shared blocks, each replaced by a new one."""

    @property
    def gained(self) -> tuple[v.BlockId, ...]:
        """Blocks gained, in the order of groups; in each group the copies first."""
        tables = self.gained_tables
        if self.copies:
            pairs = zip(self.copies, tables, strict=True)
            return tuple(
                [b for one, table in pairs for b in (*[c.destination for c in one], *table)]
            )
        if len(tables) == 1 and not self.moved and v.NULL_BLOCK not in tables[0]:
            return tables[0]
        taken = chain(*tables)
        return tuple([block for block in taken if block and block not in self.moved])

    @property
    def hits(self) -> tuple[v.BlockId, ...]:
        """Blocks hit, in the order of groups."""
        tables = self.hit_tables
        return tables[0] if len(tables) == 1 else tuple(filter(None, chain(*tables)))

    @property
    def num_hit(self) -> int:
        """Tokens of the prefix hit of a request that was admitted, or that waits for its load."""
        return self.first - self.num_external

    @property
    def end(self) -> int:
        """One past the last position that runs."""
        return self.first + self.num_scheduled


def is_exchanged(before: v.BlockId, after: v.BlockId) -> bool:
    """Whether a place of a block table has another block, and none was given back there."""
    return v.NULL_BLOCK not in (before, after) and before != after


@dataclass
class Step:
    """One event that an engine accepted, and the snapshots before and after it."""

    config: v.Config
    index: int
    event: v.Event
    observation: v.Observation
    before: v.Snapshot
    after: v.Snapshot
    worked_out: dict[object, Any] = field(default_factory=dict, init=False, repr=False)
    """Results that several checks share, by function: see `sentence.once_a_step`."""

    @once
    def groups(self) -> tuple[v.KVGroup, ...]:
        """The KV groups, also where there is only one."""
        return self.config.kv_groups

    @once
    def block_sizes(self) -> tuple[int, ...]:
        """Token slots per block of each KV group."""
        return self.config.block_sizes

    @once
    def old(self) -> dict[v.RequestId, v.RequestSnapshot]:
        """Unfinished requests before the step."""
        return {request.request_id: request for request in self.before.requests}

    @once
    def new(self) -> dict[v.RequestId, v.RequestSnapshot]:
        """Unfinished requests after the step."""
        return {request.request_id: request for request in self.after.requests}

    @once
    def changes(self) -> bool:
        """Whether requests, queues or pool differ from before the step.

        A check of a state need not be made again on an equal state.
        """
        return _get_standing(self.before) != _get_standing(self.after)

    @once
    def concerns_requests(self) -> bool:
        """Whether a plan has rows or loads, or preempted a request."""
        plan = self.plan
        return bool(plan.new or plan.cached or plan.kv_loads or self.preempted)

    @once
    def acts(self) -> bool:
        """Whether a plan may have taken or freed a block: it has rows, loads or victims, or a
        feature keeps blocks."""
        return self.concerns_requests or bool(list_kept(self.before))

    @once
    def preempted(self) -> list[v.RequestId]:
        """Requests that ran before the step and are preempted after it, in running order.

        A request that left the running list in a plan or a reset was preempted, whatever its
        status says.
        """
        new, preempted = self.new, v.Status.PREEMPTED
        running: Collection[v.RequestId] = new
        if isinstance(self.event, (v.Schedule, v.Reset)):
            running = set(self.after.running)
        return [
            name
            for name in self.before.running
            if name in new and (name not in running or new[name].status is preempted)
        ]

    @once
    def victims(self) -> set[v.RequestId]:
        """Requests that were preempted in the step, also those that it admitted again."""
        plan = self.observation
        rows = plan.cached if isinstance(plan, v.Plan) else ()
        again = [row.request_id for row in rows if row.resumed and row.request_id in self.place]
        return {*self.preempted, *again}

    @once
    def admits_no_request(self) -> bool:
        """Whether a plan ended before the waiting phase: it preempted, or admission is closed."""
        return bool(self.preempted) or self.after.admission_closed

    @once
    def place(self) -> dict[v.RequestId, int]:
        """Index of each request in the running list before the step."""
        return {name: index for index, name in enumerate(self.before.running)}

    @once
    def plan(self) -> v.Plan:
        """The plan that answers a `Schedule`."""
        assert isinstance(self.observation, v.Plan), "only an accepted Schedule has a plan"
        return self.observation

    @once
    def commit(self) -> v.Commit:
        """The event as a `Commit`."""
        assert isinstance(self.event, v.Commit), "another event is no commit"
        return self.event

    @once
    def sampled(self) -> dict[v.RequestId, v.TokenIds]:
        """Tokens that each request sampled, from the `Commit`."""
        return {row.request_id: row.token_ids for row in self.commit.sampled}

    @once
    def output_rows(self) -> tuple[v.OutputRow, ...]:
        """The output rows that answer a `Commit`."""
        assert isinstance(self.observation, v.Outputs), "only an accepted Commit has outputs"
        return self.observation.rows

    @once
    def ended(self) -> list[v.RequestId]:
        """Requests that a commit, a report or an abort ended, in the order of its answer."""
        if isinstance(self.observation, v.Aborted):
            return list(self.observation.request_ids)
        if not isinstance(self.observation, v.Outputs):
            return []
        return [row.request_id for row in self.output_rows if row.finish_reason is not None]

    @once
    def failed(self) -> list[v.RequestId]:
        """Requests that a commit or a report ended with an error, in the order of its answer."""
        error = v.FinishReason.ERROR
        return [row.request_id for row in self.output_rows if row.finish_reason is error]

    @once
    def delivered(self) -> dict[v.RequestId, v.TokenIds]:
        """Tokens that a commit delivers to each request."""
        return {row.request_id: row.new_token_ids for row in self.output_rows}

    @once
    def running_rows(self) -> list[PlannedRow]:
        """Rows of requests that were running, in the order in which they were scheduled."""
        return [self._row(row, RowKind.RUNNING) for row in self.plan.cached if not row.resumed]

    @once
    def admitted_rows(self) -> list[PlannedRow]:
        """Rows of admitted requests, new and resumed mixed, in order of admission.

        The plan has them in two lists, each in order of admission. Their common order is that of
        the running list; a wrong order of that list is none of the plan.
        """
        new = [self._row(row, self._kind_of(row)) for row in self.plan.new]
        resumed = [self._row(row, self._kind_of(row)) for row in self.plan.cached if row.resumed]
        if not (new and resumed):
            return new or resumed
        place = {name: index for index, name in enumerate(self.after.running)}
        return sorted([*new, *resumed], key=lambda row: place.get(row.request_id, len(place)))

    @once
    def loads(self) -> dict[v.RequestId, v.KVLoad]:
        """The load that a plan starts for each request."""
        return {load.request_id: load for load in self.plan.kv_loads}

    @once
    def parked(self) -> list[PlannedRow]:
        """Requests that get blocks for an asynchronous load, in the order of the plan."""
        found = []
        for load in self.plan.kv_loads:
            if load.is_async and load.request_id in self.old:
                start = load.num_computed_tokens + load.num_external_tokens
                # After the loaded blocks come state blocks of drafts, which no plan shows.
                new = self.new.get(load.request_id)
                tables = load.block_ids if new is None else new.block_tables
                hits, gained = self._cut(tables, load.num_computed_tokens)
                count = load.num_external_tokens
                found.append(
                    PlannedRow(
                        *(load.request_id, RowKind.PARKED, start, 0, gained, hits),
                        num_external=count,
                    )
                )
        return found

    @once
    def askers(self) -> list[PlannedRow]:
        """Requests that got blocks after a prefix hit: admitted ones, and those that wait for a
        load."""
        return self.newcomers + self.parked if self.plan.kv_loads else self.newcomers

    def _kind_of(self, row: v.NewRow | v.CachedRow) -> RowKind:
        """The kind of a new or resumed row: CONTINUED for a session, a branch or a finished load
        that keeps its blocks."""
        old = self.old.get(row.request_id)
        kind = RowKind.NEW if isinstance(row, v.NewRow) else RowKind.RESUMED
        if old is None or not any(old.block_tables) or row.request_id in self.loads:
            return kind
        if not (old.num_computed_tokens if is_parked(old) else keeps_blocks(old)):
            return kind
        tables = row.block_ids if isinstance(row, v.NewRow) else row.new_block_ids
        pairs = zip(old.block_tables, tables, strict=True)
        is_kept = row.num_computed_tokens == old.num_computed_tokens and all(
            len(planned) >= len(held)
            # Skipped blocks were given back since, shared ones were copied.
            and all(
                one in (block, v.NULL_BLOCK) or v.BlockCopy(block, one) in self.plan.block_copies
                for one, block in zip(planned, held, strict=False)
            )
            for held, planned in pairs
        )
        return RowKind.CONTINUED if is_kept else kind

    @once
    def newcomers(self) -> list[PlannedRow]:
        """Admitted rows of requests that held no blocks, which may have a prefix hit."""
        return [row for row in self.admitted_rows if row.kind is not RowKind.CONTINUED]

    @once
    def giving(self) -> list[v.RequestId]:
        """Requests that held blocks without running and whose blocks the step reclaimed: sessions,
        branches, and finished or failed loads."""
        runs = v.Status.RUNNING
        resting = [
            old
            for old in self.before.requests
            if old.status is not runs and any(old.block_tables) and keeps_blocks(old)
        ]
        if not resting:
            return []
        found = []
        rows = {row.request_id: row.kind for row in self.admitted_rows + self.parked}
        for old in resting:
            name = old.request_id
            if name not in self.place:
                new = self.new.get(name)
                if rows.get(name, RowKind.CONTINUED) is not RowKind.CONTINUED or (
                    new is not None and name not in rows and not any(new.block_tables)
                ):
                    found.append(name)
        return found

    @once
    def given_kept(self) -> list[Kept]:
        """Blocks that a feature kept and that a plan took before their time."""
        before = [kept for kept in list_kept(self.before) if not kept.is_due]
        after = [kept.entry for kept in list_kept(self.after)] if before else ()
        return [kept for kept in before if kept.entry not in after]

    @once
    def hides_what_was_given(self) -> bool:
        """Whether blocks of idle requests, or that a feature kept, were reclaimed at an unknown
        point of the step.

        Where nothing ran, the blocks may have been reclaimed for a request that was admitted
        earlier in the step, and hit again.
        """
        if self.giving or self.given_kept:
            return True
        kept = [row for row in self.admitted_rows if row.kind is RowKind.CONTINUED]
        if not kept:
            return False
        is_first = kept == self.admitted_rows[:1] and not self.parked
        return bool(self.config.groups) or not (self.running_rows or is_first)

    def _row(self, row: v.NewRow | v.CachedRow, kind: RowKind) -> PlannedRow:
        tables = row.block_ids if isinstance(row, v.NewRow) else row.new_block_ids
        first, count = row.num_computed_tokens, row.num_scheduled_tokens
        name, drafts = row.request_id, row.draft_token_ids
        is_remapped = kind is RowKind.RUNNING and name in self.plan.remapped_req_ids
        if self.config.enable_forks and (is_remapped or kind is RowKind.CONTINUED):
            return self._copying(row, kind, tables)
        if kind is RowKind.RUNNING and not is_remapped:
            no_hits: v.BlockTables = ((),) * len(tables)
            moved: frozenset[v.BlockId] = frozenset()
            if self.config.groups:
                pairs = zip(self.config.groups, self.old[name].block_tables, strict=True)
                moved = frozenset(chain(*[blocks_of_drafts(*pair) for pair in pairs]))
            return PlannedRow(name, kind, first, count, tables, no_hits, drafts, moved=moved)
        if kind is RowKind.CONTINUED:
            kept = [*map(len, self.old[name].block_tables)]
            gained = tuple([table[count:] for table, count in zip(tables, kept, strict=True)])
            return PlannedRow(name, kind, first, count, gained, ((),) * len(tables), drafts)
        load = self.loads.get(name) if self.plan.kv_loads else None
        num_external = load.num_external_tokens if load and not load.is_async else 0
        hits, gained = self._cut(tables, first - num_external)
        return PlannedRow(
            *(name, kind, first, count, gained, hits, drafts, is_remapped),
            num_external=num_external,
        )

    def _copying(
        self, row: v.NewRow | v.CachedRow, kind: RowKind, tables: v.BlockTables
    ) -> PlannedRow:
        """A row with whole block tables, of a request that continues with the blocks it held or
        their copies."""
        held = [*zip(self.old[row.request_id].block_tables, tables, strict=True)]
        kept = tuple([planned[: len(old)] for old, planned in held])
        gained = tuple([planned[len(old) :] for old, planned in held])
        copies = tuple(
            [
                tuple(
                    [
                        v.BlockCopy(*it)
                        for it in zip(old, planned, strict=False)
                        if is_exchanged(*it)
                    ]
                )
                for old, planned in held
            ]
        )
        return PlannedRow(
            *(row.request_id, kind, row.num_computed_tokens, row.num_scheduled_tokens),
            *(gained, ((),) * len(tables), row.draft_token_ids),
            kept_tables=kept,
            copies=copies,
        )

    def _cut(self, tables: v.BlockTables, num_hit: int) -> tuple[v.BlockTables, v.BlockTables]:
        """Split block tables at the end of a prefix hit: what the hit fills, and the rest."""
        held = [*zip(tables, self.block_sizes, strict=True)]
        hits = tuple([table[: num_hit // size] for table, size in held])
        return hits, tuple([table[num_hit // size :] for table, size in held])

    def tables_of(self, row: PlannedRow) -> v.BlockTables:
        """The block tables that a plan gives the request of a row, skipped blocks included."""
        tables = row.hit_tables
        is_kept = row.kind in (RowKind.RUNNING, RowKind.CONTINUED)
        if is_kept and not row.is_remapped:
            tables = row.kept_tables or self.old[row.request_id].block_tables
        pairs = zip(tables, row.gained_tables, strict=True)
        return tuple([table + gained for table, gained in pairs])

    @once
    def rows(self) -> list[PlannedRow]:
        """All rows in order of scheduling."""
        return self.running_rows + self.admitted_rows

    @once
    def all_gained(self) -> set[v.BlockId]:
        """Blocks that rows took from the free queue in this step."""
        return {block for row in self.rows for block in row.gained}
