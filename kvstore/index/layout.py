"""How the index looks in Redis: names of keys, packed values, and the script that merges them. Pure.

    kv:{pp}<key>          where a key is; pp = first key byte mod 64 in hex, the Cluster hash tag
    kv:fence:<node>       the number of the node's last write (Cluster: kv:{pp}fence:<node>, one per tag)
    kv:nodes              sorted set: node id by the time (Redis' clock) of its last heartbeat
    kv:node:<node>        its heartbeat, JSON, expires in seconds
    kv:ns:<hex digest>    a manifest, JSON

A value is one version byte and one entry of fixed width per holding node, the newest last:

    offset  size  field
    0       8     node id
    8       1     tier: 1 DRAM, 2 NVMe
    9       3     hour of Redis' clock (since 1970) in which the node said so, big-endian

Anything else found under such a name is no value: readers see "absent", the next merge replaces it.

Why a fence: a write that timed out may still be executed, seconds later and after newer ones (Redis was
stopped, the network healed). Every write of a node carries a number that only grows; the script refuses
a number that is not above the last one. The same number tells a lost or rolled-back index: it is then
lower than what the node knows to have been written.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from kvstore.core import Key, Namespace, Tier
from kvstore.index.base import Location
from kvstore.wire import NodeId

PARTITIONS: Final = 64
HOLDERS_MAX: Final = 32  # entries in a value; when more nodes hold a key, the oldest entry goes
SEQUENCE_MAX: Final = (1 << 53) - 1  # Lua counts in doubles
NODES: Final = b"kv:nodes"

_VERSION: Final = 1
_ENTRY: Final = Struct(">8sI")
_CODES: Final = {Tier.DRAM: 1, Tier.NVME: 2}
_TIERS: Final = {code: tier for tier, code in _CODES.items()}
_TAGS: Final = tuple(b"{%02x}" % number for number in range(PARTITIONS))
_PREFIXES: Final = tuple(b"kv:" + _TAGS[first % PARTITIONS] for first in range(256))


def key_name(key: Key) -> bytes:
    """The Redis key of a chunk's key."""
    return _PREFIXES[key[0]] + key


def partition(key: Key) -> int:
    """The hash tag's number of a key."""
    return key[0] % PARTITIONS


def fence_name(node: NodeId, number: int | None) -> bytes:
    """The fence of a node's writes to partition `number`, or to all of an unpartitioned Redis (None)."""
    return b"kv:" + (b"" if number is None else _TAGS[number]) + b"fence:" + node


def node_name(node: NodeId) -> bytes:
    """The Redis key of a node's heartbeat."""
    return b"kv:node:" + node


def manifest_name(namespace: Namespace) -> bytes:
    """The Redis key of a manifest."""
    return b"kv:ns:" + namespace.hex().encode()


def encode(locations: Sequence[Location]) -> bytes:
    """The packed value of these entries."""
    packed = (_ENTRY.pack(node, _CODES[tier] << 24 | hour) for node, tier, hour in locations)
    return bytes([_VERSION]) + b"".join(packed)


@lru_cache(maxsize=4096)  # neighbours in a chain have equal values: a lookup decodes a few, not hundreds
def decode(value: bytes | None) -> tuple[Location, ...]:
    """The entries of a value; none if it is missing, foreign or damaged."""
    if not value or value[0] != _VERSION or (len(value) - 1) % _ENTRY.size:
        return ()
    entries = list(_ENTRY.iter_unpack(memoryview(value)[1:]))
    if any(word >> 24 not in _TIERS for _, word in entries):
        return ()
    return tuple(Location(NodeId(node), _TIERS[word >> 24], word & 0xFFFFFF) for node, word in entries)


def tier_bytes(tiers: Sequence[Tier | None]) -> bytes:
    """What the merge script is told: one byte per key, 0 for "not any more"."""
    return bytes(0 if tier is None else _CODES[tier] for tier in tiers)


class Script(NamedTuple):
    """A Lua script and the SHA-1 by which Redis knows it."""

    text: str
    sha: str


def _script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


MERGE: Final = _script(
    f"""
-- KEYS: fence, keys...   ARGV: node, sequence, expiry in seconds, one tier byte per key
-- Answers the fence as it was: at or above `sequence` nothing was written.
-- MGET and not GET, because it answers nothing instead of an error where a foreign type lies.
local node, sequence, expiry_s, tiers = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local last = tonumber(redis.call('MGET', KEYS[1])[1] or '') or 0
if not (last >= 0 and last <= {SEQUENCE_MAX}) then last = 0 end
if last >= sequence then return last end
redis.call('SET', KEYS[1], ARGV[2], 'EX', expiry_s)
if #KEYS == 1 then return last end

local function hour_of(entry)
  local _, a, b, c = string.byte(entry, 9, 12)
  return a * 65536 + b * 256 + c
end

local hour = math.floor(redis.call('TIME')[1] / 3600)
local oldest = hour - math.ceil(tonumber(expiry_s) / 3600)
local stamp = string.char(math.floor(hour / 65536) % 256, math.floor(hour / 256) % 256, hour % 256)
local version = string.char({_VERSION})

-- The entries of a value that stay, the oldest first; none if it is no value of ours.
local function kept_of(value)
  local kept = {{}}
  if not value or #value % {_ENTRY.size} ~= 1 or string.sub(value, 1, 1) ~= version then return kept end
  for at = 2, #value, {_ENTRY.size} do
    local entry = string.sub(value, at, at + {_ENTRY.size - 1})
    local tier = string.byte(entry, 9)
    if tier < 1 or tier > {len(_CODES)} then return {{}} end
    if string.sub(entry, 1, 8) ~= node and hour_of(entry) >= oldest then kept[#kept + 1] = entry end
  end
  return kept
end

local mine = {{}}
for code = 1, {len(_CODES)} do mine[code] = node .. string.char(code) .. stamp end
local values = redis.call('MGET', unpack(KEYS, 2))
for i = 1, #values do
  local kept = kept_of(values[i])
  local code = string.byte(tiers, i)
  if code ~= 0 then kept[#kept + 1] = mine[code] end
  while #kept > {HOLDERS_MAX} do table.remove(kept, 1) end
  if #kept == 0 then
    redis.call('DEL', KEYS[i + 1])
  else
    redis.call('SET', KEYS[i + 1], version .. table.concat(kept), 'EX', expiry_s)
  end
end
return last
"""
)

ENROL: Final = _script(
    """
-- KEYS: set of nodes   ARGV: node, seconds after which a node without heartbeat is forgotten
-- Times are Redis' own, so that no node's clock can push the others out.
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then redis.call('DEL', KEYS[1]) end
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
return now
"""
)

SCRIPTS: Final = {script.sha: script.text for script in (MERGE, ENROL)}
