"""Life: the facts about one unfinished request since its submission."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.judge.automaton import Automaton, Place
from blockstep.conformance.judge.worker.names import Name, NamedText, PrefixNames, extras_of
from blockstep.conformance.protocol.sessions import Session
from blockstep.spec import vocabulary as v


def order_of(request: v.Request) -> tuple[int, int, v.RequestId]:
    """The sort key of a request under the priority policy: the lowest is served first."""
    return (request.priority, request.arrival_time, request.request_id)


class Life(NamedText):
    """One unfinished request since its submission."""

    __slots__ = (
        "admitted_in", "automaton", "drafts", "grammar_ready", "is_branch", "last_planned_in",
        "num_cached_tokens", "num_external_tokens", "num_known_at_load", "num_known_then",
        "preempted_at", "session",
    )  # fmt: skip

    def __init__(self, request: v.Request, names: PrefixNames) -> None:
        super().__init__(request, names)
        self.session: Session | None = Session() if request.resumable else None
        """The session's state between its inputs, if the request is a session."""
        self.automaton: Automaton | None = None
        """The automaton of its grammar, if it has one."""
        self.drafts: v.TokenIds = ()
        """Drafts that are attached and not scheduled; under asynchronous scheduling their
        placeholders."""
        self.num_cached_tokens = -1
        """Tokens of the prefix hit at its first admission; -1 before that."""
        self.num_external_tokens = 0
        """Tokens of that hit that a store loaded."""
        self.grammar_ready = False
        self.is_branch = False
        """Whether it is a branch of another request."""
        self.admitted_in: v.FrameId = -1
        """The plan of its last admission; -1 before that."""
        self.last_planned_in: v.FrameId = -1
        """The last plan with a row of this request."""
        self.preempted_at: int | None = None
        """The value of `Ledger.num_progress` at its last preemption for lack of blocks."""
        self.num_known_at_load = -1
        """The number of known tokens when the end of its last load was reported; -1 before that."""
        self.num_known_then = 0
        """The number of known tokens at that preemption."""

    def begin_branch(self, fork: v.Fork) -> Life:
        """Return a branch of this request, with outputs of its own."""
        branch = Life(replace(self.request, request_id=fork.child_id), self.names)
        branch.tokens += fork.output_token_ids
        branch.is_branch, branch.automaton = True, self.automaton
        branch.grammar_ready, branch.num_cached_tokens = self.grammar_ready, self.num_cached_tokens
        return branch

    def go_on(self, request: v.Request | None) -> None:
        """Continue the session with the prompt of `request`; None changes nothing."""
        if request is None:
            return
        self.request, self.extras = request, extras_of(request, self.names.block_size)
        self.tokens, self.chain = list(request.prompt_token_ids), []
        self.num_prompt = len(self.tokens)

    @property
    def num_known(self) -> int:
        """Number of known tokens: prompt and outputs."""
        return len(self.tokens)

    @property
    def output_token_ids(self) -> v.TokenIds:
        """The tokens delivered so far."""
        return tuple(self.tokens[self.num_prompt :])

    def find_place(self, delivered: v.TokenIds = ()) -> Place | None:
        """The grammar state after its outputs and `delivered`; None if the grammar forbids one of
        them."""
        return (
            None
            if self.automaton is None
            else self.automaton.read(self.output_token_ids + delivered)
        )

    def accept(self, drafts: v.TokenIds) -> v.TokenIds:
        """The leading drafts that its grammar accepts; all of them without a grammar."""
        if self.automaton is None:
            return drafts
        place = self.find_place()
        return () if place is None else self.automaton.cut(place, drafts)

    @property
    def order(self) -> tuple[int, int, v.RequestId]:
        """The sort key under the priority policy: the lowest is served first."""
        return order_of(self.request)

    def block_name(self, index: int, size: int = 0) -> Name:
        """The name of the full block at `index` of its table; all tokens of the block must be
        known.

        `size` is the number of slots of a block, if it differs from `Config.block_size`.
        """
        end = (index + 1) * (size or self.names.block_size)
        start = len(self.chain)
        if start < end:
            tokens = self.tokens[start:end]
            self.names.extend(self.chain, self.root, tokens, self.extras, start)
        return self.chain[end - 1]

    def block_name_with(self, delivered: v.TokenIds, index: int, size: int) -> Name:
        """The same name, where `delivered` are outputs of a step that is not recorded yet."""
        count = len(self.tokens)
        if (index + 1) * size <= count:
            return self.block_name(index, size)
        self.tokens.extend(delivered)
        try:
            return self.block_name(index, size)
        finally:
            del self.tokens[count:], self.chain[count:]
