"""The control messages, as plain data. docs/PROTOCOL.md explains them; this file is the reference.

One request frame and one reply frame, msgpack. Requests carry durations, never instants: the client
counts from sending, the node from handling. Every request may be repeated with the same arguments and
then has the same effect once (leases are named by the client for that reason).

What a node must bound in a request (sizes of ids, lengths of batches, durations that are numbers) is part
of the types, so the decoder refuses it before an object is made.
"""

from typing import Annotated, NewType

import msgspec
from msgspec import Meta

from kvstore.core import Key, MissReason, Namespace, limits

VERSION = 1
VERSIONS_SPOKEN = (1,)  # a node speaks N and N-1; this is the first

ClientId = NewType("ClientId", bytes)
"""16 random bytes per client process."""
LeaseId = NewType("LeaseId", bytes)
"""16 random bytes, chosen by the client."""
Generation = NewType("Generation", bytes)
"""8 random bytes per reservation, never reused."""
NodeId = NewType("NodeId", bytes)
"""8 bytes that name a node."""
BootId = NewType("BootId", bytes)
"""8 random bytes per start of a node."""


_KEY = Meta(min_length=limits.KEY_BYTES, max_length=limits.KEY_BYTES)
_LEASE = Meta(min_length=limits.LEASE_ID_BYTES, max_length=limits.LEASE_ID_BYTES)
_GENERATION = Meta(min_length=limits.GENERATION_BYTES, max_length=limits.GENERATION_BYTES)
_CLIENT = Meta(min_length=limits.CLIENT_ID_BYTES, max_length=limits.CLIENT_ID_BYTES)
_BATCH = Meta(max_length=limits.BATCH_KEYS_MAX)
_DURATION = Meta(ge=0.0, le=limits.DURATION_S_MAX)  # refuses NaN too; the store applies the real bounds

_Key = Annotated[Key, _KEY]
_Keys = Annotated[tuple[_Key, ...], _BATCH]
_Namespace = Annotated[Namespace, _KEY]
_LeaseId = Annotated[LeaseId, _LEASE]
_Generation = Annotated[Generation, _GENERATION]
_Duration = Annotated[float, _DURATION]
_Tokens = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A tagged, positional message. New fields go to the end, with a default."""


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A positional record inside a message."""


WireExtents = tuple[tuple[int, int], ...]
"""(start page, page count), in object order."""


# --- requests ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First words to a boot of a node; again for every namespace. Both fields empty: just the facts."""

    namespace: Annotated[bytes, Meta(max_length=limits.KEY_BYTES)] = b""
    manifest: Annotated[bytes, Meta(max_length=limits.MANIFEST_BYTES_MAX)] = b""


class ReserveItem(Item, frozen=True):
    """One object to be written. `depth` is the chunk's position in its chain, from 0."""

    key: _Key
    parent: _Key
    depth: Annotated[int, Meta(ge=0, le=limits.DEPTH_MAX)]
    size_bytes: Annotated[int, Meta(ge=1, le=limits.OBJECT_BYTES_MAX)]
    cold: bool = False


class Reserve(Message, frozen=True):
    """Asks for the right to fill copies. Never waits."""

    namespace: _Namespace
    items: Annotated[tuple[ReserveItem, ...], _BATCH]
    duration_s: _Duration


class CommitItem(Item, frozen=True):
    """One filled object and its table."""

    key: _Key
    generation: _Generation
    table: Annotated[bytes, Meta(max_length=limits.RUNS_PER_OBJECT_MAX * limits.CHECKSUM_BYTES)]


class Commit(Message, frozen=True):
    """Publishes objects. Only after every transfer of every rank returned success."""

    namespace: _Namespace
    items: Annotated[tuple[CommitItem, ...], _BATCH]


class Abort(Message, frozen=True):
    """Gives reservations back. `quiet`: every transfer has ended or never began, nothing can land late."""

    namespace: _Namespace
    items: Annotated[tuple[tuple[_Key, _Generation], ...], _BATCH]
    quiet: bool


class Acquire(Message, frozen=True):
    """Leases the copies of a chain's keys, in chain order.

    With `prefix` the answers end with the first key that is not promised (a later one is of no use).
    With `wait_s` the reply is parked while the first unpromised key is filling, or not stored yet.
    With `sealed` the answers carry seals in place of tables: for readers of whole objects.
    """

    namespace: _Namespace
    keys: _Keys
    lease: _LeaseId
    duration_s: _Duration
    wait_s: _Duration = 0.0
    prefix: bool = True
    sealed: bool = False


class Pages(Message, frozen=True):
    """Asks where the leased copies are now; waits up to `wait_s` for promotions under way. `sealed` as in Acquire."""

    lease: _LeaseId
    keys: _Keys
    wait_s: _Duration = 0.0
    sealed: bool = False


class Renew(Message, frozen=True):
    """Prolongs a lease to `duration_s` from now, within the limit of a lease's whole life."""

    lease: _LeaseId
    duration_s: _Duration


class Release(Message, frozen=True):
    """Ends a lease for these keys, or for all when empty. `cold`: first to be evicted unless others use it."""

    lease: _LeaseId
    keys: _Keys = ()
    cold: bool = False


class Prefetch(Message, frozen=True):
    """A hint that these keys will be asked for. No lease."""

    namespace: _Namespace
    keys: _Keys


class Suspect(Message, frozen=True):
    """A reader saw bytes that do not match their table: verify the leased copy, drop it if it is bad."""

    namespace: _Namespace
    key: _Key
    generation: _Generation
    lease: _LeaseId


class ReportItem(Item, frozen=True):
    """What became of one engine request's lookup, in tokens; `reason` says why the rest was not pulled.

    `nvme_tokens` of the pulled ones had been on NVMe alone.
    """

    request: Annotated[str, Meta(max_length=limits.REQUEST_NAME_MAX)]
    queried_tokens: _Tokens
    promised_tokens: _Tokens
    pulled_tokens: _Tokens
    reason: MissReason | None = None
    nvme_tokens: _Tokens = 0


class Report(Message, frozen=True):
    """Best effort: feeds metrics and the answer to "why was it a miss?"."""

    items: Annotated[tuple[ReportItem, ...], Meta(max_length=limits.REPORTS_PER_CALL_MAX)]


class Drop(Message, frozen=True):
    """Administration: forget these objects. A leased copy goes when its lease ends."""

    namespace: _Namespace
    keys: _Keys


RequestBody = (
    Hello | Reserve | Commit | Abort | Acquire | Pages | Renew | Release | Prefetch | Suspect | Report | Drop
)


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The envelope of every request. `token` is the shared secret where the node asks for one.

    The first three fields keep their place and meaning in every version: see `Envelope`.
    """

    version: int
    client: Annotated[ClientId, _CLIENT]
    request_id: Annotated[int, Meta(ge=0)]
    body: RequestBody
    token: Annotated[bytes, Meta(max_length=limits.TOKEN_BYTES_MAX)] = b""


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What can be read of a request of any version: enough to answer that it was not understood."""

    version: int
    client: bytes
    request_id: int


# --- answers per key --------------------------------------------------------------------------------


class Granted(Message, frozen=True):
    """The right to fill these pages, until the reservation's duration is over."""

    generation: Generation
    extents: WireExtents


class Exists(Message, frozen=True):
    """Already stored; an Acquire would be promised now."""


class Busy(Message, frozen=True):
    """Another writer holds the reservation."""


class Refused(Message, frozen=True):
    """No room, or over the client's share; offer it again later."""

    reason: MissReason


class Committed(Message, frozen=True):
    """Visible from now on (or already was, with this generation)."""


class Stale(Message, frozen=True):
    """The reservation is gone (expired, aborted, another boot): nothing became visible."""


class Resident(Message, frozen=True):
    """Leased, in DRAM: read these pages, compare with this table, or with the table that has this seal."""

    generation: Generation
    extents: WireExtents
    size_bytes: int
    table: bytes


class OnDisk(Message, frozen=True):
    """Leased, on NVMe; in DRAM in about `eta_s` seconds. Ask with Pages."""

    generation: Generation
    size_bytes: int
    eta_s: float


class Filling(Message, frozen=True):
    """Reserved by a writer, not committed yet. Not leased."""


class Miss(Message, frozen=True):
    """Not to be had, and why."""

    reason: MissReason


ReserveAnswer = Granted | Exists | Busy | Refused
CommitAnswer = Committed | Stale
AcquireAnswer = Resident | OnDisk | Filling | Miss
Prepared = msgspec.Raw
"""A Resident as it stands in a frame: made once, and sent to every reader."""
SentAnswer = AcquireAnswer | Prepared


# --- replies ----------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The answer to Hello.

    `transfer` names the arena's segment per protocol, e.g. {"mooncake": "10.0.0.1:15001"}; `arena_base`
    is its address there. `advice` is one line for the log when something will not work well.
    """

    node: NodeId
    versions: tuple[int, ...]
    page_bytes: int
    arena_base: int
    arena_bytes: int
    transfer: dict[str, str]
    memfd_socket: str = ""
    index_url: str = ""
    batch_keys_max: int = 0
    lease_s_max: float = 0.0
    advice: str = ""


class Reserved(Message, frozen=True):
    """Answers to Reserve, in the order asked."""

    answers: tuple[ReserveAnswer, ...]


class CommitDone(Message, frozen=True):
    """Answers to Commit, in the order asked."""

    answers: tuple[CommitAnswer, ...]


class Acquired(Message, frozen=True):
    """Answers to Acquire or Pages, in the order asked; with `prefix` possibly fewer than keys."""

    answers: tuple[AcquireAnswer, ...]


class LeaseState(Message, frozen=True):
    """Answer to Renew: seconds left, 0 when the lease is not known (any more)."""

    remaining_s: float


class Verdict(Message, frozen=True):
    """Answer to Suspect: whether the copy was bad and has been dropped."""

    bad: bool


class Done(Message, frozen=True):
    """Heard, and carried out where there was anything to do."""


class Failed(Message, frozen=True):
    """The request as a whole was refused. `code` is for programs, `message` for people.

    Codes: version, not_authorised, namespace_unknown, bad_request, too_large, overloaded, internal.
    """

    code: str
    message: str


ReplyBody = Welcome | Reserved | CommitDone | Acquired | LeaseState | Verdict | Done | Failed


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The envelope of every reply. A new boot id means: everything this node held in DRAM is gone."""

    version: int
    boot: BootId
    request_id: int
    body: ReplyBody
