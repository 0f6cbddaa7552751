"""Random walks with recurrent groups, and a worker that knows the tokens of each state.

The worker knows only the tables that plans have sent. It writes where the docstrings of `mamba`
say, and each state that a row starts from must be that of the row's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from groups_support import ALIGN, ALL, NONE, RECURRENT, chunks, full, recurrent, window
from walks_support import GroupsWalk

from blockstep.spec import Config, Outputs, Policy, Request, SpecMethod, State
from blockstep.spec import vocabulary as v

METHODS = (SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.EAGLE)


def draw_groups(random: Random, num_drafts: int, mode: v.MambaCacheMode) -> tuple[v.KVGroup, ...]:
    size = random.choice((1, 2, 3, 4)) if mode is not ALIGN else random.randint(num_drafts + 1, 5)
    of_states = 24 if mode is NONE else size
    groups = [full(random.choice((size, 2 * size, 1 if 24 % size else size)))]
    groups.append(recurrent(of_states, mode, num_drafts))
    if random.random() < 0.3:
        groups.append(random.choice((window(size, 3), chunks(size, 2 * size))))
    if random.random() < 0.3:
        groups.append(recurrent(of_states if mode is NONE else 2 * size, mode, num_drafts))
    if random.random() < 0.2:
        del groups[0]
    random.shuffle(groups)
    return tuple(groups)


def draw_config(random: Random) -> Config:
    while True:
        method = random.choice(METHODS)
        num_drafts = 0 if method is SpecMethod.NONE else random.randint(1, 3)
        mode = random.choice((NONE, ALL, ALIGN, ALIGN, ALIGN))
        groups = draw_groups(random, num_drafts, mode)
        depth = random.choice((1, 1, 2, 3))
        config = Config(
            num_blocks=random.randint(8, 40),
            block_size=min(group.block_size for group in groups),
            max_num_seqs=3,
            max_num_batched_tokens=random.randint(1, 12),
            max_model_len=24,
            policy=random.choice((Policy.FCFS, Policy.PRIORITY)),
            enable_prefix_caching=mode is not NONE,
            long_prefill_token_threshold=random.choice((0, 0, 2, 5)),
            scheduler_reserve_full_isl=random.random() < 0.7,
            spec_method=method,
            num_speculative_tokens=num_drafts,
            max_frames_in_flight=depth,
            async_scheduling=depth > 1 and random.random() < 0.7,
            groups=groups,
        )
        if not v.config_problems(config):
            return config


@dataclass
class View:
    """A request as the worker knows it."""

    tables: list[list[v.BlockId]]
    tokens: v.TokenIds
    """Tokens whose states the request has computed."""
    known: v.TokenIds
    """The same tokens, and those sampled after them."""
    place: int | None = None
    """The state's block: its index, counted from the first that the last row wrote, and its id."""
    num_accepted: int = 0


@dataclass
class Worker:
    """Executes plans in order and keeps, for each block, the tokens that its state has computed."""

    config: Config
    behind: dict[v.BlockId, v.TokenIds | None] = field(default_factory=dict)
    views: dict[v.RequestId, View] = field(default_factory=dict)

    def execute(
        self,
        plan: v.Plan,
        sampled: Mapping[v.RequestId, v.TokenIds],
        known: Mapping[v.RequestId, v.TokenIds],
    ) -> None:
        """`sampled`: drafts accepted and the token sampled; `known`: prompt and outputs before."""
        for name in (*plan.finished_req_ids, *plan.preempted_req_ids):
            self.views.pop(name, None)
        for block_id in plan.new_block_ids_to_zero:
            self.behind[block_id] = None
        reads = []
        for row in plan.rows:
            blocks = row.block_ids if isinstance(row, v.NewRow) else row.new_block_ids
            if isinstance(row, v.NewRow) or row.resumed:
                tokens = known[row.request_id]
                served = tokens[: row.num_computed_tokens]
                self.views[row.request_id] = View([[] for _ in blocks], served, tokens)
            view = self.views[row.request_id]
            for table, added in zip(view.tables, blocks, strict=True):
                table.extend(added)
            self.check_read(view)
            reads.append((row, view))
        for row, view in reads:
            num_drafts = len(row.draft_token_ids)
            num_sure = row.num_scheduled_tokens - num_drafts
            start = len(view.tokens)
            sure = view.known[start : start + num_sure]
            assert len(sure) == num_sure, "what is no draft is known"
            accepted = sampled[row.request_id][:-1]
            view.known += sampled[row.request_id]
            guessed = (*accepted, *(-1,) * (num_drafts - len(accepted)))
            self.write(view, sure, guessed, len(accepted))

    def check_read(self, view: View) -> None:
        num = len(view.tokens)
        if num == 0:
            return
        for group, table in zip(self.config.groups, view.tables, strict=True):
            if group.kind is not RECURRENT:
                continue
            if view.place is None:
                index = (num - 1) // group.block_size
            else:
                index = (view.place - 1) // group.block_size + view.num_accepted
            assert table[index] != 0, "the state is null"
            assert self.behind[table[index]] == view.tokens, "a state of other tokens"

    def write(self, view: View, sure: v.TokenIds, guessed: v.TokenIds, num_accepted: int) -> None:
        start, base = len(view.tokens), len(view.tokens) + len(sure)
        tokens = view.tokens + sure + guessed
        end, settled = len(tokens), base + num_accepted
        for group, table in zip(self.config.groups, view.tables, strict=True):
            if group.kind is not RECURRENT:
                continue
            size, mode = group.block_size, group.mamba_cache_mode
            running = (end - 1) // size
            for number in range(len(guessed) + 1):
                assert table[running + number] != 0
                self.behind[table[running + number]] = tokens[: base + number]
            first = start if mode is ALL else base - 1
            if mode is not NONE:
                for boundary in range(first // size * size + size, settled + 1, size):
                    self.behind[table[boundary // size - 1]] = tokens[:boundary]
        view.tokens = tokens[:settled]
        view.place, view.num_accepted = end, num_accepted


class Walk(GroupsWalk):
    """A run of drawn events, and a worker that executes its plans."""

    def __init__(self, seed: int, config: Config | None = None) -> None:
        random = Random(seed)
        super().__init__(random, config or draw_config(random))
        self.worker = Worker(self.oracle.state.config)
        self.texts = [tuple(random.choices((0, 1), (3, 1), k=16)) for _ in range(2)]
        self.known: dict[v.RequestId, v.TokenIds] = {}
        self.num_published = 0

    def draw_prompt(self) -> v.TokenIds:
        return self.random.choice(self.texts)[: self.random.randint(1, 16)]

    def submit(self, number: int) -> Request | None:
        request = super().submit(number)
        if request is not None:
            self.known[request.request_id] = request.prompt_token_ids
        return request

    def check_plan(self, _before: State, plan: v.Plan) -> None:
        """Check that a step with work to do plans something."""
        if not self.oracle.state.frames and self.oracle.state.requests:
            assert plan.rows or plan.preempted_req_ids

    def carry_out(self, plan: v.Plan, sampled: Mapping[v.RequestId, v.TokenIds]) -> None:
        self.worker.execute(plan, sampled, self.known)

    def check_outputs(self, outputs: Outputs) -> None:
        for out in outputs.rows:
            self.known[out.request_id] += out.new_token_ids
        if not self.oracle.state.frames:
            self.check_published()

    def check_published(self) -> None:
        """Check that each published block holds the tokens of its key."""
        groups = self.oracle.state.config.groups
        for block_id, key in enumerate(self.oracle.state.pool.block_keys):
            if key is None or groups[key.group].kind is not RECURRENT:
                continue
            named: v.TokenIds = ()
            link: v.BlockKey | None = key
            while link is not None:
                named = link.token_ids + named
                link = link.parent
            assert self.worker.behind[block_id] == named
            self.num_published += 1
