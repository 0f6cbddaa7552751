"""Store in a folder: a file for each key, complete or absent, and a lock for the leases. Opening of
a store, in a folder or at a server.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from blockstep.conformance.campaign.leases import Lease, Patient, Store, patiently
from blockstep.conformance.campaign.records import TOTALS_BYTES_MAX, split_name
from blockstep.conformance.campaign.redis_store import RedisStore
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.search.isolation import HarnessError
from blockstep.conformance.search.isolation.process import locked

KEY = re.compile(r"[a-z]+(/[a-z0-9-]+)?")


class FolderStore(Patient):
    """Store in a folder of one machine: a file for each key, and a lock for the leases.

    Every file is complete or absent.
    """

    away = (OSError,)

    def __init__(self, folder: Path) -> None:
        """Use a folder; it is made if need be."""
        self.name = str(folder)
        self._folder = folder
        try:
            for part in ("lease", "round", "result", "finding", "program", "totals"):
                (folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"store {folder}: cannot write: {error.strerror}") from None

    @patiently
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, None for those that are absent."""
        return [_read(self._path(key)) for key in keys]

    @patiently
    def put(self, key: str, data: bytes) -> bool:
        """Write a value unless there is one; return whether it was written."""
        with locked(self._folder / "lock"):
            return self._put(key, data)

    @patiently
    def drop(self, keys: Sequence[str]) -> None:
        """Delete keys."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    @patiently
    def publish(self, number: int, data: bytes, units: Sequence[str]) -> bool:
        """Write `round/NUMBER` and open its units; the round's file is written last."""
        with locked(self._folder / "lock"):
            if self._path(f"round/{number}").exists():
                return False
            for unit in units:
                self._write_lease(Lease(unit))
            return self._put(f"round/{number}", data)

    @patiently
    def count_rounds(self) -> int:
        """Return the number of published rounds."""
        return len(list((self._folder / "round").glob("*.json")))

    @patiently
    def take(self, owner: str, seconds: float) -> str | None:
        """Lease an open unit that has no valid lease; return the unit's name, or None."""
        with locked(self._folder / "lock"):
            for lease in self._list_leases():
                if lease.seconds <= 0 and self._is_open(lease.unit):
                    self._write_lease(Lease(lease.unit, owner, time.time() + seconds))
                    return lease.unit
        return None

    @patiently
    def renew(self, unit: str, owner: str, seconds: float) -> bool:
        """Extend a lease, unless it has passed to another owner or the unit is closed."""
        with locked(self._folder / "lock"):
            lease = self._read_lease(self._folder / "lease" / f"{unit}.json")
            is_mine = lease is not None and lease.owner == owner
            if is_mine:
                self._write_lease(Lease(unit, owner, time.time() + seconds))
            return is_mine

    @patiently
    def commit(self, unit: str, data: bytes) -> bool:
        """Write the result and close the unit, unless it was closed before."""
        with locked(self._folder / "lock"):
            is_written = self._is_open(unit) and self._put(f"result/{unit}", data)
            (self._folder / "lease" / f"{unit}.json").unlink(missing_ok=True)
            return is_written

    @patiently
    def list_leases(self) -> list[Lease]:
        """Return the open units with their leases."""
        return [lease for lease in self._list_leases() if self._is_open(lease.unit)]

    def _is_open(self, unit: str) -> bool:
        """Return whether a unit was published and has no result.

        A process that died in `publish` or in `commit` leaves leases of units that are not open.
        """
        number, _ = split_name(unit)
        has_lease = (self._folder / "lease" / f"{unit}.json").exists()
        has_result = self._path(f"result/{unit}").exists()
        return has_lease and self._path(f"round/{number}").exists() and not has_result

    def _list_leases(self) -> list[Lease]:
        now = time.time()
        found = map(self._read_lease, sorted((self._folder / "lease").glob("*.json")))
        return [Lease(it.unit, it.owner, max(it.seconds - now, 0.0)) for it in found if it]

    def _read_lease(self, path: Path) -> Lease | None:
        data = _read(path)
        with suppress(msgspec.MsgspecError):
            return None if data is None else msgspec.json.decode(data, type=Lease)
        return None

    def _write_lease(self, lease: Lease) -> None:
        """Write a lease; `seconds` is the time at which it expires."""
        _write(self._folder / "lease" / f"{lease.unit}.json", msgspec.json.encode(lease))

    def _put(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        if path.exists():
            return False
        _write(path, data)
        return True

    def _path(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise HarnessError(f"{key!r} is no key of a store")
        return self._folder / f"{key}.json"


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(TOTALS_BYTES_MAX + 1)
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Write a file that is complete or absent, also after a crash."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
