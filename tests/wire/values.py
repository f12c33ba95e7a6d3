"""Messages of every kind, drawn by Hypothesis from the edges of what is allowed."""

from hypothesis import strategies as st

from kvstore.core import MissReason, limits
from kvstore.wire import (
    Abort,
    Acquire,
    Acquired,
    Busy,
    Commit,
    CommitDone,
    CommitItem,
    Committed,
    Done,
    Drop,
    Exists,
    Failed,
    Filling,
    Granted,
    Hello,
    LeaseState,
    Miss,
    OnDisk,
    Pages,
    Prefetch,
    Refused,
    Release,
    Renew,
    Reply,
    Report,
    ReportItem,
    Request,
    Reserve,
    Reserved,
    ReserveItem,
    Resident,
    Stale,
    Suspect,
    Verdict,
    Welcome,
)


def exactly(size: int):
    return st.binary(min_size=size, max_size=size)


keys = exactly(limits.KEY_BYTES)
namespaces = keys
leases = exactly(limits.LEASE_ID_BYTES)
generations = exactly(limits.GENERATION_BYTES)
clients = exactly(limits.CLIENT_ID_BYTES)
durations = st.one_of(st.sampled_from([0.0, limits.DURATION_S_MAX]), st.floats(0.0, limits.DURATION_S_MAX))
tables = st.binary(max_size=64)
counts = st.one_of(st.sampled_from([0, 127, 128, 2**32, 2**63 - 1]), st.integers(0, 2**63 - 1))
sizes = st.one_of(st.sampled_from([1, limits.OBJECT_BYTES_MAX]), st.integers(1, limits.OBJECT_BYTES_MAX))
depths = st.sampled_from([0, 1, limits.DEPTH_MAX])
reasons = st.sampled_from(MissReason)
names = st.text(max_size=limits.REQUEST_NAME_MAX)
seconds = st.floats(allow_nan=False, allow_infinity=False)
extents = st.lists(st.tuples(st.integers(0, 2**32), st.integers(1, 2**32)), max_size=4).map(tuple)


def batch(values):
    return st.lists(values, max_size=5).map(tuple)


reports = st.builds(ReportItem, names, counts, counts, counts, st.none() | reasons, counts)
bodies = st.one_of(
    st.builds(Hello, st.just(b"") | namespaces, st.binary(max_size=64)),
    st.builds(
        Reserve,
        namespaces,
        batch(st.builds(ReserveItem, keys, keys, depths, sizes, st.booleans())),
        durations,
    ),
    st.builds(Commit, namespaces, batch(st.builds(CommitItem, keys, generations, tables))),
    st.builds(Abort, namespaces, batch(st.tuples(keys, generations)), st.booleans()),
    st.builds(Acquire, namespaces, batch(keys), leases, durations, durations, st.booleans(), st.booleans()),
    st.builds(Pages, leases, batch(keys), durations, st.booleans()),
    st.builds(Renew, leases, durations),
    st.builds(Release, leases, batch(keys), st.booleans()),
    st.builds(Prefetch, namespaces, batch(keys)),
    st.builds(Suspect, namespaces, keys, generations, leases),
    st.builds(Report, batch(reports)),
    st.builds(Drop, namespaces, batch(keys)),
)
requests = st.builds(
    Request,
    st.integers(0, 2**31),
    clients,
    counts,
    bodies,
    st.binary(max_size=limits.TOKEN_BYTES_MAX),
)

reserve_answers = st.one_of(
    st.builds(Granted, generations, extents),
    st.just(Exists()),
    st.just(Busy()),
    st.builds(Refused, reasons),
)
acquire_answers = st.one_of(
    st.builds(Resident, generations, extents, sizes, tables),
    st.builds(OnDisk, generations, sizes, seconds),
    st.just(Filling()),
    st.builds(Miss, reasons),
)
welcomes = st.builds(
    Welcome,
    exactly(limits.NODE_ID_BYTES),
    st.just((1,)),
    sizes,
    counts,
    sizes,
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2),
    st.text(max_size=8),
    st.text(max_size=8),
    sizes,
    seconds,
    st.text(max_size=8),
)
replies = st.builds(
    Reply,
    st.integers(0, 2**31),
    exactly(limits.BOOT_ID_BYTES),
    counts,
    st.one_of(
        welcomes,
        st.builds(Reserved, batch(reserve_answers)),
        st.builds(CommitDone, batch(st.sampled_from([Committed(), Stale()]))),
        st.builds(Acquired, batch(acquire_answers)),
        st.builds(LeaseState, seconds),
        st.builds(Verdict, st.booleans()),
        st.just(Done()),
        st.builds(Failed, st.text(max_size=8), st.text(max_size=8)),
    ),
)
