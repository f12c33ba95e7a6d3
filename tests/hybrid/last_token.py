"""The checks for MLA on CPU without AMX, where a hit must leave exactly one token (`connector.whole_asks`)."""

import json
from pathlib import Path

from tests.hybrid.flipping import objects_by_kind
from tests.hybrid.player import TOKENS, Player, Said
from tests.support import wait_until

LAST = 1_488  # of the prompt's tokens, whole blocks of 16 alone
COUNTED_S = 30.0


class LastTokenPlayer(Player):
    """An engine whose prefill sees nothing of what lies before it, so that a hit must leave exactly one token.

    That token is decoded, and vLLM's prefill and decode differ by more than rounding there. So what is pulled is
    compared with an answer that has decoded the same token; what is computed, with one that has computed the same.
    """

    def write(self, keep: Path) -> Said:
        """Everything that one process can show."""
        whole = self.first[:LAST]
        self.forget()
        [decoded] = self.generate([whole], cold=True, tokens=TOKENS + 1)
        self.node.settle()
        kinds = len(objects_by_kind(self.node.control, self.node.objects()))
        self.check("its objects are stored", kinds == self.tiny.kinds, f"{kinds} kind")
        self.first = [*whole, decoded.tokens[0]]
        expected = Said(decoded.tokens[1:], decoded.logprobs[1:], 0)
        self.computed = self.one(self.first, cold=True)
        self.check_same("one token left, pulled", self.one(self.first), expected, self.tail)
        keep.write_text(json.dumps([self.first, expected]))
        return expected

    def read(self, keep: Path) -> Said:
        """The answer of the process that has written."""
        self.first, said = json.loads(keep.read_text())
        return Said(*said)

    def share(self, expected: Said) -> None:
        """What leaves more than one token is computed, also in turn with what does not."""
        two, more = [*self.first, expected.tokens[0]], self.longer
        answers = [self.one(prompt, cold=True) for prompt in (two, more)]
        for what, prompt, cold in zip(("two tokens left", "extended"), (two, more), answers, strict=True):
            self.check_same(f"{what}, computed", self.one(prompt), cold, 0)
        refused = wait_until(
            self.refused, COUNTED_S, "the node to hear of requests that were not promised anything"
        )
        self.check("counted as layout_unsupported", refused >= len(two) + len(more), f"{refused:.0f} tokens")
        self.forget()
        batch = self.generate([self.first, two, more, self.first])
        for number, (said, right) in enumerate(zip(batch, [expected, *answers, expected], strict=True)):
            self.check_same(
                f"one of several, prompt {number}", said, right, 0 if right in answers else self.tail
            )

    def refused(self) -> float:
        """Tokens that could not be used, as the node has heard."""
        return self.node.gauge("kvstore_missed_tokens_total", reason="layout_unsupported")

    @property
    def tail(self) -> int:
        """Where a hit of the first prompt ends."""
        return LAST
