"""Random walks with several KV groups; in the end each request must have finished."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from blockstep.spec import Config, Oracle, Outputs, Request, SpecMethod, State
from blockstep.spec.core import slots
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import Plan, RequestId, TokenIds


class GroupsWalk:
    """A run of drawn events. Subclasses define the prompts and the checks on the way."""

    def __init__(self, random: Random, config: Config) -> None:
        self.random = random
        self.oracle = Oracle(config)
        self.plans: list[Plan] = []
        self.num_hits = self.num_preempted = 0

    def draw_prompt(self) -> TokenIds:
        """Return a prompt that shares prefixes with earlier ones."""
        return tuple(self.random.choice((0, 0, 0, 1)) for _ in range(self.random.randint(1, 16)))

    def check_plan(self, before: State, plan: Plan) -> None:
        """Look at a plan when it is made."""

    def carry_out(self, plan: Plan, sampled: Mapping[RequestId, TokenIds]) -> None:
        """Execute a plan; `sampled`: accepted drafts and a token for each row that samples."""

    def check_outputs(self, outputs: Outputs) -> None:
        """Look at what a commit delivers."""

    def submit(self, number: int) -> Request | None:
        """Draw a request and submit it; return None if it cannot be served."""
        random, prompt = self.random, self.draw_prompt()
        request = Request(f"r{number}", prompt, random.randint(1, 6), priority=random.randint(0, 2))
        return self.submit_if_servable(request)

    def submit_if_servable(self, request: Request) -> Request | None:
        """Submit the request and return it, or None if it cannot be served."""
        if not slots.is_servable(self.oracle.state.config, request, self.oracle.state.rules):
            return None
        self.oracle.submit(request)
        return request

    def schedule(self) -> None:
        before = self.oracle.state
        if len(before.frames) == before.config.max_frames_in_flight:
            return
        plan = self.oracle.schedule()
        self.plans.append(plan)
        self.check_plan(before, plan)
        self.num_preempted += len(plan.preempted_req_ids)
        self.num_hits += sum(row.num_computed_tokens > 0 for row in plan.new)

    def commit(self) -> None:
        while self.plans and not self.plans[0].rows:
            self.carry_out(self.plans.pop(0), {})
        if not self.plans:
            return
        plan, random = self.plans.pop(0), self.random
        sampled: dict[RequestId, TokenIds] = {}
        for row in self.oracle.state.frames[0].rows:
            num_accepted = random.randint(0, len(row.draft_token_ids))
            drafts = tuple(max(draft, 0) for draft in row.draft_token_ids)  # no placeholder
            token = random.choice((0, 0, 0, 1))
            sampled[row.request_id] = (*drafts[:num_accepted], token) if row.samples else ()
        self.carry_out(plan, sampled)
        self.check_outputs(self.oracle.commit(plan, sampled))

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
        self.drain()

    def drain(self) -> None:
        """Run until each submitted request has finished, and check that all blocks are free."""
        for _ in range(2000):
            if not self.oracle.state.requests:
                break
            self.schedule()
            self.commit()
        assert not self.oracle.state.requests
        assert self.oracle.num_free_blocks == self.oracle.state.config.num_usable_blocks
