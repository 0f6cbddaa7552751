"""Order: quirks of releases in which request runs next, and which is preempted."""

from __future__ import annotations

from blockstep.spec.core import admission, preemption, queues, schedule, token_budget
from blockstep.spec.core.queues import Requests, get_rank
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config, PauseState, Policy, RequestId, Status


def equals_preempt_the_first(rules: Rules, _config: Config) -> Rules:
    """The first in running order of requests with equal priority and arrival is preempted."""

    def select_victim(policy: Policy, running: list[RequestId], requests: Requests) -> int:
        if policy is not Policy.PRIORITY:
            return rules[queues.select_victim](policy, running, requests)
        ranks = [get_rank(requests[name])[:2] for name in running]
        return ranks.index(max(ranks))

    return rules.replacing(queues.select_victim, select_victim)


def victim_without_a_row_skips_a_request(rules: Rules, _config: Config) -> Rules:
    """A victim without a row in the step makes the step skip another request."""

    def process_making_room(step: Step, index: int, victim_index: int) -> int:
        victim_id = step.running[victim_index]
        had_row = any(row.request_id == victim_id for row in step.rows)
        index_after = rules[preemption.process_making_room](step, index, victim_index)
        return index_after if had_row else index

    return rules.replacing(preemption.process_making_room, process_making_room)


def single_waiting_queue(rules: Rules, _config: Config) -> Rules:
    """A skipped request waits at the front of the queue of all others."""
    return rules.replacing(queues.waits_apart, waits_apart)


def waits_apart(request: RequestState, was_skipped: bool) -> bool:
    """Modified `queues.waits_apart`: never."""
    del request, was_skipped
    return False


def separate_queue_for_computed_requests(rules: Rules, _config: Config) -> Rules:
    """Waiting requests with computed tokens have a queue before all others, open in a pause of new
    ones."""

    def waits_apart(request: RequestState, was_skipped: bool) -> bool:
        return rules[queues.waits_apart](request, was_skipped) or request.num_computed_tokens > 0

    return rules.replacing(queues.waits_apart, waits_apart).replacing(
        admission.get_open_queue, get_open_queue
    )


def get_open_queue(step: Step) -> list[RequestId]:
    """Modified `admission.get_open_queue`: `skipped_waiting` first, also while all is paused."""
    is_paused = step.state.pause_state is not PauseState.UNPAUSED
    return step.skipped or ([] if is_paused else step.waiting)


def idle_sessions_keep_running_slots(rules: Rules, _config: Config) -> Rules:
    """An idle session occupies a running slot."""

    def count_with_idle(step: Step) -> int:
        resting = Status.WAITING_FOR_STREAMING_REQ
        num_resting = sum([request.status is resting for request in step.requests.values()])
        return rules[admission.count_running_slots](step) + num_resting

    return rules.replacing(admission.count_running_slots, count_with_idle)


def skipped_requests_return_reversed(rules: Rules, _config: Config) -> Rules:
    """The requests that a step skips return to the queue in reverse order."""

    def process_passed_over(step: Step) -> None:
        step.passed_over.reverse()
        rules[admission.process_passed_over](step)

    return rules.replacing(admission.process_passed_over, process_passed_over)


def cached_tokens_of_the_latest_hit(rules: Rules, _config: Config) -> Rules:
    """Until its first output the cached tokens of a request are those of its latest hit."""

    def get_num_cached_tokens(request: RequestState, num_start: int) -> int:
        if not request.output_token_ids:
            return num_start
        return rules[admission.get_num_cached_tokens](request, num_start)

    return rules.replacing(admission.get_num_cached_tokens, get_num_cached_tokens)


def single_request_has_no_threshold(rules: Rules, _config: Config) -> Rules:
    """The threshold for long prefills does not limit the only unfinished request."""

    def get_threshold(step: Step) -> int:
        return 0 if len(step.requests) == 1 else rules[token_budget.get_threshold](step)

    return rules.replacing(token_budget.get_threshold, get_threshold)


def step_continues_after_self_preemption(rules: Rules, _config: Config) -> Rules:
    """Under PRIORITY a step continues after a request that preempted itself."""

    def process_turn(step: Step, index: int) -> tuple[int, bool]:
        index, goes_on = rules[schedule.process_turn](step, index)
        is_priority = step.state.config.policy is Policy.PRIORITY
        return index, goes_on or (is_priority and not step.awaits_answer)

    return rules.replacing(schedule.process_turn, process_turn)


def prompt_beyond_the_budget_is_skipped(rules: Rules, _config: Config) -> Rules:
    """Without chunked prefill, a prompt longer than the remaining budget is skipped."""

    def get_waiting_share(step: Step, request: RequestState, num_start: int) -> int | Verdict:
        found = rules[admission.get_waiting_share](step, request, num_start)
        return Verdict.PASSED_OVER if found is Verdict.NO_ROOM else found

    return rules.replacing(admission.get_waiting_share, get_waiting_share)


STORIES = (
    QuirkStory(
        Quirk.EQUALS_PREEMPT_THE_FIRST,
        equals_preempt_the_first,
        "of requests with equal priority and arrival the first in running order is preempted",
        ("P10", "P16"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0 0.33.0",
        "PRIORITY; two requests of one priority and arrival that do not both fit, no caching: each"
        " preempts the other for ever",
    ),
    QuirkStory(
        Quirk.VICTIM_WITHOUT_A_ROW_SKIPS_A_REQUEST,
        victim_without_a_row_skips_a_request,
        "a victim without a row in the step makes the step skip another request",
        ("P15",),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "PRIORITY, asynchronous; of three requests the first has its last token in flight, so it "
        "has no row, and is preempted for the second: the third gets no row in that step",
    ),
    QuirkStory(
        Quirk.SINGLE_WAITING_QUEUE,
        single_waiting_queue,
        "a skipped request waits at the front of the queue of all others",
        ("P16",),
        "not found upstream",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.33.0",
        "a request whose grammar is not compiled is in `waiting`, not in `skipped_waiting`",
    ),
    QuirkStory(
        Quirk.SEPARATE_QUEUE_FOR_COMPUTED_REQUESTS,
        separate_queue_for_computed_requests,
        "waiting requests with computed tokens have a queue before all others, open in a pause of "
        "new ones",
        ("P15", "P16"),
        "not found upstream (searched 2026-11-26: kv_holding_waiting)",
        "0.33.0",
        "PRIORITY; a session continues while a request of a better priority waits: it is admitted "
        "first",
    ),
    QuirkStory(
        Quirk.IDLE_SESSIONS_KEEP_RUNNING_SLOTS,
        idle_sessions_keep_running_slots,
        "an idle session occupies a running slot",
        ("P10", "P15"),
        "#46974 (merged), #53130 (open)",
        "0.33.0",
        "one running slot; a session becomes idle and never continues: no other request is ever "
        "admitted",
    ),
    QuirkStory(
        Quirk.SKIPPED_REQUESTS_RETURN_REVERSED,
        skipped_requests_return_reversed,
        "the requests that a step skips return to the queue in reverse order",
        ("P7", "P16"),
        "not found upstream (fixed in 0.14.0)",
        "0.11.0 0.12.0",
        "FCFS; two requests whose grammar is not compiled: after a plan the second is in front",
    ),
    QuirkStory(
        Quirk.CACHED_TOKENS_OF_THE_LATEST_HIT,
        cached_tokens_of_the_latest_hit,
        "until its first output the cached tokens of a request are those of its latest hit",
        ("P21",),
        "#37460 (merged; fixed in 0.26.0)",
        "0.20.2 0.23.0",
        "a long prompt without a hit is preempted between two chunks: resumed, it hits its own "
        "blocks, and they are reported as its cached tokens",
    ),
    QuirkStory(
        Quirk.SINGLE_REQUEST_HAS_NO_THRESHOLD,
        single_request_has_no_threshold,
        "the threshold for long prefills does not limit the only unfinished request",
        ("P9", "P15"),
        "#57951 (merged)",
        "0.33.0",
        "a threshold of 2, one prompt of 6 tokens: all of it is in the first plan",
    ),
    QuirkStory(
        Quirk.STEP_CONTINUES_AFTER_SELF_PREEMPTION,
        step_continues_after_self_preemption,
        "under PRIORITY a step continues after a request that preempted itself",
        (),
        "#26765 (closed), #36390 (open) ask for it",
        "0.33.0",
        "PRIORITY; the lowest of three is first in running order, needs a block and preempts "
        "itself: the two after it run in the same step",
    ),
    QuirkStory(
        Quirk.PROMPT_BEYOND_THE_BUDGET_IS_SKIPPED,
        prompt_beyond_the_budget_is_skipped,
        "without chunked prefill, a prompt longer than the remaining budget is skipped",
        ("P16",),
        "not found upstream (fixed in 0.12.0)",
        "0.11.0",
        "no chunked prefill, a budget of 5; prompts of 3, 3 and 1 tokens: the first and the third "
        "are admitted",
    ),
)
