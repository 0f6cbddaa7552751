"""Life: what is known of one unfinished request, from its submission on."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.judge.automaton import Automaton, Place
from blockstep.conformance.judge.worker.names import Name, NamedText, PrefixNames, extras_of
from blockstep.conformance.protocol.sessions import Session
from blockstep.spec import vocabulary as v


def order_of(request: v.Request) -> tuple[int, int, v.RequestId]:
    """The place of a request under the priority policy: lower goes first."""
    return (request.priority, request.arrival_time, request.request_id)


class Life(NamedText):
    """One unfinished request, from its submission on."""

    __slots__ = (
        "admitted_in", "automaton", "drafts", "grammar_ready", "is_branch", "last_planned_in",
        "num_cached_tokens", "num_external_tokens", "num_known_at_load", "num_known_then",
        "preempted_at", "session",
    )  # fmt: skip

    def __init__(self, request: v.Request, names: PrefixNames) -> None:
        super().__init__(request, names)
        self.session: Session | None = Session() if request.resumable else None
        """Where it stands between its chunks, if it is one."""
        self.automaton: Automaton | None = None
        """Of its grammar, if it has one."""
        self.drafts: v.TokenIds = ()
        """Attached and not scheduled yet; under asynchronous scheduling their placeholders."""
        self.num_cached_tokens = -1
        """Tokens of the hit at its first admission; -1 before that."""
        self.num_external_tokens = 0
        """Those of the hit at its first admission that a store loaded."""
        self.grammar_ready = False
        self.is_branch = False
        """It goes on from another one's text."""
        self.admitted_in: v.FrameId = -1
        """The plan of its last admission; -1 before that."""
        self.last_planned_in: v.FrameId = -1
        """The last plan with a row of it."""
        self.preempted_at: int | None = None
        """What `Ledger.num_progress` was when it was last preempted for want of blocks."""
        self.num_known_at_load = -1
        """Its known tokens when the end of a load of it was reported last; -1 before that."""
        self.num_known_then = 0
        """What it knew then, tokens."""

    def begin_branch(self, fork: v.Fork) -> Life:
        """One that goes on as this one does, with outputs of its own."""
        branch = Life(replace(self.request, request_id=fork.child_id), self.names)
        branch.tokens += fork.output_token_ids
        branch.is_branch, branch.automaton = True, self.automaton
        branch.grammar_ready, branch.num_cached_tokens = self.grammar_ready, self.num_cached_tokens
        return branch

    def go_on(self, request: v.Request | None) -> None:
        """It is a session, and now what this request says; None: it is as it was."""
        if request is None:
            return
        self.request, self.extras = request, extras_of(request, self.names.block_size)
        self.tokens, self.chain = list(request.prompt_token_ids), []
        self.num_prompt = len(self.tokens)

    @property
    def num_known(self) -> int:
        """Prompt and outputs, tokens."""
        return len(self.tokens)

    @property
    def output_token_ids(self) -> v.TokenIds:
        """What was delivered."""
        return tuple(self.tokens[self.num_prompt :])

    def find_place(self, delivered: v.TokenIds = ()) -> Place | None:
        """Where its grammar stands behind its outputs and these; None: it forbids one of them."""
        return (
            None
            if self.automaton is None
            else self.automaton.read(self.output_token_ids + delivered)
        )

    def accept(self, drafts: v.TokenIds) -> v.TokenIds:
        """The first of these drafts, as far as its grammar accepts them; all without one."""
        if self.automaton is None:
            return drafts
        place = self.find_place()
        return () if place is None else self.automaton.cut(place, drafts)

    @property
    def order(self) -> tuple[int, int, v.RequestId]:
        """Its place under the priority policy: lower goes first."""
        return order_of(self.request)

    def block_name(self, index: int, size: int = 0) -> Name:
        """The name of the full block at `index` of its table, all of whose tokens are known.

        `size`: its slots, where there are others than those of `Config.block_size`.
        """
        end = (index + 1) * (size or self.names.block_size)
        start = len(self.chain)
        if start < end:
            tokens = self.tokens[start:end]
            self.names.extend(self.chain, self.root, tokens, self.extras, start)
        return self.chain[end - 1]

    def block_name_with(self, delivered: v.TokenIds, index: int, size: int) -> Name:
        """Likewise with outputs that a step delivers, which are not recorded yet."""
        count = len(self.tokens)
        if (index + 1) * size <= count:
            return self.block_name(index, size)
        self.tokens.extend(delivered)
        try:
            return self.block_name(index, size)
        finally:
            del self.tokens[count:], self.chain[count:]
