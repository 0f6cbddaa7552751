"""Random walks with recurrent groups, and a worker that knows which tokens a state is behind.

The worker knows no table but what plans have told it. It writes where the words of `memory.states`
say, and each state that a row goes on from must be that of the row's tokens.
"""

from dataclasses import dataclass, field
from random import Random

from groups_support import ALIGN, ALL, NONE, RECURRENT, chunks, full, recurrent, window

from blockstep.spec import Config, Oracle, Policy, Request, SpecMethod
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.memory import slots
from blockstep.spec.vocabulary import (
    BlockId,
    BlockKey,
    KVGroup,
    MambaCacheMode,
    NewRow,
    Plan,
    RequestId,
    TokenIds,
    config_problems,
)

METHODS = (SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.EAGLE)


def draw_groups(random: Random, num_drafts: int, mode: MambaCacheMode) -> tuple[KVGroup, ...]:
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
            policy=random.choice(tuple(Policy)),
            enable_prefix_caching=mode is not NONE,
            long_prefill_token_threshold=random.choice((0, 0, 2, 5)),
            scheduler_reserve_full_isl=random.random() < 0.7,
            spec_method=method,
            num_speculative_tokens=num_drafts,
            max_frames_in_flight=depth,
            async_scheduling=depth > 1 and random.random() < 0.7,
            groups=groups,
        )
        if not config_problems(config):
            return config


@dataclass
class View:
    """What the worker knows of one request."""

    tables: list[list[BlockId]]
    tokens: TokenIds
    """Those whose state it has gone through."""
    known: TokenIds
    """Those, and what it has sampled behind them."""
    place: int | None = None
    """How many blocks behind the first that the last row wrote its state lies, and that block."""
    num_accepted: int = 0


@dataclass
class Worker:
    """Executes plans in their order; of each block, the tokens that the state in it is behind."""

    config: Config
    behind: dict[BlockId, TokenIds | None] = field(default_factory=dict)
    views: dict[RequestId, View] = field(default_factory=dict)

    def execute(
        self, plan: Plan, told: dict[RequestId, TokenIds], known: dict[RequestId, TokenIds]
    ) -> None:
        """`told`: drafts accepted and the token sampled; `known`: prompt and outputs before."""
        for name in (*plan.finished_req_ids, *plan.preempted_req_ids):
            self.views.pop(name, None)
        for block_id in plan.new_block_ids_to_zero:
            self.behind[block_id] = None
        reads = []
        for row in plan.rows:
            blocks = row.block_ids if isinstance(row, NewRow) else row.new_block_ids
            if isinstance(row, NewRow) or row.resumed:
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
            accepted = told[row.request_id][:-1]
            view.known += told[row.request_id]
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

    def write(self, view: View, sure: TokenIds, guessed: TokenIds, num_accepted: int) -> None:
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


class Walk:
    """A run of drawn events."""

    def __init__(self, seed: int, config: Config | None = None) -> None:
        self.random = Random(seed)
        self.oracle = Oracle(config or draw_config(self.random))
        self.worker = Worker(self.oracle.state.config)
        self.texts = [tuple(self.random.choices((0, 1), (3, 1), k=16)) for _ in range(2)]
        self.plans: list[Plan] = []
        self.known: dict[RequestId, TokenIds] = {}
        self.num_hits = self.num_preempted = self.num_published = 0

    def submit(self, number: int) -> None:
        random = self.random
        prompt = random.choice(self.texts)[: random.randint(1, 16)]
        request = Request(f"r{number}", prompt, random.randint(1, 6), priority=random.randint(0, 2))
        if not slots.is_servable(self.oracle.state.config, request):
            return
        self.oracle.submit(request)
        self.known[request.request_id] = prompt

    def schedule(self) -> None:
        before = self.oracle.state
        if len(before.frames) == before.config.max_frames_in_flight:
            return
        plan = self.oracle.schedule()
        self.check_progress(plan)
        self.num_preempted += len(plan.preempted_req_ids)
        self.num_hits += sum(row.num_computed_tokens > 0 for row in plan.new)
        self.plans.append(plan)

    def check_progress(self, plan: Plan) -> None:
        """A step that could run something runs something."""
        if not self.oracle.state.frames and self.oracle.state.requests:
            assert plan.rows or plan.preempted_req_ids

    def commit(self) -> None:
        while self.plans and not self.plans[0].rows:
            self.worker.execute(self.plans.pop(0), {}, self.known)
        if not self.plans:
            return
        plan, random = self.plans.pop(0), self.random
        frame = self.oracle.state.frames[0]
        sampled: dict[RequestId, TokenIds] = {}
        for row in frame.rows:
            num_accepted = random.randint(0, len(row.draft_token_ids))
            drafts = tuple(max(draft, 0) for draft in row.draft_token_ids)
            token = random.choice((0, 0, 0, 1))
            sampled[row.request_id] = (*drafts[:num_accepted], token) if row.samples else ()
        self.worker.execute(plan, sampled, self.known)
        outputs = self.oracle.commit(plan, sampled)
        for out in outputs.rows:
            self.known[out.request_id] += out.new_token_ids
        if not self.oracle.state.frames:
            self.check_published()

    def check_published(self) -> None:
        """Whatever can be found holds what its key says."""
        groups = self.oracle.state.config.groups
        for block_id, key in enumerate(self.oracle.state.pool.block_keys):
            if key is None or groups[key.group].kind is not RECURRENT:
                continue
            named: TokenIds = ()
            link: BlockKey | None = key
            while link is not None:
                named = link.token_ids + named
                link = link.parent
            assert self.worker.behind[block_id] == named
            self.num_published += 1

    def propose(self) -> None:
        config, random = self.oracle.state.config, self.random
        if config.spec_method is SpecMethod.NONE or config.async_scheduling:
            return
        most = config.num_speculative_tokens
        names = self.oracle.state.running
        self.oracle.propose({name: [0] * random.randint(1, most) for name in names})

    def run(self, num_events: int) -> None:
        random = self.random
        for number in range(num_events):
            match random.choices(
                ("submit", "schedule", "commit", "propose", "abort", "reset"),
                (20, 50, 45, 20, 3, 1),
            )[0]:
                case "submit":
                    if len(self.oracle.state.requests) < 6:
                        self.submit(number)
                case "schedule":
                    self.schedule()
                case "commit":
                    self.commit()
                case "propose":
                    self.propose()
                case "abort" if self.oracle.state.requests:
                    self.oracle.abort(random.choice(sorted(self.oracle.state.requests)))
                case "reset":
                    self.oracle.reset(reset_running_requests=random.random() < 0.5)
            assert get_broken_invariants(self.oracle.state) == ()
        for _ in range(2000):
            if not self.oracle.state.requests:
                break
            self.schedule()
            self.commit()
        assert not self.oracle.state.requests
        assert self.oracle.num_free_blocks == self.oracle.state.config.num_usable_blocks
