"""Masks: the grammars of requests, and the tokens that each row of a frame may sample (P23)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from blockstep.impl.grammars import Matcher, make_matcher
from blockstep.impl.host import state as c
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.state import Int32s, Int64s
from blockstep.impl.rejections import grammar_behind, mask_problem
from blockstep.spec import vocabulary as v


@dataclass(eq=False)
class Masks:
    """The grammars of unfinished requests; rows without one cost a step nothing."""

    config: v.Config
    requests: Requests
    frames: Mapping[v.FrameId, Frame]
    matchers: dict[v.RequestId, Matcher] = field(default_factory=dict)
    """For each unfinished request with a grammar, the position in the grammar."""
    verifiable: dict[v.FrameId, dict[v.RequestId, v.TokenIds]] = field(default_factory=dict)
    """The real drafts of each row, cut at the first that the grammar forbids, for frames in
    flight whose bitmask was made under asynchronous scheduling. No others are verified."""

    def add(self, request: v.Request) -> None:
        """Begin the grammar of a new request, if it has one."""
        matcher = make_matcher(self.config, request)
        if matcher is not None:
            self.matchers[request.request_id] = matcher

    def cut(self, row: v.RowTokens) -> v.TokenIds:
        """Return the leading drafts of a request that its grammar accepts."""
        matcher = self.matchers.get(row.request_id)
        return row.token_ids if matcher is None else matcher.cut(row.token_ids)

    def look_at(self, slots: Int64s, planned: Int32s) -> tuple[bool, bool]:
        """Return whether the bitmask of a new frame has rows, and whether some grammar is behind
        its row, as older frames have placeholders of its request."""
        requests = self.requests.state.requests
        masked = (requests[slots, c.HAS_GRAMMAR] != 0) & (planned[c.PLAN_SAMPLES] != 0)
        if not self.config.async_scheduling:
            return bool(masked.any()), False
        own = 1 + planned[c.PLAN_DRAFTS]
        return bool(masked.any()), bool((requests[slots, c.NUM_PROMISED] > own)[masked].any())

    def make_mask(self, event: v.GrammarBitmask) -> v.GrammarOutput | v.Rejected:
        """Return the bitmask of a frame, and its drafts cut at the first that the grammar
        forbids."""
        problem = mask_problem(self.config, event, self.frames)
        if problem is not None:
            return problem
        frame = self.frames[event.frame_id]
        planned = frame.build_rows()
        masked = {name: planned[name] or () for _, name in self._list_masked(frame)}
        older = [frame for frame_id, frame in self.frames.items() if frame_id < event.frame_id]
        sampling = {name for frame in older for _, name in self._list_masked(frame)}
        behind = [name for name in masked if name in sampling]
        if behind:
            return grammar_behind(event.frame_id, behind)
        brought = {row.request_id: row.token_ids for row in event.drafts}
        rows = [self._make_row(event.frame_id, *pair, brought) for pair in masked.items()]
        return v.GrammarOutput(tuple(rows))

    def _make_row(
        self,
        frame_id: v.FrameId,
        name: v.RequestId,
        planned: v.TokenIds,
        brought: Mapping[v.RequestId, v.TokenIds],
    ) -> v.GrammarRow:
        matcher, known = self.matchers[name], planned
        if self.config.async_scheduling:
            verifiable = self.verifiable.setdefault(frame_id, {})
            known = brought.get(name, verifiable.get(name, ()))[: len(planned)]
        valid = matcher.cut(known)
        if self.config.async_scheduling:
            verifiable[name] = valid
        padded = (*valid, *(v.DRAFT_PLACEHOLDER,) * (len(planned) - len(valid)))
        return v.GrammarRow(name, matcher.list_masks(padded), padded)

    def find_problem(
        self, frame_id: v.FrameId, frame: Frame, token_ids: Int32s, counts: Int32s
    ) -> str | None:
        """Return why a grammar forbids a model output, or None; malformed ones are not judged."""
        if len(counts) != frame.owners.shape[1] or (counts < 0).any():
            return None
        masked = [*self._list_masked(frame)]
        if not masked or counts.sum() != len(token_ids):
            return None
        ends, cut = np.cumsum(counts), self.verifiable.get(frame_id, {})
        for row, name in masked:
            tokens = tuple(token_ids[ends[row] - counts[row] : ends[row]].tolist())
            valid = cut.get(name)
            if valid is not None and tokens[:-1] != valid[: len(tokens) - 1]:
                return f"{name!r} accepts {tokens[:-1]}, which is not a prefix of {valid}"
            if self.matchers[name].follow(tokens) is None:
                return f"{name!r} has {tokens}: its grammar forbids one; sample by the mask"
        return None

    def advance(self, frame_id: v.FrameId, frame: Frame, results: Int32s, kept: Int32s) -> None:
        """Advance grammars by the delivered tokens, the last one included."""
        cut, ends = self.verifiable.get(frame_id, {}), np.cumsum(results[1])
        for place, row in enumerate(results[0].tolist()):
            name = frame.names.get(row)
            if name not in self.matchers:
                continue
            tokens = kept[ends[place] - results[1, place] : ends[place]].tolist()
            position = self.matchers[name].follow(tokens)
            assert position is not None, "a commit with forbidden tokens is rejected"
            self.matchers[name].position = position
            if name in cut:
                left_out = int(frame.planned[c.PLAN_DRAFTS, row]) - len(cut[name])
                self.requests.state.scalars[c.DRAFTS_SCHEDULED] -= left_out

    def _list_masked(self, frame: Frame) -> Iterator[tuple[int, v.RequestId]]:
        """Yield the sampling rows that are not discarded, of requests with a grammar."""
        slots, births = frame.owners
        requests = self.requests.state.requests
        masked = (requests[slots, c.HAS_GRAMMAR] != 0) & (requests[slots, c.BIRTH] == births)
        for row in (masked & (frame.planned[c.PLAN_SAMPLES] != 0)).nonzero()[0].tolist():
            yield row, frame.names.get(row)
