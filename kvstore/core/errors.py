"""The error tree, named by what the caller can do about it.

Absence and overload are answers (see `reasons` and `wire`), not errors. What is raised here is either
a user's mistake (`BadConfiguration`, `BadRequest`), a peer that is gone (`PeerLost`, `IndexDown`,
`TransferFailed`), or a lie that was caught (`Corrupt`).
"""


class KVStoreError(Exception):
    """Root of everything this project raises on purpose. `str()` is one line a user can act on."""


class BadConfiguration(KVStoreError):
    """The user's configuration cannot work: says which key, why, and what would."""


class BadRequest(KVStoreError):
    """A peer broke the protocol: the request is refused, the peer's other requests go on."""


class Overloaded(KVStoreError):
    """A bound of the node is reached (clients, namespaces): the request is refused, later it may not be."""


class NotAuthorised(KVStoreError):
    """The request carries no valid token."""


class NamespaceUnknown(KVStoreError):
    """The node (perhaps a new boot) has not seen this namespace's manifest: say Hello again."""


class PeerLost(KVStoreError):
    """A node did not answer within the deadline, or is not there."""


class IndexDown(KVStoreError):
    """Redis cannot be reached or does not answer in time. Costs hits, never correctness."""


class IndexRefused(IndexDown):
    """What answers is no Redis, or does not know this user: waiting does not help."""


class TransferFailed(KVStoreError):
    """Bytes could not be moved, memory could not be registered, or a transport is not what was asked for."""


class Corrupt(KVStoreError):
    """Bytes do not match their checksum. They are dropped, never passed on."""
