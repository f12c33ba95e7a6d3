"""Every bound of the system in one place; the relations between them are asserted on import.

Refusing is a normal answer, so every queue, batch, lease and park takes its bound from here.
"""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Keys and tables
KEY_BYTES = 32
GENERATION_BYTES = 8
LEASE_ID_BYTES = 16
CLIENT_ID_BYTES = 16
BOOT_ID_BYTES = 8
NODE_ID_BYTES = 8
CHECKSUM_BYTES = 8
RUNS_PER_OBJECT_MAX = 65_536
MANIFEST_BYTES_MAX = 256 * KIB

# Control messages
BATCH_KEYS_MAX = 1_024
FRAME_BYTES_MAX = 16 * MIB
REPORTS_PER_CALL_MAX = 256
REQUEST_NAME_MAX = 256  # characters of an engine's request id in a report
TOKEN_BYTES_MAX = 1_024
DEPTH_MAX = 1 << 32
OBJECT_BYTES_MAX = 1 << 40  # what a message may say; a namespace's geometry decides
PARKED_PER_CLIENT_MAX = 256
REQUESTS_IN_FLIGHT_MAX = 512  # sent over one connection and not answered; more wait at the client
UNSENT_BYTES_MAX = 64 * MIB  # of frames that the other side does not take; more are lost
WATCHED_KEYS_MAX = 65_536
NAMESPACES_MAX = 1_024
CLIENTS_MAX = 4_096
LEASES_PER_CLIENT_MAX = 4_096
EXTENTS_PER_OBJECT_MAX = 64
SUSPECTS_MAX = 64  # copies being verified at once

# What a node remembers of the past, to say why
LOST_KEYS_MAX = 65_536
REPORTS_REMEMBERED_MAX = 16_384

# Durations, in seconds
DURATION_S_MAX = 1e6  # what a message may say; the bounds below decide
RESERVATION_S_MAX = 120.0
LEASE_S_MAX = 120.0  # in total, renewals included
WAIT_S_MAX = 30.0
HOLD_S = 60.0  # how long a page stays held when a late write could still land in it
CLIENT_ACTIVE_S = 60.0  # how long after its last request a client counts as "others active"
YOUNG_S = 5.0  # in a full house: how long what was just committed is not given up for something newer
CLOCK_STEP_S_MAX = 1.0  # what the node's loop clock advances at most per reading

# Shares of the arena
LEASED_SHARE_MAX = 0.60
LEASED_AND_PROMOTED_SHARE_MAX = 0.70  # what is promoted for a lease may go beyond the share of leases
RESERVED_AND_HELD_SHARE_MAX = 0.30
CLIENT_SHARE_WITH_OTHERS = 0.50
OBJECTS_PER_CLIENT_MIN = 2  # a client may always hold this many objects of its namespace
OBJECTS_IN_ARENA_MIN = 8  # a smaller arena says so in Hello and in the log
LOW_WATER_SHARE = 0.05  # of the pages, kept free in the background

# Slices of work on the control loop
RESERVED_PER_SLICE = 16  # keys of a batch; then small requests are answered
EXPIRIES_PER_TICK_MAX = 1_024
EVICTED_PAGES_PER_TICK_MAX = 32
ADOPTED_PER_SLICE = 1_000  # objects that a device had when it was found
PROMOTIONS_LOOKED_AT_MAX = 256  # of those that wait for room, whenever some comes

# Bytes
PAGE_BYTES_DEFAULT = MIB
ARENA_BYTES_MIN = 256 * MIB
ARENA_BYTES_MAX = 64 * GIB
TRANSFER_BATCH_BYTES_MAX = 64 * MIB

# NVMe
NVME_THREADS_DEFAULT = 4  # 8 suit the latency of NVMe-oF
NVME_THREADS_MAX = 64
NVME_DEADLINE_S_DEFAULT = 5.0  # one I/O that takes longer means that the device is down
NVME_PROBE_S = 1.0  # between two looks at a device that is down
NVME_WATCH_S = 0.25  # between two looks at how long running I/O takes
NVME_IO_BYTES = MIB
NVME_WRITING_BYTES_MAX = 512 * MIB  # of objects being written to one device
NVME_COMMIT_RECORDS_MAX = 1_024  # in one group commit
SCRUB_PAUSE_S = 3_600.0  # between two passes of a node over a device
CATALOG_MAP_BYTES_MIN = 64 * MIB
NVME_LOW_WATER_SHARE = 0.02  # of the pages of all devices, kept free in the background
SPILLING_SHARE_MAX = 0.10  # of the arena: being written to NVMe at once
PROMOTING_SHARE_MAX = 0.25  # of the arena: being read from NVMe at once
PROMOTIONS_WAITING_MAX = 65_536
PROMOTE_BYTES_PER_S_FIRST = 1e9  # what a promotion is said to take before there was one
PROMOTE_RATE_WEIGHT = 0.1  # of the last one in the running mean
PROMOTE_DEADLINE_S_DEFAULT = 10.0  # to wait for room, and again for the device
SPILLS_AT_ONCE = 8  # calls to a device; what waits behind them is in memory only
PROMOTIONS_AT_ONCE = 16
FLUSH_S_DEFAULT = 20.0  # of a node that stops

# Index
INDEX_FIRST_KEYS = 32  # what a lookup asks for before it asks for the rest
INDEX_EXPIRY_S = 4 * 3_600
INDEX_PASS_S = 3_600  # how often, at the latest, a node publishes all its keys again
INDEX_PASS_S_MIN = 10.0
INDEX_PASS_KEYS_PER_S = 256  # on average: half a thousandth of what one Redis can do, for each node
INDEX_BATCH_KEYS_MAX = 256  # keys in one merge: less than a millisecond of Redis' only thread
INDEX_DIRTY_KEYS_MAX = 262_144  # keys waiting to be published; beyond that, a pass over all keys instead
HEARTBEAT_S = 2.0
HEARTBEAT_EXPIRY_S = 8.0
LAST_NODES_KEPT_S = 60.0  # when all heartbeats vanish at once

assert BATCH_KEYS_MAX * (KEY_BYTES + 256 * CHECKSUM_BYTES + 64) < FRAME_BYTES_MAX, (
    "a full batch of Commit or Acquire with 256 runs per object must fit into one frame"
)
assert LEASED_AND_PROMOTED_SHARE_MAX + RESERVED_AND_HELD_SHARE_MAX <= 1.0, "readers may not keep writers out"
assert LEASED_SHARE_MAX + RESERVED_AND_HELD_SHARE_MAX < 1.0, "something must be left to evict"
assert HEARTBEAT_S * 3 < HEARTBEAT_EXPIRY_S, "two lost heartbeats must not kill a node"
assert INDEX_PASS_S * 2 < INDEX_EXPIRY_S, "an hourly pass that fails must not cost every entry"
assert PARKED_PER_CLIENT_MAX < REQUESTS_IN_FLIGHT_MAX, "parked requests may not keep all others out"
assert 2 * FRAME_BYTES_MAX <= UNSENT_BYTES_MAX, "a client that is slow for a moment may not lose a reply"
assert WAIT_S_MAX < LEASE_S_MAX, "a parked Acquire may not outlive its own lease"
