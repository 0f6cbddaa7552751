"""Engines that are played as well as `host`, because some code runs only in them."""

from __future__ import annotations

import importlib
import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blockstep.spec.vocabulary import (
    CachedRow,
    Commit,
    Config,
    Event,
    FrameId,
    Observation,
    OutputRow,
    Outputs,
    Plan,
    Rejected,
    Schedule,
    Snapshot,
    TokenIds,
    event_problem,
)

COLLIDING = f"{__name__}:make_colliding"
COMPILED_ARRAYS = f"{__name__}:CompiledArrays"
BESIDE_TIERS = f"{__name__}:BesideTiers"
"""Names of the engines for `blockstep check --engine`."""
TIER_NAMES = "abcdefghijkl"
"""Names that tiers are asked to keep."""
NARROW = {"_SLOTS": 1, "TABLE_ENTRIES": 1, "_STEP": 2}
"""Constants of the compiled engine for the whole process, instead of 8, 2**26 and 2**24. Each table
has one row until it must grow, and between two labels there is room for one."""


def make_colliding(config: Config) -> Any:
    """Return the host engine with a digest of two bits, so that every hit must be verified.

    It is imported here, since a mutant's process imports the engine again.
    """
    host = importlib.import_module("blockstep.impl.host")
    return host.HostEngine(config, host.Digest("two bits", False, _digest_in_two_bits))


def _digest_in_two_bits(message: bytes) -> bytes:
    return bytes((zlib.crc32(message) & 3,))


class BesideTiers:
    """The host engine, together with two orders of tiers: ours and the specification's.

    At each event both get the same random operation, with a seed from the config; their results,
    their contents and the moves of ours must agree, or the engine raises.
    """

    def __init__(self, config: Config) -> None:
        self.engine = importlib.import_module("blockstep.impl.host").HostEngine(config)
        self._order: Any = importlib.import_module("blockstep.impl.tiers.order")
        self._rules: Any = importlib.import_module("blockstep.spec.beside.tiers")
        self._draw = random.Random(repr(config))  # noqa: S311
        capacities = [self._draw.randint(0, 4) for _ in range(self._draw.randint(1, 3))]
        self._ours = self._order.TierOrder(capacities)
        self._theirs = self._rules.create_tiers(capacities)
        self._places: dict[str, int] = {}
        """The tier to which the moves have brought each name."""
        for wrong in (-1, True, 1.0):
            try:
                self._order.TierOrder((1, wrong))
            except ValueError:
                continue
            raise AssertionError(f"a tier of {wrong} blocks is taken")

    def apply(self, event: Event) -> Observation:
        """Take one event, and run an operation on both orders."""
        names = self._draw.sample(TIER_NAMES, self._draw.randint(1, 6))
        num_held = self._rules.count_held(self._theirs, names)
        assert self._ours.count(names) == num_held
        match self._draw.randrange(20):
            case 0:
                self._clear()
            case number if number < 10:
                self._keep(names, self._draw.randint(0, num_held))
            case _:
                self._fetch(names, self._draw.choice((*names, "")))
        self._compare()
        answer: Observation = self.engine.apply(event)
        return answer

    def snapshot(self) -> Snapshot:
        """Return the engine's snapshot."""
        snapshot: Snapshot = self.engine.snapshot()
        return snapshot

    def capabilities(self) -> frozenset[str]:
        """Return the engine's capabilities."""
        capabilities: frozenset[str] = self.engine.capabilities()
        return capabilities

    def _clear(self) -> None:
        self._ours.clear()
        self._theirs = self._rules.clear(self._theirs)
        self._places.clear()

    def _keep(self, names: Sequence[str], first: int) -> None:
        self._theirs = self._rules.keep(self._theirs, names, first)
        for move in self._ours.keep(names, first):
            self._follow(move)
            held = Counter(self._places.values())
            assert all(held[at] <= room for at, room in enumerate(self._theirs.capacities))

    def _fetch(self, names: Sequence[str], unreadable: str) -> None:
        num_held = self._ours.count(names)
        self._theirs, found = self._rules.fetch(self._theirs, names, (unreadable,))
        if unreadable in names[:num_held]:
            self._ours.lose(unreadable)
            self._places.pop(unreadable)
        assert self._ours.count(names) == len(found)
        for move in self._ours.fetch(names[: len(found)]):
            self._follow(move)

    def _follow(self, move: Any) -> None:
        """Apply a move after checking that the name is in its source."""
        assert self._places.pop(move.name, None) == move.source
        if move.target is not None:
            self._places[move.name] = move.target

    def _compare(self) -> None:
        assert self._ours.list_tiers() == self._theirs.tiers
        levels = {name: at for at, tier in enumerate(self._theirs.tiers) for name in tier}
        assert self._places == levels
        for name in TIER_NAMES:
            assert self._ours.level_of(name) == levels.get(name)
            assert self._rules.is_held(self._theirs, name) == (name in levels)
        for at, tier in enumerate(self._theirs.tiers):
            assert self._ours.count_in(at) == len(tier)


class CompiledArrays:
    """The compiled engine, with plans and model outputs as arrays.

    Its results are read from arrays in one frame, and from objects in the next. Its tables grow row
    by row, its contents collide, and all that it allocates must be freed: a leak shows in no
    snapshot.
    """

    def __init__(self, config: Config) -> None:
        self.engine = self._make_engine(config)
        self._plans: dict[FrameId, Any] = {}
        """Plans in flight."""

    def _make_engine(self, config: Config) -> Any:
        compiled = importlib.import_module("blockstep.impl.compiled")
        _set_constants("blockstep.impl", ("names", "compiled.state"), NARROW)
        blocks: Any = importlib.import_module("blockstep.impl.compiled.blocks")
        blocks._hash_content = _hash_in_two_bits
        return compiled.CompiledEngine(config)

    def apply(self, event: Event) -> Observation:
        """Take one event; only a plan and its commit can be arrays."""
        match event:
            case Schedule():
                plan = self.engine.schedule_arrays()
                if isinstance(plan, Rejected):
                    return plan
                self._plans[plan.frame_id] = plan
                assert not any(plan.num_output_tokens[row] for row in plan.new_rows)
                assert plan.new_rows.keys().isdisjoint(plan.all_token_ids)
                return _read_objects(plan) if plan.frame_id % 2 else plan.build_plan()
            case Commit() if event_problem(event) is None:
                return self._commit(event)
        answer: Observation = self.engine.apply(event)
        return answer

    def snapshot(self) -> Snapshot:
        """Return the engine's snapshot, after checking that nothing is leaked."""
        _assert_nothing_leaks(self.engine.requests)
        snapshot: Snapshot = self.engine.snapshot()
        return snapshot

    def capabilities(self) -> frozenset[str]:
        """Return the engine's capabilities."""
        capabilities: frozenset[str] = self.engine.capabilities()
        return capabilities

    def _commit(self, event: Commit) -> Observation:
        plan = self._plans.get(event.frame_id)
        if plan is None:
            unknown: Rejected = self.engine.commit_arrays(event.frame_id, np.zeros(1, np.int32))
            return unknown
        answers = {row.request_id: row.token_ids for row in event.sampled}
        if len(event.sampled) != len(plan) or answers.keys() != set(plan.request_ids):
            refusal: Observation = self.engine.apply(event)  # arrays name no request
            return refusal
        rows = [answers[name] for name in plan.request_ids]
        outputs = self._commit_rows(event.frame_id, plan, rows)
        if isinstance(outputs, Rejected):
            return outputs
        del self._plans[event.frame_id]
        samples = [True] * len(rows) if plan.samples is None else plan.samples.tolist()
        assert samples == [len(tokens) > 0 for tokens in rows]
        if event.frame_id % 2 == 0:
            built: Outputs = outputs.build_outputs()
            return built
        return Outputs(tuple(map(_read_object, outputs.build_objects())))

    def _commit_rows(self, frame_id: FrameId, plan: Any, rows: list[TokenIds]) -> Any:
        """Commit the rows, without counts if they are not needed or must be rejected without
        them.
        """
        tokens, counts = plan.pack_answer(rows)
        for wrong in self._list_wrong_answers(plan, rows, tokens, counts):
            assert isinstance(self.engine.commit_arrays(frame_id, *wrong), Rejected)
        due = np.ones(len(rows), np.int32) if plan.samples is None else plan.samples
        if counts is not None:
            if len(tokens) != due.sum():
                assert isinstance(self.engine.commit_arrays(frame_id, tokens), Rejected)
            return self.engine.commit_arrays(frame_id, tokens, counts)
        lengths = np.array([len(row) for row in rows], np.int32)
        if lengths.sum() == due.sum() and (lengths != due).any():
            return self.engine.commit_arrays(frame_id, tokens, lengths)
        return self.engine.commit_arrays(frame_id, tokens)

    def _list_wrong_answers(
        self, plan: Any, rows: list[TokenIds], tokens: Any, counts: Any
    ) -> list[tuple[Any, Any]]:
        """Return wrong model outputs: a negative token, too many or few tokens or counts, other
        drafts.
        """
        places = np.arange(len(tokens))
        found = [(np.where(places, tokens, -1), counts)] if len(tokens) else []
        if counts is None:
            return found
        found += [(tokens[1:], counts)] if len(tokens) else []
        found += [(np.append(tokens, tokens[:1]), counts)] if len(tokens) else []
        found += [(tokens, counts[:-1]), (tokens, np.append(counts, counts[:1] * 0))]
        if all(
            row[:-1] == plan.draft_token_ids.get(at, ())[: len(row) - 1]
            for at, row in enumerate(rows)
        ):  # otherwise they are wrong already, or any token may follow a draft
            drafts = (~np.isin(places + 1, counts.cumsum())).nonzero()[0]
            found += [(tokens ^ (places == at), counts) for at in drafts]
        return found


def _set_constants(package: str, names: Sequence[str], values: Mapping[str, int]) -> None:
    """Set those of the constants that each of these modules has."""
    for name in names:
        constants = vars(importlib.import_module(f"{package}.{name}"))
        constants.update({key: values[key] for key in values if key in constants})


def _hash_in_two_bits(_parent: int, _extras: int, tokens: Any) -> int:
    return int(tokens.sum()) & 3


def _assert_nothing_leaks(requests: Any) -> None:
    """Check that no node, running slot, request slot, extra or stop-token list is lost or kept."""
    column: Any = importlib.import_module("blockstep.impl.compiled.state")
    s, slots = requests.state, list(requests.slot_of.values())
    nodes, ends = set[int](), s.blocks[:, column.NODE].tolist()
    for end in (*ends, *s.requests[slots, column.LAST_NODE].tolist()):
        node = end
        while node != column.NONE and node not in nodes:
            nodes.add(node)
            node = int(s.nodes[node, column.PARENT])
    assert len(nodes) == len(s.nodes) - s.scalars[column.NUM_FREE_NODES]
    seat, num_seats = int(s.scalars[column.FREE_SEAT]), int(s.scalars[column.NUM_RUNNING])
    while seat != column.NONE and num_seats <= len(s.lines):
        seat, num_seats = int(s.lines[seat, column.NEXT_SEAT]), num_seats + 1
    assert num_seats == len(s.lines)
    assert len(slots) + len(requests._unused) == len(requests.requests)
    extras = s.nodes[list(nodes), column.NODE_EXTRAS].tolist()
    extras += s.requests[slots][:, [column.EXTRAS, column.FIRST_EXTRAS]].ravel().tolist()
    uses = np.bincount(np.array(extras, np.int64), minlength=len(s.extras_uses))
    assert (uses[1:] == s.extras_uses[1:]).all()
    assert s.requests[slots, column.MORE_STOPS].sum() == s.scalars[column.NUM_MORE_STOPS]


def _read_object(row: Any) -> OutputRow:
    return OutputRow(
        row.request_id,
        row.new_token_ids,
        row.finish_reason,
        row.stop_token_id,
        row.num_cached_tokens,
    )


def _read_objects(plan: Any) -> Plan:
    """Return the plan that its objects describe."""
    objects = plan.build_objects()
    scheduled = objects.num_scheduled_tokens
    assert objects.total_num_scheduled_tokens == sum(scheduled.values())
    cached = (
        CachedRow(
            name,
            name in objects.resumed_req_ids,
            objects.new_block_ids[row] or ((),),
            objects.all_token_ids.get(name),
            objects.num_computed_tokens[row],
            objects.num_output_tokens[row],
            scheduled[name],
            objects.scheduled_spec_decode_tokens.get(name, ()),
        )
        for row, name in enumerate(objects.req_ids)
    )
    return Plan(
        plan.frame_id,
        tuple(objects.new),
        tuple(cached),
        tuple(sorted(objects.finished_req_ids)),
        tuple(sorted(objects.preempted_req_ids)),
    )
