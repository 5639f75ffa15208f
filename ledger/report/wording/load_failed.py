"""The words of `load_failed`, `evicted_before_load` and `lost_store`."""

import msgspec

from ledger import codes, words
from ledger import events as ev
from ledger.report.wording.words import Words, of, of_doubt
from ledger.verdicts.base import Finding
from ledger.verdicts.load_failed import (
    STORE_LEASE_S,
    AlwaysSameRanks,
    Became,
    ByRank,
    Evicted,
    EvictionsUnseen,
    FailedLoads,
    FailedTransfers,
    LeaseRanOut,
    LostPut,
    NotFound,
    StoreUnseen,
)

NOT_FOUND = "the lookup had a hit, and the load did not find the key"


@of(FailedLoads)
def _failed_loads(finding: Finding, facts: FailedLoads) -> Words:
    failure, ranks = facts.failure, words.ranks(finding.ranks)
    why = words.failure(facts.code, failure.raw, failure.exception, failure.stage)
    return Words(
        title=f"{words.plural(facts.became.number, 'load')} failed with {facts.code}",
        culprit=f"{ranks}: {why}",
        advice=f"{_action(facts.code)} The worker log of {ranks} at {_at(failure)} has the error.",
        impact=(_impact(facts.became),),
        notes=tuple(_by_rank(each, failure.code) for each in facts.by_rank),
    )


@of(AlwaysSameRanks)
def _always_same_ranks(finding: Finding, facts: AlwaysSameRanks) -> Words:
    ranks, said = words.ranks(facts.ranks), _failed_loads(finding, facts)
    key = f"key {facts.key}" if facts.key else "a key"
    return msgspec.structs.replace(
        said,
        title=f"{said.title}, always on {ranks}, which loaded nothing in this log",
        culprit=f"concluded: systematic: the lookup promises keys that {ranks} cannot load",
        shown="who failed each time, and who did not",
        inferred="that the lookup does not ask for the keys of these ranks; its own settings would tell",
        advice=(
            "See whose keys the lookup asks for: it must ask for those of every rank that loads. The store's own list "
            f"of keys (docs/oncall.md section 4) shows which ranks have stored {key}."
        ),
    )


@of(LeaseRanOut)
def _lease_ran_out(finding: Finding, facts: LeaseRanOut) -> Words:
    return msgspec.structs.replace(
        _failed_loads(finding, facts),
        culprit=(
            f"the transfer took {words.span(facts.took_ns)}, and the lease of the keys ran out before it ended; "
            f"Mooncake's default lease is {STORE_LEASE_S:g} s"
        ),
        advice="Raise the master's default_kv_lease_ttl above the slowest transfer, or load less at a time.",
        shown="the code, and how long the transfer took",
        inferred="how long the lease was: the master's settings are not in this log",
    )


@of(NotFound)
def _not_found(finding: Finding, facts: NotFound) -> Words:
    return msgspec.structs.replace(
        _failed_loads(finding, facts),
        culprit=f"a key was not found {_at_most(facts.after_ns)}",
        advice=(f"See the log of the store's master up to {_at(facts.failure)}, and whose keys the lookup asks for."),
        shown=NOT_FOUND,
        inferred="why: the store may have lost the key, or the lookup may not have asked for this one",
    )


@of(Evicted)
def _evicted(finding: Finding, facts: Evicted) -> Words:
    return msgspec.structs.replace(
        _failed_loads(finding, facts),
        culprit=(
            f"the store: a key was not found about {words.span(facts.after_ns)} after the lookup had a hit, when "
            f"Mooncake's default lease of {STORE_LEASE_S:g} s had run out"
        ),
        advice="Load sooner after the lookup, raise the lease, or give the store more room.",
        shown=NOT_FOUND,
    )


@of(LostPut)
def _lost_put(finding: Finding, facts: LostPut) -> Words:
    call = words.call("put", facts.put.transfer, facts.put.rank)
    return msgspec.structs.replace(
        _failed_loads(finding, facts),
        culprit=(
            f"the store: {call} had put the key (event {facts.put.seq}), and it was gone {_at_most(facts.after_ns)}"
        ),
        advice=f"See the master's log for a segment or a client that went away, up to {_at(facts.failure)}.",
        shown=NOT_FOUND,
    )


@of(FailedTransfers)
def _failed_transfers(_: Finding, facts: FailedTransfers) -> Words:
    first = facts.failure
    number = words.plural(facts.became.number, "transfer")
    why = words.failure(facts.code, first.raw, first.exception, first.stage)
    return Words(
        title=(f"{number} from a prefill engine failed with {facts.code}{f' at {facts.stage}' if facts.stage else ''}"),
        culprit=f"rank {first.rank}{f', peer {first.peer}' if first.peer else ''}: {why}",
        advice=_action(facts.code),
        other_log="Replay the prefill engine's log together with this one: it has the other side.",
        impact=(_impact(facts.became),),
    )


@of_doubt(EvictionsUnseen)
def _evictions_unseen(_: EvictionsUnseen) -> str:
    return "the store's evictions are not in this log; the log of its master would decide"


@of_doubt(StoreUnseen)
def _store_unseen(_: StoreUnseen) -> str:
    return "what the store did by itself is not in this log; the log of its master would decide"


def _at_most(after_ns: int) -> str:
    return f"at most {words.span(after_ns)} after the lookup had a hit"


def _by_rank(each: ByRank, known: str) -> str:
    """Return what each rank answered, ranks that said the same as one: `ranks 0-1 loaded, events 14, 15; ...`.

    A code is named if it is not the `known` one.
    """
    alike: dict[str, list[ev.RankLoaded]] = {}
    for answer in each.answers:
        keys = f" {words.plural(answer.failed_keys, 'key')}" if answer.failed_keys else ""
        code = f" ({answer.code})" if answer.code and answer.code != known else ""
        alike.setdefault(f"{answer.outcome}{keys}{code}", []).append(answer)
    parts: list[str] = []
    for how, group in alike.items():
        seqs = words.listed([answer.seq for answer in group], 4)
        parts.append(
            f"{words.ranks([answer.rank for answer in group])} {how}, {'event' if len(group) == 1 else 'events'} {seqs}"
        )
    return f"load {each.load} of request {each.request}: {'; '.join(parts)}"


def _impact(became: Became) -> str:
    """Return what became of the requests of failed loads or transfers, as far as it is known."""
    request, number, actions, unfinished = became.request, became.number, became.actions, became.unfinished
    one = f"request {request}" if request else "its request"
    who = {1: f"{one} was", 2: "both were"}.get(number, f"all {number:,} were")
    if actions == {"recomputed": number}:
        if unfinished:
            left = "" if number == 1 else f"{unfinished:,} of them "
            return f"{who} sent back to be recomputed, and {left}had not ended when the log did"
        return f"no request failed: {who} recomputed, which costs time only"
    if number == 1 and actions:
        action = next(iter(actions))
        how = {"failed": "ended with an error", "gone": "had ended before", "aborted": "was aborted"}
        return f"{one} {how.get(action, action)}"
    said = {
        "recomputed": "recomputed",
        "failed": "ended with an error",
        "gone": "had ended before",
        "aborted": "aborted",
    }
    parts = [f"{actions[each]:,} {word}" for each, word in said.items() if each in actions]
    unknown = number - sum(actions.get(each, 0) for each in said)
    parts += [f"of {unknown:,} it is not known"] if unknown else []
    if unknown == number:
        return f"what became of {one if number == 1 else 'their requests'} is not in this log"
    return f"of the requests of {words.plural(number, 'failed load')}: {', '.join(parts)}"


def _action(code: str) -> str:
    """Return what the table of codes says is to be done."""
    known = next((row for row in codes.CODES.values() if row.code == code), codes.CODES[codes.KVCacheErrorCode.UNKNOWN])
    return known.action


def _at(event: ev.Event) -> str:
    return f"{words.clock(event.ts_ns)} UTC"
