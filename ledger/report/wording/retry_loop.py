"""The words of `retry_loop`."""

from ledger import words
from ledger.report.wording.words import Words, of
from ledger.verdicts.base import Finding
from ledger.verdicts.retry_loop import Rounds


@of(Rounds)
def _rounds(finding: Finding, facts: Rounds) -> Words:
    more = f" and {words.plural(facts.requests - 1, 'more request')}" if facts.requests > 1 else ""
    who = "the request" if facts.requests == 1 else f"{facts.requests:,} requests"
    return Words(
        title=(
            f"request {facts.request}{more} was promised the same {words.plural(facts.tokens, 'token')} "
            f"{facts.rounds} times, and the load failed each time{f' with {facts.code}' if facts.code else ''}"
        ),
        culprit="the lookup, which promises keys that cannot be loaded",
        shown="each lookup had the hit, and each load of it failed",
        inferred="why the loads fail; the failed loads of the same incident say what is known",
        advice="Set load_max_cycles above 0, so that such a request is computed; then see why the load fails.",
        impact=(f"{who} made no progress for {facts.rounds} rounds",),
    )
