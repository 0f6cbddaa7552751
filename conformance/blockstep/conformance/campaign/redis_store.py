"""Store in Redis or Valkey: scripts of the server make each step atomic.

The open units are a sorted set with the end of each lease as its score, in milliseconds of the
server's clock, so that clocks of the workers do not matter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from blockstep.conformance.campaign.leases import Lease, Patient, patiently
from blockstep.conformance.campaign.records import TOTALS_BYTES_MAX, RecordError
from blockstep.conformance.protocol.features import UsageError

SOCKET_SECONDS = 10.0
NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"
PUBLISH = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 2, #ARGV do redis.call('ZADD', KEYS[2], 0, ARGV[i]) end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('INCR', KEYS[3])
return 1
"""
TAKE = f"""{NOW}
local unit = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1)[1]
if not unit then return false end
redis.call('ZADD', KEYS[1], now + ARGV[2], unit)
redis.call('HSET', KEYS[2], unit, ARGV[1])
return unit
"""
RENEW = f"""{NOW}
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZADD', KEYS[1], 'XX', now + ARGV[3], ARGV[1])
return 1
"""
COMMIT = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('SET', KEYS[3], ARGV[2])
return 1
"""
LIST = f"{NOW} return {{now, redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')}}"


class RedisStore(Patient):
    """Store of one campaign in Redis, under the keys `blockstep:CAMPAIGN:...`."""

    def __init__(self, address: str, campaign: str) -> None:
        """Connect to a server.

        Raises:
            UsageError: the package is absent, or the server refuses the address.
        """
        try:
            import redis  # noqa: PLC0415 - an extra
        except ImportError:
            what = "the package redis is not installed; pip install 'blockstep[campaign]'"
            raise UsageError(f"store {address.partition('://')[0]}://: {what}") from None
        away = redis.exceptions
        self.away = (away.ConnectionError, away.TimeoutError)
        refused = (away.AuthenticationError, away.ResponseError, ValueError)
        try:
            self._redis: Any = redis.Redis.from_url(
                address, socket_timeout=SOCKET_SECONDS, socket_connect_timeout=SOCKET_SECONDS
            )
            kwargs = self._redis.connection_pool.connection_kwargs
            self.name = f"{kwargs.get('host', kwargs.get('path'))}:{kwargs.get('port', '')}"
            self._prefix = f"blockstep:{campaign}:"
            self._open, self._owners = self._key("open"), self._key("owners")
            scripts = (PUBLISH, TAKE, RENEW, COMMIT, LIST)
            self._publish, self._take, self._renew, self._commit, self._list = map(
                self._redis.register_script, scripts
            )
            self._ping()
        except refused as error:
            raise UsageError(f"store: {error}") from None

    @patiently
    def _ping(self) -> None:
        """Wait for the server. An error of authentication is one of connections, too."""
        import redis  # noqa: PLC0415 - an extra

        try:
            self._redis.ping()
        except redis.exceptions.AuthenticationError as error:
            raise UsageError(f"store {self.name}: {error}") from None

    @patiently
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, None for those that are absent."""
        found = self._redis.mget([self._key(key) for key in keys]) if keys else []
        return [None if data is None else _unpack(data) for data in found]

    @patiently
    def put(self, key: str, data: bytes) -> bool:
        """Write a value unless there is one; return whether it was written."""
        return bool(self._redis.set(self._key(key), zlib.compress(data), nx=True))

    @patiently
    def drop(self, keys: Sequence[str]) -> None:
        """Delete keys."""
        if keys:
            self._redis.delete(*map(self._key, keys))

    @patiently
    def publish(self, number: int, data: bytes, units: Sequence[str]) -> bool:
        """Write `round/NUMBER` and open its units, all or nothing, unless it is there."""
        keys = [self._key(f"round/{number}"), self._open, self._key("rounds")]
        return bool(self._publish(keys, [zlib.compress(data), *units]))

    @patiently
    def count_rounds(self) -> int:
        """Return the number of published rounds."""
        return int(self._redis.get(self._key("rounds")) or 0)

    @patiently
    def take(self, owner: str, seconds: float) -> str | None:
        """Lease an open unit that has no valid lease; return the unit's name, or None."""
        unit = self._take([self._open, self._owners], [owner, int(seconds * 1000)])
        return None if unit is None else str(unit, "ascii")

    @patiently
    def renew(self, unit: str, owner: str, seconds: float) -> bool:
        """Extend a lease, unless it has passed to another owner or the unit is closed."""
        args = [unit, owner, int(seconds * 1000)]
        return bool(self._renew([self._open, self._owners], args))

    @patiently
    def commit(self, unit: str, data: bytes) -> bool:
        """Write the result and close the unit, unless it was closed before."""
        keys = [self._open, self._owners, self._key(f"result/{unit}")]
        return bool(self._commit(keys, [unit, zlib.compress(data)]))

    @patiently
    def list_leases(self) -> list[Lease]:
        """Return the open units with their leases."""
        now, found = self._list([self._open])
        owners = {
            str(k, "ascii"): str(o, "ascii", "replace") for k, o in self._get_owners().items()
        }
        names = [str(name, "ascii") for name in found[::2]]
        left = [max(float(score) - int(now), 0) / 1000 for score in found[1::2]]
        return [Lease(name, owners.get(name, ""), s) for name, s in zip(names, left, strict=True)]

    def _get_owners(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self._redis.hgetall(self._owners)
        return found

    def _key(self, key: str) -> str:
        return f"{self._prefix}{key}"


def _unpack(data: bytes) -> bytes:
    """Return the compressed value. Raises RecordError: it is damaged, or too long."""
    unpacking = zlib.decompressobj()
    try:
        value = unpacking.decompress(data, TOTALS_BYTES_MAX)
    except zlib.error as error:
        raise RecordError(f"a record cannot be read: {error}") from None
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise RecordError(f"a record is cut off, or longer than {TOTALS_BYTES_MAX} bytes")
    return value
