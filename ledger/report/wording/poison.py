"""The words of `poison`."""

from collections.abc import Iterable, Iterator

from ledger import words
from ledger.blocks import of_pairs
from ledger.report.wording.words import Answers, Clause, SameForJob, Words, of, of_doubt
from ledger.verdicts.base import Finding
from ledger.verdicts.poison import Changed, ManyTouched, Touch, Touched
from ledger.verdicts.shared.poisoning import (
    CallFailed,
    NoneProven,
    OpenBefore,
    OrderUnknown,
    OwnTransfer,
    SameRequest,
)

BYTES = "only the bytes would tell"


@of(Touched)
def _touched(finding: Finding, facts: Touched) -> Words:
    proven = finding.certainty == "proven"
    old, first = words.request(*facts.old_owner), facts.touches[0]
    others = f" and {len(facts.owners) - 1} more" if len(facts.owners) > 1 else ""
    new = f"{words.request(first.reused.request, first.reused.generation)}{others}"
    if facts.reads:
        did = "read" if proven else "may have read"
    else:
        did = "wrote into" if proven else "may have written into"
    given = f"after {'it' if len(finding.blocks) == 1 else 'they'} had been given to {new}"
    hold = "may hold" if not proven else "holds" if facts.stored == 1 else "hold"
    keys = words.plural(facts.stored, "key")
    title = f"{_work(facts)} of {old} {did} {words.these_blocks(of_pairs(finding.blocks), 8)} {given}"
    brief = f"{_work(facts)} {did} its {words.plural(len(finding.blocks), 'block')} {given}"
    if facts.stored:
        title += f": {keys} of {old} {hold} KV of another request"
        brief = f"{keys} {hold} KV of another request: {brief}"
    if facts.pending:
        pending = words.plural(facts.pending, "key")
        title += f"; a put of {pending} did not return in this log, and may store KV of another request"
    if facts.loaders:
        title += f"; loaded by {words.listed(facts.loaders)}"
    stores = bool(facts.stored or facts.pending)
    return Words(
        title=title,
        brief=brief,
        culprit=_culprit(facts),
        advice=_advice(facts, stores=stores),
        also=SameForJob(int(facts.id)) if stores else "",
        shown="" if proven else _shown(first),
        notes=tuple(_time_line(facts)),
        impact=tuple(_impact(facts, stores=stores, proven=proven)),
    )


@of(Changed)
def _changed(finding: Finding, facts: Changed) -> Words:
    them = "it" if len(finding.blocks) == 1 else "them"
    left = f"{facts.left} could not be removed" if facts.left else "were removed"
    return Words(
        title=(
            f"{words.these_blocks(of_pairs(finding.blocks))} changed while store job {facts.job} of request "
            f"{facts.request} put {them}: {words.plural(facts.keys, 'key')} held wrong KV, and {left}"
        ),
        culprit="whoever wrote into these blocks during the put; the log does not say who got them",
        advice=(
            "Remove the keys that are left from the store, or change cache_prefix."
            if facts.left
            else "The keys are gone, so nothing wrong can be loaded. Find out why the job's blocks were not held."
        ),
    )


@of(ManyTouched)
def _many_touched(finding: Finding, facts: ManyTouched) -> Words:
    counted = [*_counted_calls(facts)]
    if facts.changed:
        changed = words.plural(facts.changed, "more block")
        counted.append(f"{changed} {'was' if facts.changed == 1 else 'were'} seen to change under a put")
    advice = "Do not trust the output of any request that got blocks since then, and reset the prefix cache."
    if facts.stores:
        advice = (
            f"Treat every key that was stored from event {finding.since_seq} on as wrong: more jobs are concerned than "
            "are named. A new cache_prefix is the safe way."
        )
    return Words(
        title=f"{'; '.join(counted)}: too many to list one by one",
        culprit="the same as for those that are listed one by one",
        advice=advice,
        also=advice,
    )


def _counted_calls(facts: ManyTouched) -> Iterator[str]:
    if facts.first is None or facts.last is None or facts.first_work is None or facts.last_work is None:
        return
    did = "touched" if facts.proven == facts.calls else "may have touched"
    some = f", and {facts.proven:,} of them did" if 0 < facts.proven < facts.calls else ""
    first, last = (f"{sort} {name}" for sort, name in (facts.first_work, facts.last_work))
    yield (
        f"{words.plural(facts.calls, 'more call')}, from event {facts.first.seq} for {first} to event "
        f"{facts.last.seq} for {last}, {did} blocks after they had been given away{some}"
    )


def _work(facts: Touched) -> str:
    return f"{facts.sort} {facts.id}"


def _culprit(facts: Touched) -> str:
    """Return who or what let it happen."""
    if facts.sort != "store job":
        return f"the blocks of {_work(facts)} were freed before every rank that may read or write them had settled"
    if facts.pinned:
        return f"{_work(facts)} is recorded as pinning its blocks, and vLLM's pool gave them away all the same"
    return f"{_work(facts)} held no references on its blocks; concluded: so vLLM gave them away while it was queued"


def _advice(facts: Touched, *, stores: bool) -> str:
    """Return what to do about it."""
    if not stores:
        return "Do not trust the output of the new owner, and reset the prefix cache."
    return (
        "Give all engines that share the store a new cache_prefix, so that nobody loads these keys any more: nothing "
        "heals them. Then find out who loaded them, and remove them: "
        f"`kvledger blast-radius FILE --job {facts.id} --keys`, and docs/oncall.md section 4."
    )


def _shown(touch: Touch) -> str:
    """Return what the events show of a call that is not proven to have done harm."""
    ended = touch.finished
    until = f"to event {ended.seq}" if ended is not None else "on; it did not return in this log"
    return (
        f"the blocks had another owner from event {touch.reused.seq} on, and the call on them was open from event "
        f"{touch.started.seq} {until}"
    )


def _time_line(facts: Touched) -> Iterator[str]:
    """Yield the history of the blocks of the first few calls: who had them when, and the call in between."""
    for touch in facts.touches:
        released, reused, started, finished = touch.released, touch.reused, touch.started, touch.finished
        until = f"until event {released.seq}" if released is not None else f"until event {reused.seq} at the latest"
        ended = f"to {finished.seq}" if finished is not None else "on; it did not return in this log"
        call = words.call(started.op, started.transfer, started.rank)
        later_ns = started.ts_ns - reused.ts_ns
        later = f" began {words.span(later_ns)} later and" if later_ns > 0 else ""
        yield (
            f"{words.these_blocks(of_pairs(touch.blocks))} belonged to {words.request(*facts.old_owner)} {until}, and "
            f"to {words.request(reused.request, reused.generation)} from event {reused.seq} on; {call} for "
            f"{_work(facts)}{later} lasted from event {started.seq} {ended}"
        )


def _impact(facts: Touched, *, stores: bool, proven: bool) -> Iterable[Clause]:
    """Yield whose answers are wrong: of those who loaded the keys, and of those whose blocks were written over."""
    if facts.loaders:
        yield Answers(facts.loaders, "which loaded these keys", proven)
    if not facts.reads:
        yield Answers(facts.owners, f"whose KV {'was' if proven else 'may have been'} written over", proven)
    if stores:
        gets = "gets" if proven else "may get"
        yield (
            f"whoever loads them later {gets} wrong KV too"
            if facts.loaders
            else f"whoever loads the keys {gets} wrong KV"
        )


@of_doubt(CallFailed)
def _call_failed(_: CallFailed) -> str:
    return "the call failed, and whether it had touched the block by then is not recorded"


@of_doubt(SameRequest)
def _same_request(_: SameRequest) -> str:
    return f"both owners are lives of one request, whose KV may be the same; {BYTES}"


@of_doubt(OpenBefore)
def _open_before(_: OpenBefore) -> str:
    return f"the call was open when the block was given away, and may have moved its bytes before; {BYTES}"


@of_doubt(OwnTransfer)
def _own_transfer(doubt: OwnTransfer) -> str:
    return f"the KV that request {doubt.request} itself waited for may have come into the blocks afterwards; {BYTES}"


@of_doubt(OrderUnknown)
def _order_unknown(_: OrderUnknown) -> str:
    return f"the order of the call and of the new owner's first forward pass is not recorded; {BYTES}"


@of_doubt(NoneProven)
def _none_proven(_: NoneProven) -> str:
    return f"none of them is proven by itself; {BYTES}"
