"""A KV connector of vLLM's own class that answers what events tell it to answer.

    KVOffer --> Store.offers --> get_num_new_matched_tokens --+
    the scheduler --> update_state_after_alloc --> loads -----+--> build_connector_meta --> kv_loads
    a worker's report --> update_connector_output             request_finished --> blocks are held

It records the calls of the scheduler, and checks each call against the calls before it (D16). It
has a scheduler side only; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_releases import require_release
from blockstep.spec import vocabulary as v

RELEASE = require_release()


class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The loads that a worker performs, in the order of allocation."""

    def __init__(self, loads: Sequence[v.KVLoad]) -> None:
        self.loads = tuple(loads)


class Store(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler side of the connector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._sizes = [group.kv_cache_spec.block_size for group in groups]
        self._has_states = any(
            type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups
        )
        self.offers: dict[v.RequestId, v.KVOffer] = {}
        """The offers to unfinished requests."""
        self.loading: set[v.RequestId] = set()
        """Requests whose asynchronous load was started and is not confirmed."""
        self.sending: set[v.RequestId] = set()
        """Finished requests whose blocks it reads."""
        self.stages: dict[v.RequestId, str] = {}
        """Stages of asynchronous loads, by waiting request, in the words of newer releases.
        A load that is under way has the stage that it had before: its request has a status."""
        self.spares_full_loads = True
        self._asked: dict[v.RequestId, tuple[int, int, bool]] = {}
        """The tokens of the local hit, the external tokens, and whether the load is asynchronous,
        for each request asked about in this step."""
        self._loads: list[v.KVLoad] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """Return whether a preempted request may not finish by the tokens of its frame; newer
        releases ask.

        The answer is no: what this store does not get to read can be computed again.
        """
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens after the local hit that the store has, without the last known token,
        which is computed.

        An asynchronous load may cover all tokens: the release drops the last one itself. But no
        release drops it from a recurrent state, so connectors with states leave it out themselves
        (upstream #37310). This store has states only after the last token of an offer.
        """
        name = request.request_id
        if name in self._asked:
            raise EngineFault(f"the connector is asked about {name!r} twice in one step")
        if request.num_computed_tokens:
            raise EngineFault(f"the connector is asked about {name!r}, which has computed some")
        offer = self.offers.get(name, v.KVOffer(name))
        if offer.num_tokens is None:
            return None, False
        limit = request.num_tokens
        if self._has_states or (self.spares_full_loads and not offer.is_async):
            limit -= 1
        if self._has_states and offer.num_tokens > limit:
            limit = 0
        num_external = max(min(offer.num_tokens, limit) - num_computed_tokens, 0)
        is_async = offer.is_async and num_external > 0
        if RELEASE.ignores_offers_without_cache_reads and request.skip_reading_prefix_cache:
            self._asked[name] = (num_computed_tokens, 0, False)
        else:
            self._asked[name] = (num_computed_tokens, num_external, is_async)
        self.stages.pop(name, None)
        if self._asked[name][2]:
            self.stages[name] = "waiting_to_start"
        return num_external, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks into which a request's tokens are loaded, if it loads any."""
        name = request.request_id
        num_local, num_external, is_async = self._asked.pop(name, (0, 0, False))
        if num_external_tokens != num_external:
            raise EngineFault(
                f"the connector is given {num_external_tokens} tokens of {name!r}; "
                f"it offered {num_external}"
            )
        if not num_external:
            return
        end = num_local + num_external
        tables = tuple(
            tuple(table[: -(-end // size)])
            for table, size in zip(blocks.get_block_ids(), self._sizes, strict=True)
        )
        self._loads.append(v.KVLoad(name, tables, num_local, num_external, is_async))
        if is_async:
            self.loading.add(name)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the loads since the last plan."""
        for name in scheduler_output.num_scheduled_tokens:
            self.stages.pop(name, None)
        loads, self._loads = self._loads, []
        self._asked.clear()
        return Loads(loads)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in a worker's report before the scheduler acts on it."""
        received = connector_output.finished_recving or ()
        confirmed = [name for name in received if name in self.stages]  # the others have ended
        self.stages.update(dict.fromkeys(confirmed, "completed_waiting"))
        self.loading.difference_update(received)
        self.sending.difference_update(connector_output.finished_sending or ())

    def forget(self, names: Iterable[v.RequestId], requests: Container[v.RequestId]) -> None:
        """Forget reported requests that the scheduler no longer knows."""
        gone = {name for name in names if name not in requests}
        self.loading -= gone
        self.sending -= gone

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether it reads the blocks of a finished request: if its offer says so, and
        there are any.
        """
        self.stages.pop(request.request_id, None)
        offer = self.offers.pop(request.request_id, None)
        is_sending = offer is not None and offer.delays_free and any(block_ids)
        if is_sending:
            self.sending.add(request.request_id)
        return is_sending, None

    def reset_cache(self) -> None:
        """Forget all offers."""
        self.offers.clear()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Raise: there is no worker side."""
        raise NotImplementedError("this connector has no worker side, so it loads nothing")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Raise: there is no worker side."""
        raise NotImplementedError("this connector has no worker side, so it loads nothing")

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Raise: there is no worker side."""
        raise NotImplementedError("this connector has no worker side, so it saves nothing")

    def wait_for_save(self) -> None:
        """Raise: there is no worker side."""
        raise NotImplementedError("this connector has no worker side, so it saves nothing")


def ask_for_store(vllm_config: Any, policy: v.KVLoadFailurePolicy) -> None:
    """Make the release build `Store` as its connector."""
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=Store.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy=policy.value,
    )


def build_report(transfers: v.KVTransfers) -> KVConnectorOutput | None:
    """Return a worker's report as the release's worker passes it on; None if it is empty.

    The release iterates over ids in the order of a set; here they keep the order given.
    """
    if transfers == v.KVTransfers():
        return None
    sent, received = (
        dict.fromkeys(names) for names in (transfers.finished_sending, transfers.finished_recving)
    )
    return KVConnectorOutput(
        finished_sending=sent,
        finished_recving=received,
        invalid_block_ids=set(transfers.invalid_block_ids),
    )


def read_kv_loads(metadata: Any) -> tuple[v.KVLoad, ...]:
    """Return the loads in a plan.

    Raises:
        EngineFault: the plan has something else from a connector.
    """
    if not isinstance(metadata, Loads):
        raise EngineFault(f"kv_connector_metadata in this plan is {metadata!r}")
    return metadata.loads


def read_deferred_frees(scheduler: Any, in_flight: Iterable[v.FrameId]) -> Iterator[v.DeferredFree]:
    """Return the blocks that the release frees when a plan in flight is answered.

    Args:
        scheduler: It numbers plans with rows from 1, and counts those that were answered.
        in_flight: Plans with rows that were not answered, oldest first.

    Raises:
        EngineFault: blocks wait for no plan in flight.
    """
    frames = dict(enumerate(in_flight, scheduler.processed_step_seq + 1))
    for number, blocks in scheduler.deferred_frees:
        if number not in frames:
            raise EngineFault(f"blocks wait for step {number}; in flight are {sorted(frames)}")
        yield v.DeferredFree(frames[number], tuple([block.block_id for block in blocks]))


def check_store(store: Store, requests: dict[v.RequestId, Any], received: set[v.RequestId]) -> None:
    """Check that the scheduler and its connector agree on which requests load or are read.

    Args:
        store: The scheduler's connector.
        requests: The scheduler's, ended ones that hold blocks included.
        received: Its requests that wait for a load which is confirmed.

    Raises:
        EngineFault: naming the requests.
    """
    parked = {
        name
        for name, request in requests.items()
        if request.status.name == "WAITING_FOR_REMOTE_KVS"
    }
    held = sorted(name for name, request in requests.items() if request.is_finished())
    known, waiting = parked | set(held), parked - received
    if freed := store.sending - known:
        raise EngineFault(
            f"the connector still reads the blocks of {sorted(freed)}, and the scheduler has freed "
            f"them; it holds those of {held}"
        )
    if unknown := store.loading - known:
        raise EngineFault(
            f"the connector loads for {sorted(unknown)}, and the scheduler does not wait for that; "
            f"waiting are {sorted(parked)}"
        )
    if waiting != parked & store.loading:
        raise EngineFault(
            f"{sorted(waiting)} wait for loads, and the connector loads for {sorted(store.loading)}"
        )


def read_transfers(
    store: Store,
    requests: dict[v.RequestId, Any],
    received: set[v.RequestId],
    managers: Any,
    deferred_frees: Iterable[v.DeferredFree] = (),
) -> v.TransfersSnapshot:
    """Return the transfers in progress between pool and store.

    A release that publishes blocks as soon as they are loaded has no unconfirmed loads.

    Args:
        store: The scheduler's connector.
        requests: The scheduler's, ended ones that hold blocks included.
        received: Its requests that wait for a load which is confirmed.
        managers: Of the block tables of each group.
        deferred_frees: Blocks that wait for plans in flight.
    """
    held = sorted(name for name, request in requests.items() if request.is_finished())
    return v.TransfersSnapshot(
        offers=tuple(
            offer for name, offer in sorted(store.offers.items()) if offer != v.KVOffer(name)
        ),
        received=tuple(sorted(received)),
        held=tuple(
            v.HeldBlocks(
                name,
                tuple(
                    tuple(block.block_id for block in manager.req_to_blocks.get(name, ()))
                    for manager in managers
                ),
                is_recving=name in store.loading,
                is_sending=name in store.sending,
            )
            for name in held
        ),
        deferred_frees=tuple(deferred_frees),
    )
