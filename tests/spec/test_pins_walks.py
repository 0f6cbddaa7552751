"""Random walks of agents: turns leave what the next one finds, and nobody starves for it.

A book beside the specification keeps what was told and which turns ended how; what is pinned has to
agree with it in every state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from groups_support import chunks, full, window

from blockstep.spec import Config, Oracle, Policy, Request
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.memory.slots import is_servable
from blockstep.spec.requests import RequestState
from blockstep.spec.state import State
from blockstep.spec.vocabulary import (
    FinishReason,
    Outputs,
    PauseState,
    Pin,
    Plan,
    RequestId,
    Status,
    StreamingUpdate,
    TokenIds,
)

GROUPS = (
    *((), (), ()),
    *((full(2), full(4)), (full(2), window(2, 3)), (window(1, 4), full(2))),
    (chunks(2, 4), window(2, 5)),
)
LEAVES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
"""How a turn ends whose client comes back."""
JOBS = ("x", "y", "z")


def draw_config(random: Random) -> Config:
    groups = random.choice(GROUPS)
    depth = random.choice((1, 1, 2, 3))
    return Config(
        num_blocks=random.randint(7, 12),
        block_size=min((group.block_size for group in groups), default=2),
        max_num_seqs=random.randint(1, 4),
        max_num_batched_tokens=random.randint(2, 10),
        max_model_len=16,
        policy=Policy.CONTINUUM,
        scheduler_reserve_full_isl=random.random() < 0.3,
        max_frames_in_flight=depth,
        async_scheduling=depth > 1 and random.random() < 0.7,
        groups=groups,
    )


class Walk:
    """A run of drawn events, and a book of time, estimates and what each job may have pinned."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.config = draw_config(self.random)
        self.oracle = Oracle(self.config)
        self.plans: list[Plan] = []
        self.texts: dict[str, TokenIds] = {}
        self.now = 0
        self.estimates: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        """Of pins, by job."""
        self.counts: Counter[str] = Counter()

    def run(self, num_events: int) -> None:
        kinds = ("submit", "schedule", "commit", "tell_time", "estimate")
        rare = ("abort", "reset", "update", "pause")
        weights = (30, 50, 45, 12, 12, 3, 3, 4, 2)
        for number in range(num_events):
            (kind,) = self.random.choices((*kinds, *rare), weights)
            getattr(self, kind)(number)
            self.look()
        self.drain()

    def look(self) -> None:
        """What is pinned is in the book, and no job has two."""
        state = self.oracle.state
        assert get_broken_invariants(state) == ()
        assert state.pins.now == self.now
        ends = {pin.job_id: pin.end for pin in self.get_pins()}
        assert len(ends) == len(self.get_pins())
        assert ends == self.ends
        known = {*ends, *(request.request.job_id for request in state.requests.values())}
        self.estimates = {job: ttl for job, ttl in self.estimates.items() if job in known}
        assert dict(state.pins.estimates.items()) == self.estimates

    def drain(self) -> None:
        """Nobody comes, the clock stands still, everybody ends; only pins are left."""
        self.oracle.resume()
        for name, request in [*self.oracle.state.requests.items()]:
            if request.request.resumable:
                self.oracle.apply(StreamingUpdate(Request(name, (0,))))
        for _ in range(300):
            self.schedule()
            self.commit()
            self.look()
            if not self.oracle.state.requests:
                break
        assert not self.oracle.state.requests
        while self.plans:
            self.commit()
        self.counts["pinned at the end"] += bool(self.get_pins())
        assert self.oracle.reset()
        self.ends = {}
        assert self.get_pins() == ()
        assert not self.oracle.state.pins.estimates
        assert self.oracle.num_free_blocks == self.config.num_usable_blocks

    def get_pins(self) -> tuple[Pin, ...]:
        return self.oracle.state.pins.pins

    # Clients, tools and operators.

    def submit(self, number: int) -> None:
        """A turn: what its job has said so far and a little more, or something new."""
        random = self.random
        if len(self.oracle.state.requests) >= 6:
            return
        job = random.choice((*JOBS, *JOBS, *self.ends, *self.ends, *self.ends, None))
        said = self.texts.get(job, ()) if job and random.random() < 0.8 else ()
        prompt = (*said, *(random.choice((0, 0, 1)) for _ in range(random.randint(1, 6))))[:12]
        request = Request(
            f"r{number}",
            prompt,
            random.choice((1, 1, 2, 6)),
            job_id=job,
            is_last_step=random.random() < 0.15,
            stop_token_ids=(1,) if random.random() < 0.3 else (),
            resumable=random.random() < 0.1,
        )
        if is_servable(self.config, request):
            self.oracle.submit(request)
            if job:
                self.texts[job] = prompt if len(prompt) < 12 else ()
                if random.random() < 0.7:
                    self.estimate_job(job, random.choice((2, 5, 20, 99)))

    def update(self, _number: int) -> None:
        sessions = [n for n, r in self.oracle.state.requests.items() if r.request.resumable]
        if sessions:
            name, resumable = self.random.choice(sorted(sessions)), self.random.random() < 0.6
            self.oracle.apply(StreamingUpdate(Request(name, (0, 1), 1, resumable=resumable)))

    def abort(self, _number: int) -> None:
        names, before = sorted(self.oracle.state.requests), self.get_pins()
        if names:
            self.oracle.abort(self.random.choice(names))
            assert self.get_pins() == before, "nobody comes back for it"

    def tell_time(self, _number: int) -> None:
        told = self.now + self.random.randint(-2, 4)
        self.oracle.tell_time(max(told, 0))
        self.now = max(self.now, told)

    def estimate(self, _number: int) -> None:
        job = self.random.choice((*JOBS, "nobody"))
        self.estimate_job(job, self.random.choice((0, 1, 3, 9)))

    def estimate_job(self, job: str, ttl: int) -> None:
        self.oracle.estimate(job, ttl)
        self.estimates[job] = ttl
        if not ttl:
            del self.estimates[job]  # and of a job that nobody knows nothing stays, see `look`
        if job in self.ends:
            self.ends[job] = self.now + ttl

    def pause(self, _number: int) -> None:
        self.oracle.pause(self.random.choice([*PauseState]))
        if self.random.random() < 0.7:
            self.oracle.resume()

    def reset(self, _number: int) -> None:
        before, is_forced = self.oracle.state, self.random.random() < 0.5
        tables = [t for request in before.requests.values() for t in request.block_tables]
        done = self.oracle.reset(is_forced)
        assert done == (is_forced or not any(map(any, tables)))
        assert done or self.oracle.state == before
        assert not done or self.get_pins() == ()
        self.ends = {} if done else self.ends
        self.counts["reset under pins"] += done and bool(before.pins.pins)
        self.counts["reset refused"] += not done

    # A worker.

    def schedule(self, _number: int = 0) -> None:
        before = self.oracle.state
        if len(before.frames) == self.config.max_frames_in_flight:
            return
        over = [pin for pin in before.pins.pins if pin.end <= self.now]
        plan = self.oracle.schedule()
        if plan.rows:
            self.plans.append(plan)
        left, warm = self.get_pins(), {pin.job_id for pin in self.get_pins()}
        kept = [pin for pin in before.pins.pins if pin not in over]
        assert [pin for pin in kept if pin in left] == [*left], "no step pins, or sorts, or keeps"
        self.counts["expired"] += len(over)
        self.counts["gave way"] += len(kept) - len(left)
        jobs = {name: request.request.job_id for name, request in before.requests.items()}
        stay = [name for name in before.running if name not in plan.preempted_req_ids]
        assert len(left) == len(kept) or len(stay) <= 1, "while others run pins stay"
        gone = [name for name in plan.preempted_req_ids if name in before.running]
        lost, were_warm = [name for name in gone if jobs[name] in warm], {p.job_id for p in kept}
        assert not lost or all(jobs[name] in were_warm for name in stay), "who is warm goes last"
        self.ends = {pin.job_id: pin.end for pin in left}
        self.look_at_order(before, kept)
        self.counts["preempted"] += len(plan.preempted_req_ids)
        self.counts["warm preempted"] += len(lost)
        self.counts["warm hit"] += sum(
            row.num_computed_tokens > 0 and jobs[row.request_id] in warm
            for row in plan.rows
            if row.request_id not in before.running
        )

    def look_at_order(self, before: State, kept: list[Pin]) -> None:
        """Of the step that was planned: who went ahead in the line, and whose pins gave way."""
        left, warm = self.get_pins(), {pin.job_id for pin in kept}
        classes: tuple[list[RequestId], ...] = ([], [], [])
        for name in before.waiting:
            request = before.requests[name]
            is_preempted = request.status is Status.PREEMPTED
            classes[0 if is_preempted else 1 if request.request.job_id in warm else 2].append(name)
        line = [name for group in classes for name in group]
        after = [name for name in self.oracle.state.waiting if name in line]
        assert after == [name for name in line if name in after], "who is warm goes ahead"
        gave = [(pin.end, index) for index, pin in enumerate(kept) if pin not in left]
        spared = [(pin.end, index) for index, pin in enumerate(kept) if pin in left]
        early = [one for one in spared if gave and one < max(gave)]
        assert len(early) <= 1, "but for the receiver's own the earliest end goes first"
        self.counts["own spared"] += len(early)

    def commit(self, _number: int = 0) -> None:
        if not self.plans:
            return
        plan, before = self.plans.pop(0), self.oracle.state
        frame = before.frames[0]
        sampled = {
            row.request_id: (self.random.choice((0, 0, 1)),) * row.samples for row in frame.rows
        }
        outputs = self.oracle.commit(plan, sampled)
        self.write_down(outputs, before.requests)

    def write_down(self, outputs: Outputs, requests: Mapping[RequestId, RequestState]) -> None:
        """Turns that ended here leave pins, one after the other; nothing else does."""
        for row in outputs.rows:
            request = requests[row.request_id]
            job = request.request.job_id
            has_ended = row.request_id not in self.oracle.state.requests
            if row.finish_reason not in LEAVES or not has_ended or job is None:
                continue
            parts = [part.block_table[: part.num_cached_blocks] for part in request.holdings]
            if request.request.is_last_step:
                self.counts["unpinned by the last"] += job in self.ends
                self.ends.pop(job, None)
            elif job in self.estimates and (any(map(any, parts)) or self.is_settled_now(job)):
                self.counts["replaced" if job in self.ends else "pinned"] += 1
                self.ends[job] = self.now + self.estimates[job]
            else:
                self.counts["left nothing"] += 1

    def is_settled_now(self, job: str) -> bool:
        """Whether the very answer that ends a turn has settled a block, which is pinned then."""
        end = self.now + self.estimates[job]
        return any((pin.job_id, pin.end) == (job, end) for pin in self.get_pins())


@pytest.mark.parametrize("part", range(2))
def test_pins_agree_with_the_book_and_nobody_starves(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * 40, part * 40 + 40):
        walk = Walk(seed)
        walk.run(100)
        counts += walk.counts
    assert {*counts} == {
        *("pinned", "replaced", "left nothing", "unpinned by the last", "pinned at the end"),
        *("expired", "gave way", "preempted", "warm preempted", "warm hit"),
        "own spared",
        *("reset under pins", "reset refused"),
    }
