"""Comparison of what the adapter shows of vLLM with the results of vLLM's own functions.

Adapter and quirk are by one hand: where both misread a release alike, spec and snapshot are equal
and wrong. So what the adapter shows is asked of the release once more, by another way:

    key of a block ---> generate_block_hash_extra_keys, hash_block_tokens ---> its digest?
    block tables, and what plans told of them ---> get_block_ids
    cached blocks ---> get_cached_block        free queue, queues ---> their own counts

A key that leaves something out that the digest has, or has something that it leaves out, gives
another digest. The worker compares the real content of a block with the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    hash_block_tokens,
    make_block_hash_with_group_id,
)

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_block_keys import get_lora_name, get_text
from blockstep.conformance.engines.adapters.vllm_build import HASH, RELEASE, build_embeds
from blockstep.spec import vocabulary as v


class Audit:
    """The audit of one run.

    A result that was right is not computed again while its input stays equal.

    Args:
        scheduler: The scheduler of the release.
        lora_ids: The number of each adapter, as requests were built with.
        separate_names: See `VllmEngine.separate_names`.
    """

    def __init__(self, scheduler: Any, lora_ids: Mapping[str, int], separate_names: bool) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.pool = scheduler.kv_cache_manager.block_pool
        self.lora_ids = lora_ids
        self.separate_names = separate_names
        groups = scheduler.kv_cache_config.kv_cache_groups
        self.sizes = [group.kv_cache_spec.block_size for group in groups]
        self._digests: dict[v.BlockKey, bytes] = {}
        self._right: list[tuple[v.BlockKey | None, bytes | None]]
        self._right = [(None, None)] * len(self.pool.blocks)
        """The key and the digest of each block, when compared last."""
        self._tables: dict[v.RequestId, v.BlockTables] = {}
        """Block tables as plans sent them."""

    def check_plan(self, plan: v.Plan) -> None:
        """Check that plans sent each row the block table that it has.

        Raises:
            EngineFault: naming the row.
        """
        planned_tables = self._tables
        for row in plan.new:
            planned_tables[row.request_id] = row.block_ids
        for more in plan.cached:
            name, blocks = more.request_id, more.new_block_ids
            if not more.resumed:
                pairs = zip(planned_tables.get(name, ((),) * len(blocks)), blocks, strict=True)
                blocks = tuple(table + new for table, new in pairs)
            planned_tables[name] = blocks
        for any_row in plan.rows:
            name = any_row.request_id
            tables = self._get_tables(name)
            # no plan says which blocks a window has left; there its own table has null blocks
            seen_tables = tuple(map(self._forget, planned_tables[name], tables))
            _compare(f"the block table that plans told {name!r}", seen_tables, tables)

    def check_state(self, shown: v.Snapshot) -> None:
        """Check that a snapshot agrees with what the release says of itself.

        Raises:
            EngineFault: naming what differs.
        """
        right, blocks = self._right, self.pool.blocks
        for index, key in enumerate(shown.block_keys):
            tagged, (known, carried) = blocks[index].block_hash, right[index]
            if key is not known or tagged is not carried:
                self._check_block(index, key, tagged, shown)
                right[index] = (key, tagged)
        for request in shown.requests:
            name = request.request_id
            tables = self._get_tables(name)
            _compare(f"the block table shown of {name!r}", request.block_tables, tables)
        scheduler, pool = self.scheduler, self.pool
        waiting = len(shown.waiting) + len(shown.skipped_waiting)
        has_ended = bool(shown.finished_req_ids)
        if RELEASE.counts_held_as_ended and shown.transfers is not None:
            has_ended = has_ended or bool(shown.transfers.held)
        for what, seen, own in (
            ("blocks in the free queue", len(shown.free_queue), pool.get_num_free_blocks()),
            ("keys in the cache", len(shown.cached), len(pool.cached_block_hash_to_block)),
            ("running", len(shown.running), scheduler.get_request_counts()[0]),
            ("waiting", waiting, scheduler.get_request_counts()[1]),
            ("has ended", has_ended, scheduler.has_finished_requests()),
            (
                "has unfinished requests",
                scheduler.get_num_unfinished_requests() > 0,
                scheduler.has_unfinished_requests(),
            ),
        ):
            if seen != own:
                raise EngineFault(f"{what}: {seen} in the snapshot, {own} says the scheduler")

    def _check_block(
        self,
        index: int,
        key: v.BlockKey | None,
        tagged: Any,
        shown: v.Snapshot,
    ) -> None:
        """Check that a block has the digest of the key that is shown for it, and is hit by it."""
        if key is None or tagged is None:
            if (key is None) is not (tagged is None):
                raise EngineFault(
                    f"block {index} is shown with key {key!r}, and carries {tagged!r}"
                )
            return
        num_hashed = getattr(self.pool.blocks[index], "block_hash_num_tokens", None)
        name = self._name(key, num_hashed)
        if name is None or make_block_hash_with_group_id(name, key.group) != tagged:
            fault = EngineFault(
                f"block {index} is shown with {key!r}, and its digest is not of that: "
                "the key names something else than vLLM hashed"
            )
            bare = _without_extras(key)
            name = self._name(bare, num_hashed)
            if name is not None and make_block_hash_with_group_id(name, key.group) == tagged:
                fault.state = _show_key(shown, index, key, bare)
            raise fault
        cached = shown.cached
        found = self.pool.get_cached_block(name, [key.group])
        if found is not None and found[0].block_id not in cached.get(key, ()):
            raise EngineFault(
                f"block {found[0].block_id} is hit under {key!r}; shown are {cached.get(key, ())}"
            )

    def _name(self, key: v.BlockKey, num_tokens: int | None) -> bytes | None:
        """Return the release's name of a block: one digest, or one made of several; None if the key
        is of no whole block of its group, and of no part that it keeps.

        Newer releases say how many tokens a name covers (`num_tokens`, counted from the first), and
        may name the part of a block that a prompt fills.
        """
        size, block_size = len(key.token_ids), self.sizes[key.group]
        key = key.in_group(0)
        if size == block_size:
            return self._digest(key)
        chain = key.chain()
        if num_tokens not in (None, len(chain) * size):
            return None
        if len(chain) * size % block_size:
            return None if num_tokens is None else self._digest(key)
        digests = list(map(self._digest, chain[-(block_size // size) :]))
        name: bytes = kv_cache_utils.BlockHashListWithBlockSize(digests, size, block_size)[0]
        return name

    def _digest(self, key: v.BlockKey) -> bytes:
        """Return the digest of a key, as the release hashes it."""
        missing: list[v.BlockKey] = []
        link: v.BlockKey | None = key
        while link is not None and link not in self._digests:
            missing.append(link)
            link = link.parent
        parent = None if link is None else self._digests[link]
        for link in reversed(missing):
            parent = self._digests[link] = self._hash(link, parent)
        assert parent is not None
        return parent

    def _hash(self, key: v.BlockKey, parent: bytes | None) -> bytes:
        """Return the digest of one block after its parent's."""
        digest: bytes = hash_block_tokens(HASH, parent, key.token_ids, self.get_extras(key))
        return digest

    def get_event_extras(self, key: v.BlockKey, has_items: bool) -> Any:
        """Return the extra keys of a block in a KV event: those that are hashed, or in newer
        releases those that older ones hashed. Arguments are those of `get_extras`.
        """
        extras = self.get_extras(key, has_items)
        convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
        return extras if convert is None else convert([extras])[0]

    def get_extras(self, key: v.BlockKey, has_items: bool = True) -> Any:
        """Return what the release hashes of a block besides its tokens, for a request that has only
        what the key says, with each item just long enough to reach into the block.

        `has_items`: whether the request has its items; without an encoder only its hasher does.
        """
        start, size = key.index * len(key.token_ids), len(key.token_ids)
        items = [
            SimpleNamespace(
                identifier=get_text(identifier),
                mm_position=SimpleNamespace(offset=start + offset, length=max(1, 1 - offset)),
            )
            for identifier, offset in (key.items if has_items else ())
        ]
        # a request with embeddings has one for each prompt token, so the first block has some
        has_embeds = bool(key.chain()[0].embeds)
        lora = None
        if key.adapter is not None:
            lora = SimpleNamespace(
                lora_name=get_lora_name(key.adapter, self.separate_names),
                lora_int_id=self.lora_ids[key.adapter],
                lora_path="-",
            )
        request: Any = SimpleNamespace(
            mm_features=items,
            lora_request=lora,
            cache_salt=key.cache_salt and get_text(key.cache_salt),
            prompt_embeds=build_embeds((0,) * start + key.embeds) if has_embeds else None,
            _prompt_embeds_per_block_hashes={},
        )
        extras, _ = generate_block_hash_extra_keys(request, start, start + size, 0)
        return extras

    def _get_tables(self, name: v.RequestId) -> v.BlockTables:
        return tuple(map(tuple, self.manager.get_block_ids(name)))

    def _forget(
        self, planned: tuple[v.BlockId, ...], own: tuple[v.BlockId, ...]
    ) -> tuple[v.BlockId, ...]:
        """Return a table that plans sent, with null blocks where the release has them."""
        null = self.pool.null_block.block_id
        pairs = zip(planned, own, strict=False)
        return tuple(null if now == null else b for b, now in pairs) + planned[len(own) :]


def _compare(what: str, tables: v.BlockTables, own: v.BlockTables) -> None:
    if tables != own:
        raise EngineFault(f"{what} is {tables}, and vLLM's is {own}")


def _without_extras(key: v.BlockKey) -> v.BlockKey:
    """Return the key of the same tokens, of no adapter, salt or item."""
    bare: v.BlockKey | None = None
    for link in key.in_group(0).chain():
        bare = v.BlockKey(bare, link.token_ids)
    assert bare is not None
    return bare.in_group(key.group)


def _show_key(shown: v.Snapshot, index: int, key: v.BlockKey, hashed: v.BlockKey) -> v.Snapshot:
    """Return a state in which a block has the key that the release hashed, and not `key`."""
    cached = {**shown.cached, key: tuple(it for it in shown.cached.get(key, ()) if it != index)}
    cached[hashed] = (*cached.get(hashed, ()), index)
    keys = (*shown.block_keys[:index], hashed, *shown.block_keys[index + 1 :])
    kept = {one: blocks for one, blocks in cached.items() if blocks}
    return replace(shown, block_keys=keys, cached=kept)
