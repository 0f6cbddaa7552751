"""View: the worker's knowledge of one request, from plans and from its own sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockstep.conformance.judge.grammar_automaton import Automaton
from blockstep.conformance.judge.worker.prefix_names import Name, NamedText, PrefixNames
from blockstep.spec.vocabulary import BlockId, Request, RequestSnapshot, Status, TokenIds


class RequestView(NamedText):
    """One request as the worker sees it."""

    __slots__ = (
        "across", "automaton", "is_over", "is_preempted", "may_resume", "num_computed",
        "num_dropped", "num_promised", "num_rejected", "num_unreported", "pages",
        "proposal", "state_indices", "tables",
    )  # fmt: skip

    def __init__(
        self, request: Request, names: PrefixNames, block_sizes: Sequence[int] | None = None
    ) -> None:
        super().__init__(request, names)
        sizes = block_sizes or (names.block_size,)
        self.automaton: Automaton | None = None
        """The automaton of its grammar, if it has one."""
        self.across: list[Name] = []
        """Names of its items' embeddings, to which it attends by cross attention."""
        self.num_computed = 0
        """Tokens whose KV exists once every plan so far has run."""
        self.num_dropped = 0
        """Tokens that were dropped at its last preemption, until it is resumed."""
        self.num_unreported = 0
        """Tokens sampled in frames that were not committed."""
        self.num_promised = 0
        """Tokens that these frames could have brought with all of their drafts accepted."""
        self.num_rejected = 0
        """Rejected drafts of these frames, by which the scheduler counts too many computed tokens.
        """
        self.proposal: TokenIds = ()
        """The drafts after the last plan, if it sampled in it and scheduling is asynchronous."""
        self.tables: list[list[BlockId]] = [[] for _ in sizes]
        """Per KV group. Another request may have its skipped blocks by now, since no plan shows
        that."""
        self.state_indices: dict[int, int] = {}
        """Index of the block with its state, by recurrent group; missing before its first row."""
        self.pages: dict[int, list[list[Name]]] = {size: [] for size in sizes}
        """`chain` cut into full blocks, by their size."""
        self.is_preempted = False
        """Whether a plan preempted it: it holds no block until it is resumed."""
        self.may_resume = False
        """Whether a forced reset may have preempted it, which no plan shows."""
        self.is_over = False
        """Whether it ended and the next plan will say so; another request may have its id by then.
        """

    @property
    def table(self) -> list[BlockId]:
        """The table of its first KV group."""
        return self.tables[0]

    @property
    def reported_token_ids(self) -> list[int]:
        """Prompt and sampled tokens that the scheduler knows."""
        return self.tokens[: len(self.tokens) - self.num_unreported]

    @property
    def output_token_ids(self) -> TokenIds:
        """Sampled tokens that the scheduler knows."""
        return tuple(self.tokens[self.num_prompt : len(self.tokens) - self.num_unreported])

    def replace_tokens(self, tokens: Sequence[int]) -> None:
        """Take the tokens that a plan sends."""
        self.tokens = list(tokens)
        self.cut_names(0)

    def name_positions(self, end: int, drafts: TokenIds) -> None:
        """Compute the names of positions [0, `end`), where `drafts` follow the known tokens."""
        chain = self.chain
        start = len(chain)
        if start < end:
            known = len(self.tokens)
            if start < known:
                self.names.extend(
                    chain, self.root, self.tokens[start : min(end, known)], self.extras, start
                )
            if end > known:
                self.names.extend(chain, self.root, drafts[: end - known], self.extras, known)
        for size, pages in self.pages.items():
            for page in range(len(pages), end // size):
                pages.append(chain[page * size : (page + 1) * size])

    def cut_names(self, end: int) -> None:
        """Forget the names of positions from `end` on, whose tokens are no longer known."""
        del self.chain[end:]
        for size, pages in self.pages.items():
            del pages[end // size :]


def is_outdated(view: RequestView, request: RequestSnapshot) -> bool:
    """Whether a session has continued since its last row; its next row will show this."""
    if not view.request.resumable or request.status is Status.RUNNING:
        return False
    return request.prompt_token_ids != view.request.prompt_token_ids


@dataclass(slots=True)
class FrameRow:
    """One request's row in a dispatched plan."""

    view: RequestView
    first: int
    """Position of the first token that runs."""
    end: int
    """One past the last position that runs."""
    drafts: TokenIds
    samples: bool
    """Whether the row samples, which the worker decides itself: it computes the last known token.
    """
    num_known: int
    """Known tokens before the row."""
    sampled: TokenIds = ()
    reported_drafts: TokenIds = ()
    """The drafts as the scheduler got them last, where it does not know them itself."""
    num_masked: int | None = None
    """The number of its drafts that its last bitmask kept; None without one."""
    is_void: bool = False
    """Whether it was computed on a load that failed, so that it delivers nothing."""
    is_astray: bool = False
    """Whether it read wrong KV."""

    @property
    def num_promised(self) -> int:
        """Tokens that the row could bring."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def num_rejected(self) -> int:
        """Drafts that were not accepted."""
        return self.num_promised - len(self.sampled)
