"""Opening of stores, at a folder or at a server."""

from __future__ import annotations

from pathlib import Path

from blockstep.conformance.campaign.folder import FolderStore
from blockstep.conformance.campaign.leases import Store
from blockstep.conformance.campaign.redis_store import RedisStore
from blockstep.conformance.protocol.features import UsageError


def open_store(address: str, campaign: str) -> Store:
    """Return the store at a folder, or at a `redis://`, `rediss://` or `unix://` address.

    Raises:
        UsageError: it cannot be used.
    """
    if "://" not in address:
        return FolderStore(Path(address) / campaign)
    scheme = address.partition("://")[0]
    if scheme not in ("redis", "rediss", "unix"):
        raise UsageError(f"store {scheme}://: must be a folder, redis://, rediss:// or unix://")
    return RedisStore(address, campaign)


def get_one(store: Store, key: str) -> bytes | None:
    """Return the value of one key, or None."""
    return store.get([key])[0]
