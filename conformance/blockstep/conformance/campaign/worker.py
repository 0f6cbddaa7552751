"""Worker: takes units by lease, plays them, commits their results, and opens the next round."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random

from blockstep.conformance.campaign.folder import get_one, open_store
from blockstep.conformance.campaign.leases import Store
from blockstep.conformance.campaign.plan import Plan, Target
from blockstep.conformance.campaign.play import Outcome, play_unit
from blockstep.conformance.campaign.records import (
    Past,
    Round,
    Totals,
    UnitResult,
    decode,
    encode,
    split_name,
)
from blockstep.conformance.campaign.steering import add_round, get_base, open_round, start_totals
from blockstep.conformance.search.call import Call, call_here
from blockstep.conformance.search.isolation import HarnessError, Isolation
from blockstep.conformance.search.options import load

IDLE_SECONDS = (0.1, 2.0)
"""First and longest time for which a worker waits if no unit is free."""
ROUNDS_WITHOUT_EVENTS = 8
RENEWALS = 3
"""Times that a lease is renewed before it would expire."""
STOP = threading.Event()
"""Set if all workers of this process are to end after their unit."""
_numbers = count()


class Campaign:
    """One campaign in a store: its rounds and totals, each read once."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        self._rounds: dict[int, Round] = {}
        self._totals: dict[int, Totals] = {}

    def get_round(self, number: int) -> Round:
        """Return a published round."""
        if number not in self._rounds:
            self._rounds = {n: it for n, it in self._rounds.items() if n > number - 4}
            data = get_one(self.store, f"round/{number}")
            if data is None:
                raise HarnessError(f"round {number} is not in the store; was it deleted?")
            self._rounds[number] = decode(data, Round)
        return self._rounds[number]

    def get_totals(self, number: int) -> Totals | None:
        """Return the totals up to a round; None if results are missing, or were merged and deleted
        since."""
        if number < 0:
            return start_totals(self.plan)
        if number not in self._totals:
            data = get_one(self.store, f"totals/{number}")
            totals = self._add_up(number) if data is None else decode(data, Totals)
            if totals is None:
                return None
            self._totals = {n: it for n, it in self._totals.items() if n > number - 4}
            self._totals[number] = totals
        return self._totals[number]

    def _add_up(self, number: int) -> Totals | None:
        """Return the totals up to a round from those of the round before, and store them."""
        if number >= self.store.count_rounds():
            return None
        played = self.get_round(number)
        results = self._get_results(played)
        if None in results:
            return None
        before = get_one(self.store, f"totals/{number - 1}") if number else None
        if number and before is None:
            return None
        totals = start_totals(self.plan) if before is None else decode(before, Totals)
        totals = add_round(self.plan, totals, played, results)
        self.store.put(f"totals/{number}", encode(totals))
        return totals

    def get_past(self) -> Past:
        """Return the totals with which the last round was opened. It is cheap."""
        num_rounds = self.store.count_rounds()
        return self.get_round(num_rounds - 1).past if num_rounds else Past(0.0)

    def _get_results(self, played: Round) -> list[UnitResult | None]:
        data = self.store.get([f"result/{name}" for name in played.list_names()])
        return [None if it is None else decode(it, UnitResult) for it in data]

    def read_all(self) -> Totals:
        """Return the totals of all units that are committed now."""
        num_rounds = self.store.count_rounds()
        number, totals = num_rounds - 1, None
        while number >= 0 and totals is None:
            data = get_one(self.store, f"totals/{number}")
            totals = None if data is None else decode(data, Totals)
            number -= totals is None
        totals = totals or start_totals(self.plan)
        for later in range(number + 1, num_rounds):
            played = self.get_round(later)
            totals = add_round(self.plan, totals, played, self._get_results(played))
        return totals

    def advance(self) -> bool:
        """Open the next round if its base is complete; return whether the campaign is finished.

        It is finished when a base has as many events as the budget, and all rounds are complete.
        """
        num_rounds = self.store.count_rounds()
        base = get_base(num_rounds)
        totals = self.get_totals(base)
        if totals is None:
            return False
        if self.is_spent(num_rounds, totals):
            return self.get_totals(num_rounds - 1) is not None
        last = self.get_round(num_rounds - 1) if num_rounds else None
        opened = open_round(self.plan, totals, last, time.time())
        if self.store.publish(num_rounds, encode(opened), opened.list_names()):
            self._clean_up(num_rounds)
        return False

    def is_spent(self, num_rounds: int, totals: Totals) -> bool:
        """Return whether no round is opened any more: the budget is spent, no cell can be played,
        or no engine takes an event."""
        max_events = self.plan.max_events
        has_nothing = num_rounds > 1 and not self.get_round(num_rounds - 1).units
        is_barren = num_rounds > ROUNDS_WITHOUT_EVENTS and not totals.events
        return has_nothing or is_barren or (max_events is not None and totals.events >= max_events)

    def _clean_up(self, number: int) -> None:
        """Delete what no round from `number - 1` on needs: older totals, and results in totals."""
        old = number - 4
        if old >= 0:
            names = self.get_round(old).list_names()
            self.store.drop([f"totals/{old}", *(f"result/{name}" for name in names)])


@contextmanager
def renewed(store: Store, unit: str, owner: str, seconds: float) -> Iterator[None]:
    """Keep a lease while the unit is played.

    If it expires and passes to another worker, the first result counts.
    """
    done = threading.Event()

    def renew() -> None:
        while not done.wait(seconds / RENEWALS) and store.renew(unit, owner, seconds):
            pass

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def commit(store: Store, unit: str, outcome: Outcome, seconds: float) -> bool:
    """Store the outcome of a unit; return whether it was the first one.

    Findings and programs are written before the result. If the worker dies in between, the next
    one finds the same, with the same digests.
    """
    for found in outcome.found:
        store.put(f"finding/{found.digest}", encode(found))
    for name, text in outcome.programs.items():
        store.put(f"program/{name}", text.encode())
    outcome.result.at, outcome.result.seconds = time.time(), seconds
    return store.commit(unit, encode(outcome.result))


def work(
    plan: Plan,
    address: str,
    deadline: float | None = None,
    runs_here: Callable[[Target], bool] = lambda _target: False,
) -> int:
    """Play units until the campaign is finished or the time is over; return their number.

    Args:
        address: Address of the store.
        deadline: Time in seconds since 1970 after which no unit is taken.
        runs_here: Tells the targets whose engines are played in this process.

    Raises:
        EngineNotFoundError, RefusedError: an engine of the plan cannot be used on this machine.
        HarnessError: a check itself failed, or the store was away for too long.
    """
    store = open_store(address, plan.key)
    owner = f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
    campaign, num_units = Campaign(plan, store), 0
    rng, idle = Random(owner), IDLE_SECONDS[0]  # noqa: S311 - not for secrets
    with Environments(plan) as environments:

        def get_call(target: Target) -> Call:
            if runs_here(target):
                cell = next(it for it in plan.cells if plan.targets[it.target] is target)
                return call_here(load(plan.make_options(cell)))
            return environments.get(target.python).call

        while not STOP.is_set() and (deadline is None or time.time() < deadline):
            name = store.take(owner, plan.file.lease_seconds)
            if name is None:
                if campaign.advance():
                    break
                STOP.wait(idle * rng.uniform(0.5, 1.5))
                idle = min(2 * idle, IDLE_SECONDS[1])
                continue
            idle = IDLE_SECONDS[0]
            with renewed(store, name, owner, plan.file.lease_seconds):
                num_units += _play_one(campaign, name, get_call)
    return num_units


class Environments:
    """The processes of a worker, by interpreter: those that were used last, as many as the plan
    allows.
    """

    def __init__(self, plan: Plan) -> None:
        self._file = plan.file
        self._places: dict[str | None, Isolation] = {}

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._places.values():
            place.close()

    def get(self, python: str | None) -> Isolation:
        """Return the place of an interpreter's process, and end the one that rested longest if
        there are too many.
        """
        place = self._places.pop(python, None)
        if place is None:
            while len(self._places) >= self._file.environments:
                self._places.pop(next(iter(self._places))).close()
            place = Isolation(self._file.event_seconds, python=python)
        self._places[python] = place
        return place


def _play_one(campaign: Campaign, name: str, get_call: Callable[[Target], Call]) -> bool:
    """Play and commit one unit; return whether its result was the first one."""
    plan, store = campaign.plan, campaign.store
    number, place = split_name(name)
    unit = campaign.get_round(number).units[place]
    totals = campaign.get_totals(get_base(number))
    parents = store.get([f"program/{parent}" for parent in unit.parents])
    if totals is None or None in parents:
        return False  # the round was closed meanwhile
    started = time.perf_counter()
    call = get_call(plan.targets[plan.cells[unit.cell].target])
    texts = [str(data, "utf-8") for data in parents if data is not None]
    outcome = play_unit(plan, unit, name, totals, texts, call)
    return commit(store, name, outcome, time.perf_counter() - started)
