"""Order: quirks of releases in which request runs next, and which is preempted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.requests import RequestState
from blockstep.spec.rules import Rules, never
from blockstep.spec.step.queues import get_rank
from blockstep.spec.vocabulary import Config, Policy, RequestId, Status


def equals_preempt_the_first(rules: Rules, _config: Config) -> Rules:
    """Of requests with equal priority and arrival the first in running order is preempted."""
    return replace(rules, get_victim_rank=lambda request: get_rank(request)[:2])


def victim_without_a_row_shifts_the_next(rules: Rules, _config: Config) -> Rules:
    """A victim without a row in the step makes the step skip another request."""

    def compute_next_index(next_index: int, index: int, had_row: bool) -> int:
        return rules.compute_next_index(next_index, index, had_row) if had_row else index

    return replace(rules, compute_next_index=compute_next_index)


def one_waiting_queue(rules: Rules, _config: Config) -> Rules:
    """A skipped request waits at the front of the queue of all others."""
    return replace(rules, waits_apart=never)


def sessions_wait_apart(rules: Rules, _config: Config) -> Rules:
    """Waiting requests with computed tokens have a queue before all others, open in a pause of new
    ones."""

    def waits_apart(is_apart: bool, request: RequestState) -> bool:
        return rules.waits_apart(is_apart, request) or request.num_computed_tokens > 0

    def get_open_queue(
        queue: list[RequestId], is_paused: bool, waiting: list[RequestId], skipped: list[RequestId]
    ) -> list[RequestId]:
        del queue
        return skipped or ([] if is_paused else waiting)

    return replace(rules, waits_apart=waits_apart, get_open_queue=get_open_queue)


def resting_sessions_keep_their_seats(rules: Rules, _config: Config) -> Rules:
    """An idle session occupies a running slot."""

    def count_seats(num_running: int, requests: Mapping[RequestId, RequestState]) -> int:
        resting = Status.WAITING_FOR_STREAMING_REQ
        num_resting = sum([request.status is resting for request in requests.values()])
        return rules.count_seats(num_running, requests) + num_resting

    return replace(rules, count_seats=count_seats)


def passed_over_come_back_reversed(rules: Rules, _config: Config) -> Rules:
    """The requests that a step skips return to the queue in reverse order."""
    return replace(rules, get_order_of_return=lambda passed_over: passed_over[::-1])


def cached_tokens_of_the_last_hit(rules: Rules, _config: Config) -> Rules:
    """Until its first output the cached tokens of a request are those of its latest hit."""

    def get_num_cached_tokens(num_cached: int, request: RequestState, num_hit: int) -> int:
        if not request.output_token_ids:
            return num_hit
        return rules.get_num_cached_tokens(num_cached, request, num_hit)

    return replace(rules, get_num_cached_tokens=get_num_cached_tokens)


def lone_request_has_no_threshold(rules: Rules, _config: Config) -> Rules:
    """The threshold for long prefills does not limit the only unfinished request."""

    def get_threshold(threshold: int, num_unfinished: int) -> int:
        return 0 if num_unfinished == 1 else rules.get_threshold(threshold, num_unfinished)

    return replace(rules, get_threshold=get_threshold)


def self_victim_lets_others_run(rules: Rules, _config: Config) -> Rules:
    """Under PRIORITY a step continues after a request that preempted itself."""
    return replace(rules, goes_on_after_self_victim=lambda config: config.policy is Policy.PRIORITY)


def too_long_is_passed_over(rules: Rules, _config: Config) -> Rules:
    """Without chunked prefill, a prompt longer than the remaining budget is skipped."""
    return replace(rules, passes_over_too_long=True)


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
        Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT,
        victim_without_a_row_shifts_the_next,
        "a victim without a row in the step makes the step skip another request",
        ("P15",),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "PRIORITY, asynchronous; of three requests the first has its last token in flight, so it "
        "has no row, and is preempted for the second: the third gets no row in that step",
    ),
    QuirkStory(
        Quirk.ONE_WAITING_QUEUE,
        one_waiting_queue,
        "a skipped request waits at the front of the queue of all others",
        ("P16",),
        "not found upstream",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.33.0",
        "a request whose grammar is not compiled is in `waiting`, not in `skipped_waiting`",
    ),
    QuirkStory(
        Quirk.SESSIONS_WAIT_APART,
        sessions_wait_apart,
        "waiting requests with computed tokens have a queue before all others, open in a pause of "
        "new ones",
        ("P15", "P16"),
        "not found upstream (searched 2026-11-26: kv_holding_waiting)",
        "0.33.0",
        "PRIORITY; a session continues while a request of a better priority waits: it is admitted "
        "first",
    ),
    QuirkStory(
        Quirk.RESTING_SESSIONS_KEEP_THEIR_SEATS,
        resting_sessions_keep_their_seats,
        "an idle session occupies a running slot",
        ("P10", "P15"),
        "#46974 (merged), #53130 (open)",
        "0.33.0",
        "one running slot; a session becomes idle and never continues: no other request is ever "
        "admitted",
    ),
    QuirkStory(
        Quirk.PASSED_OVER_COME_BACK_REVERSED,
        passed_over_come_back_reversed,
        "the requests that a step skips return to the queue in reverse order",
        ("P7", "P16"),
        "not found upstream (fixed in 0.14.0)",
        "0.11.0 0.12.0",
        "FCFS; two requests whose grammar is not compiled: after a plan the second is in front",
    ),
    QuirkStory(
        Quirk.CACHED_TOKENS_OF_THE_LAST_HIT,
        cached_tokens_of_the_last_hit,
        "until its first output the cached tokens of a request are those of its latest hit",
        ("P21",),
        "#37460 (merged; fixed in 0.26.0)",
        "0.20.2 0.23.0",
        "a long prompt without a hit is preempted between two chunks: resumed, it hits its own "
        "blocks, and they are reported as its cached tokens",
    ),
    QuirkStory(
        Quirk.LONE_REQUEST_HAS_NO_THRESHOLD,
        lone_request_has_no_threshold,
        "the threshold for long prefills does not limit the only unfinished request",
        ("P9", "P15"),
        "#57951 (merged)",
        "0.33.0",
        "a threshold of 2, one prompt of 6 tokens: all of it is in the first plan",
    ),
    QuirkStory(
        Quirk.SELF_VICTIM_LETS_OTHERS_RUN,
        self_victim_lets_others_run,
        "under PRIORITY a step continues after a request that preempted itself",
        (),
        "#26765 (closed), #36390 (open) ask for it",
        "0.33.0",
        "PRIORITY; the lowest of three is first in running order, needs a block and preempts "
        "itself: the two after it run in the same step",
    ),
    QuirkStory(
        Quirk.TOO_LONG_IS_PASSED_OVER,
        too_long_is_passed_over,
        "without chunked prefill, a prompt longer than the remaining budget is skipped",
        ("P16",),
        "not found upstream (fixed in 0.12.0)",
        "0.11.0",
        "no chunked prefill, a budget of 5; prompts of 3, 3 and 1 tokens: the first and the third "
        "are admitted",
    ),
)
