"""Executor: where the workers of one command run. The worker is the same everywhere.

On one machine workers are threads, each with an engine in a child process of its own, as in
`check --jobs` and `hunt --jobs`. On Ray they are tasks. Ray starts a task again, if need be on
another machine, if its process or its machine is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from contextlib import contextmanager
from typing import Any

from blockstep.conformance.campaign.plan import Plan, Target
from blockstep.conformance.campaign.worker import STOP, work
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.search.isolation import Isolation

TICK_SECONDS = 2.0


class RayPool(Executor):
    """Executor that runs functions as tasks of a Ray cluster."""

    def __init__(self, address: str, jobs: int) -> None:
        """Connect to a cluster; `local` starts one on this machine, for this number of tasks (0:
        one for each core).

        Raises:
            UsageError: Ray is not installed, or there is no cluster.
        """
        try:
            import ray  # noqa: PLC0415 - an extra
        except ImportError:
            what = "the package ray is not installed; pip install 'blockstep[campaign]'"
            raise UsageError(f"--ray {address}: {what}") from None
        self._ray: Any = ray
        try:
            number = {"num_cpus": jobs} if address == "local" and jobs else {}
            ray.init(address=address, log_to_driver=True, include_dashboard=False, **number)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"--ray {address}: {error}") from None

    def count(self) -> int:
        """Return the number of cores of the cluster."""
        return int(self._ray.cluster_resources().get("CPU", 1))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task on one core; it is started again if its process or machine is lost."""
        task = self._ray.remote(num_cpus=1, max_retries=-1)(fn)
        future: Future[Any] = task.remote(*args, **kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Leave the cluster, whose tasks of this command then end."""
        self._ray.shutdown()


@contextmanager
def open_executor(ray: str | None, jobs: int) -> Iterator[tuple[Executor, int]]:
    """Open an executor, and yield it with its number of workers."""
    if ray is not None:
        with RayPool(ray, jobs) as pool:
            yield pool, jobs or pool.count()
        return
    with Isolation() as place, place.open_pool(jobs) as threads:
        try:
            yield threads, jobs
        except BaseException:
            STOP.set()
            raise


def run_workers(
    plan: Plan,
    address: str,
    jobs: int,
    ray: str | None = None,
    deadline: float | None = None,
    runs_here: Callable[[Target], bool] = lambda _target: False,
    on_tick: Callable[[], None] = lambda: None,
) -> int:
    """Run workers until they end, and return the number of units that they played.

    Arguments as of `work`; `on_tick` is called every `TICK_SECONDS`.

    Raises:
        Exception: the first that a worker raised; the others end after their unit.
    """
    with open_executor(ray, jobs) as (pool, number):
        futures = [pool.submit(work, plan, address, deadline, runs_here) for _ in range(number)]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, TICK_SECONDS, FIRST_EXCEPTION)
            if any(it.exception() for it in done):
                STOP.set()
            on_tick()
        STOP.clear()
        return sum(future.result() for future in futures)
