"""Sampling: the true next tokens under the grammars, and the proposed drafts.

The worker reads each grammar with an automaton of its own, along with the tokens that it knows. It
compares the engine's bitmasks with that and does not sample by them (D6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from blockstep.conformance.judge.grammar_automaton import Automaton, Place
from blockstep.conformance.judge.worker.request_view import FrameRow, RequestView
from blockstep.conformance.judge.worker.tagged_kv import TaggedKV
from blockstep.conformance.protocol.findings import Difference, Finding
from blockstep.spec import vocabulary as v

NextToken: TypeAlias = Callable[[Sequence[int]], int]
"""Returns the true next token of a sequence. Deterministic: the outputs of a request are unique."""


class Sampling(TaggedKV):
    """The tokens that a worker samples and proposes, and its checks of bitmasks."""

    def __init__(self, config: v.Config, next_token: NextToken) -> None:
        super().__init__(config)
        self.next_token = next_token
        self.views: dict[v.RequestId, RequestView] = {}
        self._frames: dict[v.FrameId, list[FrameRow]] = {}
        """Dispatched frames that were not committed."""
        self._ended: set[v.RequestId] = set()
        """Requests that have ended, while no plan has named them."""

    def make_view(self, request: v.Request) -> RequestView:
        """Return a new view of a request."""
        view = RequestView(request, self.names, self.block_sizes)
        if request.grammar is not None:
            view.automaton = Automaton(self.config, request)
        if self.config.is_encoder_decoder:
            for item in request.items:
                view.across += self.names.of_item(item.identifier, item.num_embeds)
        self._ended.discard(request.request_id)
        return view

    def note_ends(self, names: Iterable[v.RequestId]) -> None:
        """Note that requests ended: no bitmask needs their rows in flight."""
        self._ended.update(names)

    def _choose(self, view: RequestView, text: Sequence[int]) -> v.TokenId:
        """The true next token of a sequence, among those that its grammar allows."""
        token = self.next_token(text)
        if view.automaton is None:
            return token
        place = view.automaton.read(text[view.num_prompt :])
        allowed = None if place is None else view.automaton.list_allowed(place)
        return token if allowed is None or token in allowed else allowed[token % len(allowed)]

    def _sample(self, row: FrameRow) -> v.TokenIds:
        """The accepted drafts of a row and the token after them.

        A draft is accepted if it is the true next token and its grammar accepts it. A row that has
        read wrong KV samples a wrong token.
        """
        view = row.view
        text: list[int] = list(view.tokens) if row.drafts else view.tokens
        first = self._choose(view, text)
        if row.is_astray:
            first = self._astray(view, text, first)
        sampled = [first]
        for draft in self._list_verifiable(row):
            if draft != sampled[-1]:
                break
            text.append(draft)
            sampled.append(self._choose(view, text))
        return tuple(sampled)

    def _astray(self, view: RequestView, text: Sequence[int], token: v.TokenId) -> v.TokenId:
        """Another token than the true next one, where the grammar leaves any."""
        allowed = None
        if view.automaton is not None:
            place = view.automaton.read(text[view.num_prompt :])
            allowed = None if place is None else view.automaton.list_allowed(place)
        if allowed is None:
            return token ^ 1
        return allowed[(allowed.index(token) + 1) % len(allowed)]

    def _list_verifiable(self, row: FrameRow) -> v.TokenIds:
        """The drafts of a row that its grammar accepts; all of them without a grammar."""
        automaton = row.view.automaton
        if automaton is None:
            return row.drafts
        place = self._place_of(row)
        return row.drafts if place is None else automaton.cut(place, row.drafts)

    def _place_of(self, row: FrameRow) -> Place | None:
        """The grammar state before a row; None without a grammar or after a forbidden token."""
        view = row.view
        if view.automaton is None:
            return None
        return view.automaton.read(view.tokens[view.num_prompt : row.num_known])

    def propose(self, request_id: v.RequestId, count: int, num_right: int) -> v.TokenIds:
        """Return `count` drafts for a request: the first `num_right` will be accepted, the next one
        not."""
        return self._guess(self.views.get(request_id), count, num_right)

    def _guess(self, view: RequestView | None, count: int, num_right: int) -> v.TokenIds:
        text = [0] if view is None else list(view.tokens)
        start = len(text)
        for index in range(count):
            true_token = self.next_token(text) if view is None else self._choose(view, text)
            text.append(true_token ^ 1 if index == num_right else true_token)
        return tuple(text[start:])

    # Masks.

    def list_drafts(self, frame_id: v.FrameId) -> tuple[v.RowTokens, ...]:
        """Return the drafts behind the placeholders of a dispatched plan, for requests that need a
        bitmask: also of rows after a failed load, since drafts are proposed before it is known."""
        return tuple(
            v.RowTokens(row.view.request.request_id, row.drafts)
            for row in self._list_held(frame_id)
            if row.drafts
        )

    def answer_wrongly(self, frame_id: v.FrameId) -> tuple[v.RowTokens, ...] | None:
        """The sampled tokens of a dispatched plan, one replaced by a forbidden one; None if that is
        impossible."""
        masked = self.list_masked(frame_id)
        for row in masked:
            token = self._find_forbidden(row)
            if token is not None:
                rows = self._frames[frame_id]
                return tuple(
                    v.RowTokens(
                        each.view.request.request_id,
                        (*each.sampled[:-1], token) if each is row else each.sampled,
                    )
                    for each in rows
                )
        return None

    def _find_forbidden(self, row: FrameRow) -> v.TokenId | None:
        """A token that a row must not sample last, if there is one."""
        view = row.view
        if view.automaton is None:
            return None
        text = [*view.tokens[view.num_prompt : row.num_known], *row.sampled[:-1]]
        place = view.automaton.read(text)
        allowed = None if place is None else view.automaton.list_allowed(place)
        if allowed is None:
            return None
        return next(token for token in range(len(allowed) + 1) if token not in allowed)

    def forbids(self, event: v.Commit) -> bool:
        """Whether a model output has a token that a grammar forbids."""
        tokens_of = {row.request_id: row.token_ids for row in event.sampled}
        for row in self.list_masked(event.frame_id):
            view = row.view
            text = view.tokens[view.num_prompt : row.num_known]
            tokens = tokens_of.get(view.request.request_id, ())
            if view.automaton is not None and view.automaton.read([*text, *tokens]) is None:
                return True
        return False

    def list_masked(self, frame_id: v.FrameId) -> list[FrameRow]:
        """Return the rows of a frame that sample under a grammar, without those that a failed load
        has made void."""
        return [row for row in self._list_held(frame_id) if not row.is_void]

    def _list_held(self, frame_id: v.FrameId) -> list[FrameRow]:
        """Return the rows of a frame that sample under a grammar, of unfinished requests.

        Left out are rows of a session that has continued since: their tokens come after its stop
        and are dropped.
        """
        return [
            row
            for row in self._frames.get(frame_id, ())
            if row.samples
            and row.view.automaton is not None
            and row.view.request.request_id not in self._ended
            and self._is_current(row)
        ]

    def _is_current(self, row: FrameRow) -> bool:
        """Return whether the request of a row is as it was then, or was rolled back since."""
        view = self.views.get(row.view.request.request_id, row.view)
        return view is row.view or (row.is_void and view.request is row.view.request)

    def get_masked(self, row: FrameRow) -> v.TokenIds:
        """The tokens that a row sampled under its last bitmask.

        For an unfinished request a bitmask is made again with all of its drafts, if it was not; for
        a request that ended none is made any more.
        """
        if row.num_masked is None or row.view.request.request_id not in self._ended:
            return row.sampled
        return row.sampled[: row.num_masked + 1]

    def check_drafts(self, row: FrameRow) -> None:
        """Check that the grammar accepts the drafts that a row verifies."""
        valid = self._list_verifiable(row)
        if valid != row.drafts:
            name = row.view.request.request_id
            what = f"{name!r} runs drafts {row.drafts}, of which its grammar accepts {valid}"
            difference = Difference("draft_token_ids", str(valid), str(row.drafts))
            self._complain(
                "P23",
                "scheduled_drafts_are_accepted_by_the_grammar",
                what,
                difference,
                subjects=name,
            )

    def check_mask(self, asked: v.GrammarBitmask, mask: v.GrammarOutput) -> list[Finding]:
        """Compare a bitmask with what the automata of its rows allow."""
        self._findings = []
        rows = {row.view.request.request_id: row for row in self.list_masked(asked.frame_id)}
        due = sorted(rows)
        seen = sorted(row.request_id for row in mask.rows)
        if seen != due:
            what = f"the mask of frame {asked.frame_id} has other rows"
            difference = Difference("rows", str(due), str(seen))
            self._complain("P23", "mask_has_the_rows_that_sample_under_a_grammar", what, difference)
            return self._findings
        reported = {row.request_id: row.token_ids for row in asked.drafts}
        for mask_row in mask.rows:
            row = rows[mask_row.request_id]
            known = row.drafts
            if self.config.async_scheduling:
                known = row.reported_drafts = reported.get(
                    mask_row.request_id, row.reported_drafts
                )[: len(row.drafts)]
            self._check_mask_row(row, known, mask_row)
        return self._findings

    def _check_mask_row(self, row: FrameRow, known: v.TokenIds, seen: v.GrammarRow) -> None:
        """Check one row of a bitmask: its valid drafts, the allowed tokens, and the positions after
        these.

        drafts       a      b      -1 allowed    as the automaton says   |  masked, if the position
        before is
        """
        view, place, name = row.view, self._place_of(row), seen.request_id
        if view.automaton is None or place is None:
            return  # a wrong answer made its outputs impossible
        valid = view.automaton.cut(place, known)
        row.num_masked = len(valid)
        padded = (*valid, *(v.DRAFT_PLACEHOLDER,) * (len(row.drafts) - len(valid)))
        if seen.draft_token_ids != padded:
            difference = Difference("draft_token_ids", str(padded), str(seen.draft_token_ids))
            what = f"{name!r}: its grammar accepts {valid} of {known}"
            self._complain(
                "P23", "mask_keeps_the_drafts_that_are_accepted", what, difference, subjects=name
            )
            return
        allowed: list[v.TokenIds | None] = [view.automaton.list_allowed(place)]
        for draft in valid:
            following = view.automaton.take(place, draft)
            assert following is not None, "a draft that is accepted leads somewhere"
            place = following
            allowed.append(view.automaton.list_allowed(place))
        held = list(seen.allowed)
        if len(held) != 1 + len(padded) or held[: len(allowed)] != allowed:
            difference = Difference("allowed", str(allowed), str(held[: len(allowed)]))
            what = f"{name!r} behind {valid}"
            self._complain(
                "P23", "mask_allows_what_the_grammar_does", what, difference, subjects=name
            )
        elif allowed[-1] is not None and None in held[len(allowed) :]:
            what = f"{name!r}: behind {padded} all tokens are allowed"
            self._complain("P24", "nothing_behind_a_placeholder_is_unmasked", what, subjects=name)
