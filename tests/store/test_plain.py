"""What an Acquire takes at once, the beginning of its batch, is taken as key by key.

Two stores see the same: one takes what is plain at once, its twin looks at each key by itself. Mutants: a key that
comes twice is leased twice; a foreign namespace is not looked at; what is being spilled goes although it was used;
an object of two clients counts twice, or once for both; a reader does not make it warm.
"""

from random import Random
from typing import NamedTuple

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.store import SpillMode
from kvstore.wire import Acquire, ClientId, CommitItem, Granted, Pages, Release
from tests.store.test_tiers import ZEROS, Tiers
from tests.store.world import ANN, BOB, MANIFEST, NAMESPACE, items, key_of, lease_of
from tests.support.answers import received

OTHER = msgspec.structs.replace(MANIFEST, weights="others")
CHAIN = "abcdefghijkl"


class Act(NamedTuple):
    """One thing that somebody does; `names` are any keys, a put's is the beginning of the chain that is as long."""

    what: str
    client: ClientId
    names: str
    lease: str
    flag: bool


ACTS = st.builds(
    Act,
    st.sampled_from(
        ["put", "acquire", "acquire", "acquire", "other", "pages", "release", "drop", "carry", "time"]
    ),
    st.sampled_from([ANN, BOB]),
    st.sampled_from([CHAIN, CHAIN[:2], CHAIN[2:4], CHAIN[-3:]]) | st.text(CHAIN, min_size=1, max_size=6),
    st.sampled_from(["one", "two"]),
    st.booleans(),
)


class Twin(Tiers):
    """A store, and all that can be seen of it."""

    def __init__(self, chunks: int, *, plain: bool) -> None:
        super().__init__(chunks=chunks, disk_chunks=8, spill=SpillMode.EVICT)
        self.store.open_namespace(OTHER.namespace, OTHER.encode())
        self.store._writing._random_bytes = Random(0).randbytes
        self.at_once = 0
        take = self.store._reading._plain

        def taken(*arguments):
            answers = take(*arguments) if plain else []
            self.at_once += len(answers)
            return answers

        self.store._reading._plain = taken  # type: ignore[method-assign]

    def does(self, act: Act) -> object:
        keys = tuple(map(key_of, act.names))
        answer: object = None
        match act.what:
            case "put":
                answer = [self.put_one(act, at) for at in range(len(act.names))]
            case "acquire" | "other":
                namespace = NAMESPACE if act.what == "acquire" else OTHER.namespace
                request = Acquire(namespace, keys, lease_of(act.lease), 9.0, prefix=act.flag, sealed=act.flag)
                answer = received(self.store.acquire(act.client, request))
            case "pages":
                answer = received(self.store.pages(act.client, Pages(lease_of(act.lease), keys)))
            case "release":
                answer = self.store.release(act.client, Release(lease_of(act.lease), keys, cold=act.flag))
            case "drop":
                self.drop(act.names[:1])
            case "carry":
                self.carry()
            case _:
                self.after(60.0 if act.flag else 3.0)
        return answer

    def put_one(self, act: Act, at: int) -> object:
        """With the flag the third one is not committed: it is being filled, for a while."""
        item = items(CHAIN)[at]
        (answer,) = self.store.reserve(act.client, NAMESPACE, [item], 5.0)
        if isinstance(answer, Granted) and not (act.flag and at == 2):
            self.store.commit(act.client, NAMESPACE, [CommitItem(item.key, answer.generation, ZEROS)])
        return answer

    def seen(self) -> object:
        self.store.audit()
        objects = [
            (name, each.leases, each.leased_on_disk, each.reader, each.shared, each.cold, each.tiers)
            for name, each in self.store._listing.objects.items()
        ]
        clients = [(each.id, each.leased_pages, each.num_leases) for each in self.store._clients]
        jobs = [(type(job).__name__, job.object.key) for job in self.carrier.jobs]
        return self.store.snapshot(), self.store.objects(100), objects, clients, jobs, self.dirty


def by_bob(*whats: str) -> list[Act]:
    return [Act(what, BOB, "j", "one", flag=False) for what in whats]


@example(10, by_bob("time", "acquire", "release", "carry"))  # it was about to leave DRAM
@example(10, by_bob("time", "carry", "acquire", "pages", "carry", "release", "acquire"))  # and was back
@given(st.sampled_from([10, 16, 60]), st.lists(ACTS, min_size=10, max_size=40))
def test_what_is_taken_at_once_is_taken_as_key_by_key(chunks, acts) -> None:
    quick, careful = Twin(chunks, plain=True), Twin(chunks, plain=False)
    for act in [Act("put", ANN, CHAIN, "", flag=False), *acts]:
        assert quick.does(act) == careful.does(act)
        assert quick.seen() == careful.seen()


def test_the_beginning_is_taken_at_once_up_to_what_needs_thought() -> None:
    """Mutant: nothing ever is."""
    world = Twin(60, plain=True)
    world.does(Act("put", ANN, CHAIN, "", flag=False))
    for names, at_once in (("abcd", 4), ("abab", 2), ("abxc", 2), ("xabc", 0)):
        before = world.at_once
        world.does(Act("acquire", BOB, names, names, flag=False))
        assert world.at_once - before == at_once, names
