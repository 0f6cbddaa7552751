"""View: what the worker knows of one request, learnt from plans and from its own sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockstep.conformance.judge.automaton import Automaton
from blockstep.conformance.judge.worker.names import Name, NamedText, PrefixNames
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
        """Of its grammar, if it has one."""
        self.across: list[Name] = []
        """What it attends to across: the names of its items' embeddings."""
        self.num_computed = 0
        """Tokens whose KV exists once every plan so far has run."""
        self.num_dropped = 0
        """Tokens that were dropped when it was preempted last, until it is resumed."""
        self.num_unreported = 0
        """Tokens sampled in frames whose commit it has not heard of."""
        self.num_promised = 0
        """Tokens that those frames could have brought, all of their drafts accepted."""
        self.num_rejected = 0
        """Drafts rejected in those frames: so many positions is the scheduler ahead."""
        self.proposal: TokenIds = ()
        """Its drafts after the last plan, if it sampled in it and the scheduler is asynchronous."""
        self.tables: list[list[BlockId]] = [[] for _ in sizes]
        """Per KV group. What it no longer attends to may be another's by now: no plan tells."""
        self.state_indices: dict[int, int] = {}
        """By recurrent group: where in its table the state stands from which it goes on; not there
        until it has run."""
        self.pages: dict[int, list[list[Name]]] = {size: [] for size in sizes}
        """`chain` cut into full blocks, by their size."""
        self.is_preempted = False
        """A plan said so: it holds no block until it is resumed."""
        self.may_resume = False
        """A forced reset may have preempted it, of which no plan tells."""
        self.is_over = False
        """It has ended, of which the next plan tells: its id may be another's by then."""

    @property
    def table(self) -> list[BlockId]:
        """The table of its first KV group."""
        return self.tables[0]

    @property
    def reported_token_ids(self) -> list[int]:
        """Prompt and samples that the scheduler knows of."""
        return self.tokens[: len(self.tokens) - self.num_unreported]

    @property
    def output_token_ids(self) -> TokenIds:
        """What it sampled and the scheduler knows of."""
        return tuple(self.tokens[self.num_prompt : len(self.tokens) - self.num_unreported])

    def replace_tokens(self, tokens: Sequence[int]) -> None:
        """Take over the tokens that a plan sends."""
        self.tokens = list(tokens)
        self.cut_names(0)

    def name_positions(self, end: int, drafts: TokenIds) -> None:
        """Know the names of positions [0, `end`), `drafts` following the known tokens."""
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
        """Forget the names of positions from `end` on: those tokens are not known any more."""
        del self.chain[end:]
        for size, pages in self.pages.items():
            del pages[end // size :]


def is_outdated(view: RequestView, request: RequestSnapshot) -> bool:
    """Whether a session has gone on since a plan told of it last: the next row will tell."""
    if not view.request.resumable or request.status is Status.RUNNING:
        return False
    return request.prompt_token_ids != view.request.prompt_token_ids


@dataclass(slots=True)
class FrameRow:
    """What one request does in one dispatched plan."""

    view: RequestView
    first: int
    """Position of the first token that runs."""
    end: int
    """One past the last."""
    drafts: TokenIds
    samples: bool
    """The worker's own decision: all tokens it knows are computed once this has run."""
    num_known: int
    """Tokens it knew before."""
    sampled: TokenIds = ()
    told: TokenIds = ()
    """Its drafts, as the scheduler was told last, where it does not know them by itself."""
    num_masked: int | None = None
    """Its drafts that the last mask made for it has let stand; None without one."""
    is_void: bool = False
    """It was computed on what could not be loaded, and delivers nothing."""
    is_astray: bool = False
    """It read KV of something else."""

    @property
    def num_promised(self) -> int:
        """Tokens that the row could bring."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def num_rejected(self) -> int:
        """Drafts that were not accepted."""
        return self.num_promised - len(self.sampled)
