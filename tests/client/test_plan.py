"""Who is asked for which keys."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.plan import assign, batches, grouped, of_each
from kvstore.core import limits

holders = st.lists(st.sets(st.sampled_from("ABCD")), max_size=12)


def plan(*rows: str, preferred: str = "") -> str:
    return "".join(assign([list(row) for row in rows], preferred.__contains__))


@given(holders)
def test_every_key_up_to_the_first_gap_gets_one_of_its_holders(rows) -> None:
    chosen = assign(rows, lambda node: node == "A")
    gap = next((index for index, nodes in enumerate(rows) if not nodes), len(rows))
    assert len(chosen) == gap
    assert all(node in nodes for node, nodes in zip(chosen, rows, strict=False))
    assert all(node == "A" for node, nodes in zip(chosen, rows, strict=False) if "A" in nodes)


def test_few_nodes_are_involved() -> None:
    """Mutant: take the first holder of each key."""
    assert plan("AB", "AB", "B", "B", "C") == "BBBBC"
    assert plan("ABC", "BC", "C", "A") == "CCCA"


def test_the_preferred_node_is_used_wherever_it_holds_a_key() -> None:
    assert plan("AB", "AB", "B", "AB", preferred="A") == "AABA"


def test_the_order_of_holders_decides_between_preferred_ones() -> None:
    assert plan("HA", "AH", preferred="AH") == "HA"


def test_owners_are_grouped_with_their_keys_in_order() -> None:
    assert grouped("vwxyz", "ABAAB") == {"A": ["v", "x", "y"], "B": ["w", "z"]}
    assert grouped("vwxyz", "AAB") == {"A": ["v", "w"], "B": ["x"]}


@given(st.integers(0, 3 * limits.BATCH_KEYS_MAX))
def test_batches_fit_and_lose_nothing(length) -> None:
    some = list(range(length))
    portions = batches(some)
    assert [number for portion in portions for number in portion] == some
    assert all(0 < len(portion) <= limits.BATCH_KEYS_MAX for portion in portions)


def test_neighbours_that_are_one_object_are_asked_about_once() -> None:
    """Mutants: equal instead of same, which is no faster; the first value taken for seen."""
    one, other = ["A"], ["B"]
    asked: list[list[str]] = []

    def first(row: list[str]) -> str:
        asked.append(row)
        return row[0]

    assert of_each([one, one, other, one, ["A"]], first) == ["A", "A", "B", "A", "A"]
    assert len(asked) == 4
    assert of_each([], first) == []
    shared = assign([one, one, other, other, one], lambda _: False)
    assert shared == ["A", "A", "B", "B", "A"]
