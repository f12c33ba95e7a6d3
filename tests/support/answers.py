"""What a store answers, as its readers find it in the reply."""

from collections.abc import Iterable

import msgspec

from kvstore.wire import AcquireAnswer, Prepared, Resident, SentAnswer


def received(answers: Iterable[SentAnswer]) -> tuple[AcquireAnswer, ...]:
    """The answers, decoded where they were encoded already."""
    return tuple(
        msgspec.msgpack.decode(answer, type=Resident) if isinstance(answer, Prepared) else answer
        for answer in answers
    )
