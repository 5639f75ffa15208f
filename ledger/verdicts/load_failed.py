"""Loads that failed and were reported as they should: `load_failed`, `evicted_before_load`, `lost_store`.

The engine dealt with them, by recomputing or by ending the request; they are told because every one of them cost time
or a request, and because what they have in common names the cause:

    load_failed             a transfer from a prefill engine; or always the same ranks, and these have never loaded
                            anything: the lookup does not ask for the keys of all ranks (not concluded where events of
                            the scheduler are lost). Or any other code, e.g. LEASE_EXPIRED: the transfer outlasted the
                            lease
    evicted_before_load     the lookup had a hit, and the load did not find the key, longer than the lease later
    lost_store              this log saw the key stored before the lookup, and the store lost it within its lease

The last two are never more than suspected: what the store did is not in a log of the engine. One finding for each code.
"""

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from ledger import codes, words
from ledger import events as ev
from ledger.blocks import expand, from_ranges
from ledger.verdicts.base import Finding, Kind, Role, Told, Verdict, listed
from ledger.verdicts.history import Chain, End, Trail
from ledger.verdicts.shared.waits import lost_answers, with_events

STORE_LEASE_S = 5.0
"""Mooncake's default lease: what a lookup has found stays for so long."""

KEPT_LOADS = 500
"""Failed loads of one code that are kept; the rest is only counted."""

KEPT_OPEN = 2000
"""Failed loads and transfers of which it is not known yet what became of their requests."""

TOLD_LOADS = 3
"""Failed loads that are told rank by rank."""

KEPT_PUTS = 4096
"""Puts whose keys are remembered, to tell whether a key that is gone was stored by this engine."""

KEPT_LATE = 64
"""Failed loads whose calls are still taken after they have settled."""

NOT_FOUND = "BLOCK_NOT_FOUND"

LOAD_FAILED = Kind("load_failed", Role.REPORTED | Role.RECURS)
EVICTED_BEFORE_LOAD = Kind("evicted_before_load", Role.REPORTED | Role.RECURS)
LOST_STORE = Kind("lost_store", Role.REPORTED | Role.RECURS)


class _Put(msgspec.Struct, frozen=True):
    """A call that stored keys, and how it ended: every key that failed is named there."""

    started: ev.TransferStarted
    finished: ev.TransferFinished

    def has_stored(self, keys: set[str]) -> bool:
        """Return whether it has stored one of `keys`."""
        return not keys.difference(failure.key for failure in self.finished.failures).isdisjoint(self.started.keys)


class _Failed(msgspec.Struct):
    """A load that failed.

    Attributes:
        ranks: the ranks on which it failed.
        looked_up: the lookup that promised the hit.
        calls: its calls on all ranks, begun and ended. Evidence comes in late, so some may follow after it has settled.
        put: the call that had stored a key that is gone before it was looked up, if this log has it.
        by_rank: what each rank answered, in words, for the first few.
    """

    load: int
    request: str
    settled: ev.LoadSettled
    failures: tuple[ev.RankLoaded, ...]
    ranks: tuple[int, ...]
    all_ranks: tuple[int, ...]
    planned: ev.LoadPlanned | None
    looked_up: ev.LookupAnswered | None
    calls: list[ev.TransferStarted | ev.TransferFinished]
    put: _Put | None = None
    by_rank: str = ""

    @property
    def failure(self) -> ev.RankLoaded:
        """The answer of the first rank on which it failed."""
        return self.failures[0]

    @property
    def call(self) -> ev.TransferFinished | None:
        """The last call of that rank that went wrong."""
        ended = [call for call in self.calls if isinstance(call, ev.TransferFinished)]
        return next((call for call in reversed(ended) if call.rank == self.failure.rank and call.outcome != "ok"), None)

    @property
    def gone(self) -> set[str]:
        """Keys that the store did not have."""
        call = self.call
        return {each.key for each in call.failures if each.code == NOT_FOUND} if call is not None else set()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that could not be loaded. A value that the worker rejects has no failure in its call, but a block."""
        keys: dict[str, None] = {}
        for answer in self.failures:
            blocks = {block for failure in answer.failures for block in expand(failure.blocks)}
            for call in self.calls:
                if isinstance(call, ev.TransferStarted) and call.rank == answer.rank:
                    pairs = zip(call.keys, expand(call.blocks), strict=False)
                    keys.update((key, None) for key, block in pairs if block in blocks)
        return tuple(keys) or tuple(each.key for each in (self.call.failures if self.call is not None else ()))


class _Counted(msgspec.Struct):
    """All failed loads or transfers of one sort, also those that are not kept.

    Attributes:
        became: how often each thing became of their requests, as far as it is known.
        always: the ranks, if each of them failed on the same ones.
        going: their requests that have not ended.
    """

    number: int = 0
    became: dict[str, int] = {}
    always: tuple[int, ...] = ()
    going: set[str] = set()


class LoadFailed(Verdict):
    """Reported failures of loads, by what they have in common."""

    kinds: ClassVar[tuple[Kind, ...]] = (LOAD_FAILED, EVICTED_BEFORE_LOAD, LOST_STORE)

    def __init__(self, trail: Trail) -> None:
        super().__init__(trail)
        self._failed: dict[str, list[_Failed]] = {}
        self._recvs: dict[tuple[str, str], list[ev.RecvFailed]] = {}
        self._before: dict[tuple[str, str], list[ev.Event]] = {}
        self._counted: dict[str, _Counted] = {}
        self._open: dict[int | str, tuple[_Counted, str]] = {}
        self._loaded_ranks: set[int] = set()
        self._putting: dict[str, ev.TransferStarted] = {}
        self._puts: deque[_Put] = deque(maxlen=KEPT_PUTS)
        self._promised: dict[int, ev.LookupAnswered] = {}
        self._late: dict[int, _Failed] = {}

    def on_transfer_started(self, event: ev.TransferStarted) -> None:
        """Remember what may be stored soon."""
        if event.op == "put":
            if len(self._putting) >= KEPT_PUTS:  # the ends of the oldest ones are lost
                del self._putting[next(iter(self._putting))]
            self._putting[event.transfer] = event
        self._came_late(event)

    def on_transfer_finished(self, event: ev.TransferFinished) -> None:
        """Remember what was stored, and take the end of a call for a load that is settled already."""
        started = self._putting.pop(event.transfer, None) if event.op == "put" else None
        # Where not every key that failed is named, nothing is known of a single one.
        if started is not None and event.outcome in ("ok", "partial") and event.failed_keys <= len(event.failures):
            self._puts.append(_Put(started, event))
        self._came_late(event)

    def _came_late(self, event: ev.TransferStarted | ev.TransferFinished) -> None:
        failed = self._late.get(event.load) if event.load >= 0 else None
        if failed is not None:
            failed.calls.append(event)
            self._find_put(failed)

    def _find_put(self, failed: _Failed) -> None:
        gone = failed.gone
        if gone and failed.put is None and failed.looked_up is not None:
            before = failed.looked_up.seq
            failed.put = next((put for put in self._puts if put.finished.seq < before and put.has_stored(gone)), None)

    def on_load_planned(self, event: ev.LoadPlanned) -> None:
        """Remember the lookup that promised it: under the policy `fail` the request ends before its load settles."""
        life = self.trail.requests.get(event.request, [])
        promised = next((each for each in reversed(life) if isinstance(each, ev.LookupAnswered)), None)
        if promised is not None:
            self._promised[event.load] = promised

    def on_rank_loaded(self, event: ev.RankLoaded) -> None:
        """Remember which ranks have ever loaded."""
        if event.outcome == "loaded":
            self._loaded_ranks.add(event.rank)

    def on_load_recovered(self, event: ev.LoadRecovered) -> None:
        """Note what became of the request of a load."""
        self._recovered(event.load, event.action)

    def on_recv_recovered(self, event: ev.RecvRecovered) -> None:
        """Note what became of the request of a transfer."""
        self._recovered(event.transfer, event.action)

    def _recovered(self, work: int | str, action: str) -> None:
        counted, _ = self._open.pop(work, (None, ""))
        if counted is not None:
            counted.became[action] = counted.became.get(action, 0) + 1

    def _request_ended(self, event: ev.RequestFinished | ev.RequestAborted) -> None:
        for counted in self._counted.values():
            counted.going.discard(event.request)

    on_request_finished = on_request_aborted = _request_ended

    def _count(self, sort: str, work: int | str, request: str) -> _Counted:
        """Count a failed load or transfer, and return the count of all of its sort."""
        counted = self._counted.setdefault(sort, _Counted())
        counted.number += 1
        if request in self.state.book.requests:
            counted.going.add(request)
        self._open[work] = counted, request
        if len(self._open) > KEPT_OPEN:
            del self._open[next(iter(self._open))]
        return counted

    def on_recv_failed(self, event: ev.RecvFailed) -> None:
        """Take a failed transfer from a prefill engine."""
        code = event.code or "UNKNOWN"
        self._count(f"recv {code} {event.stage}", event.transfer, event.request)
        known = self._recvs.setdefault((code, event.stage), [])
        if not known:
            chain = self.trail.recvs[event.request]
            self._before[code, event.stage] = [*chain[:1], *(each for each in chain[1:] if _is_failure(each))]
        if len(known) < KEPT_LOADS:
            known.append(event)

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Take a load that failed, with what is known of it now."""
        promised = self._promised.pop(event.load, None)
        if event.outcome != "failed":
            return
        chain = self.trail.loads[event.load]
        failures = [each for each in chain if isinstance(each, ev.RankLoaded) and each.outcome != "loaded"]
        if not failures:
            return
        code = failures[0].code or "UNKNOWN"
        planned = chain[0]
        counted = self._count(code, event.load, planned.request if isinstance(planned, ev.LoadPlanned) else "")
        ranks = tuple(sorted(each.rank for each in failures))
        counted.always = ranks if counted.number == 1 or ranks == counted.always else ()
        known = self._failed.setdefault(code, [])
        if len(known) < KEPT_LOADS:
            known.append(self._take(event, chain, failures, promised, len(known)))

    def findings(self, end: End) -> Iterable[Finding]:
        """Return one finding for each code; of transfers for each stage, too, where a code has another cause."""
        for code, failed in self._failed.items():
            yield self._finding(code, failed)
        for (code, stage), failures in self._recvs.items():
            yield self._transfers(code, stage, failures)

    def _take(
        self,
        event: ev.LoadSettled,
        chain: Chain,
        failures: list[ev.RankLoaded],
        promised: ev.LookupAnswered | None,
        told: int,
    ) -> _Failed:
        planned = next((each for each in chain if isinstance(each, ev.LoadPlanned)), None)
        registered = next((each for each in chain if isinstance(each, ev.LoadRegistered)), None)
        failed = _Failed(
            load=event.load,
            request=planned.request if planned is not None else "",
            settled=event,
            failures=tuple(failures),
            ranks=tuple(sorted(each.rank for each in failures)),
            all_ranks=tuple(from_ranges(registered.ranks)) if registered is not None else (),
            planned=planned,
            looked_up=promised,
            calls=[each for each in chain if isinstance(each, ev.TransferStarted | ev.TransferFinished)],
        )
        if told < TOLD_LOADS:
            failed.by_rank = _by_rank([each for each in chain if isinstance(each, ev.RankLoaded)], failures[0].code)
        self._find_put(failed)
        self._late[event.load] = failed
        if len(self._late) > KEPT_LATE:
            del self._late[next(iter(self._late))]
        return failed

    def _finding(self, code: str, failed: list[_Failed]) -> Finding:
        first = failed[0]
        counted = self._counted[code]
        same_ranks = self._same_ranks(first, counted)
        kind, how, culprit, advice, doubt, shown, inferred = LOAD_FAILED, "", "", "", "", "", ""
        if same_ranks:
            how = f", always on {words.ranks(first.ranks)}, which loaded nothing in this log"
            culprit = f"concluded: systematic: the lookup promises keys that {words.ranks(first.ranks)} cannot load"
            shown = "who failed each time, and who did not"
            inferred = "that the lookup does not ask for the keys of these ranks; its own settings would tell"
            key = f" which ranks have stored key {first.keys[0]}" if first.keys else " which ranks have stored a key"
            advice = (
                "See whose keys the lookup asks for: it must ask for those of every rank that loads. The store's own "
                f"list of keys (docs/oncall.md section 4) shows{key}."
            )
        elif code == NOT_FOUND:
            kind, culprit, advice, doubt = self._gone(failed)
            shown = "the lookup had a hit, and the load did not find the key" if culprit else ""
            if culprit and not doubt:
                inferred = "why: the store may have lost the key, or the lookup may not have asked for this one"
        elif code == "LEASE_EXPIRED":
            took = max((each.call.duration_ns for each in failed if each.call is not None), default=0)
            culprit = (
                f"the transfer took {words.span(took)}, and the lease of the keys ran out before it ended; Mooncake's "
                f"default lease is {STORE_LEASE_S:g} s"
            )
            advice = "Raise the master's default_kv_lease_ttl above the slowest transfer, or load less at a time."
            shown = "the code, and how long the transfer took"
            inferred = "how long the lease was: the master's settings are not in this log"
        if not culprit:
            ranks = sorted({rank for each in failed for rank in each.ranks})
            why = words.failure(code, first.failure.raw, first.failure.exception, first.failure.stage)
            culprit = f"{words.ranks(ranks)}: {why}"
            advice = f"{_action(code)} The worker log of {words.ranks(ranks)} at {_at(first.failure)} has the error."
        number = counted.number
        missed = {key: (each.call or each.failure).ts_ns for each in failed[:20] for key in each.keys}
        put = [first.put.started, first.put.finished] if first.put is not None else []
        events = [*put, first.looked_up, first.planned, first.call, first.failure, first.settled]
        return Finding(
            of=kind,
            certainty="suspected" if doubt else "proven",
            since_seq=first.planned.seq if first.planned is not None else first.failure.seq,
            requests=tuple(dict.fromkeys(each.request for each in failed if each.request)),
            blocks=listed(tuple(part for each in failed for part in (each.planned.blocks if each.planned else ()))),
            ranks=tuple(sorted({rank for each in failed for rank in each.ranks})),
            code=code,
            lead_seq=first.call.seq if first.call is not None else first.failure.seq,
            chain=with_events((), (event for event in events if event is not None)),
            loads=tuple(each.load for each in failed),
            missing_keys=tuple(missed.items()),
            facts=Told(
                title=f"{words.plural(number, 'load')} failed with {code}{how}",
                impact=_impact(self._became(counted), number, first.request, len(counted.going)),
                culprit=culprit,
                advice=advice,
                doubt=doubt,
                notes=tuple(
                    f"load {each.load} of request {each.request}: {each.by_rank}"
                    for each in failed[:TOLD_LOADS]
                    if each.by_rank and (len(failed) > 1 or len(each.all_ranks) > 1)
                ),
                shown=shown,
                inferred=inferred,
            ),
        )

    def _became(self, counted: _Counted) -> dict[str, int]:
        """Return how often each thing became of the requests of failed loads or transfers, as far as it is known."""
        ended = [self.trail.ended.get(request) for of, request in self._open.values() if of is counted]
        aborted = sum(isinstance(each, ev.RequestAborted) for each in ended)
        return counted.became | ({"aborted": aborted} if aborted else {})

    def _same_ranks(self, first: _Failed, counted: _Counted) -> bool:
        """Return whether it is always the same ranks, some but not all, and these never load: no answer is lost."""
        ranks = counted.always
        return (
            counted.number > 1
            and bool(ranks)
            and set(ranks) < set(first.all_ranks)
            and self._loaded_ranks.isdisjoint(ranks)
            and lost_answers(self.trail) is None
        )

    def _transfers(self, code: str, stage: str, failed: list[ev.RecvFailed]) -> Finding:
        first = failed[0]
        counted = self._counted[f"recv {code} {stage}"]
        number = counted.number
        where = f" at {stage}" if stage else ""
        why = words.failure(code, first.raw, first.exception, first.stage)
        return Finding(
            of=LOAD_FAILED,
            certainty="proven",
            since_seq=first.seq,
            requests=tuple(dict.fromkeys(each.request for each in failed)),
            blocks=listed(tuple(part for each in failed for part in each.blocks)),
            ranks=tuple(sorted({each.rank for each in failed})),
            code=code,
            lead_seq=first.seq,
            chain=(*self._before[code, stage][:6], *failed[:6]),
            transfers=tuple(each.transfer for each in failed),
            facts=Told(
                title=f"{words.plural(number, 'transfer')} from a prefill engine failed with {code}{where}",
                culprit=f"rank {first.rank}{f', peer {first.peer}' if first.peer else ''}: {why}",
                advice=_action(code),
                other_log="Replay the prefill engine's log together with this one: it has the other side.",
                impact=_impact(self._became(counted), number, first.request, len(counted.going)),
            ),
        )

    @staticmethod
    def _gone(failed: list[_Failed]) -> tuple[Kind, str, str, str]:
        """Return kind, culprit, advice and doubt for keys that were not found although the lookup had a hit."""
        first = failed[0]
        if first.looked_up is None or first.call is None:
            return LOAD_FAILED, "", "", ""
        # By the scheduler's clock, the latest moment at which the call can have begun: it may have heard of it late. By
        # the wall clocks, when it began, if nobody has set them.
        latest_ns = max(first.failure.mono_ns - first.call.duration_ns - first.looked_up.mono_ns, 0)
        told_ns = first.call.ts_ns - first.call.duration_ns - first.looked_up.ts_ns
        after = f"at most {words.span(latest_ns)} after the lookup had a hit"
        if min(latest_ns, told_ns) >= STORE_LEASE_S * 1e9:
            lease = f"Mooncake's default lease of {STORE_LEASE_S:g} s"
            about = f"about {words.span(min(latest_ns, told_ns))} after the lookup had a hit"
            return (
                EVICTED_BEFORE_LOAD,
                f"the store: a key was not found {about}, when {lease} had run out",
                "Load sooner after the lookup, raise the lease, or give the store more room.",
                "the store's evictions are not in this log; the log of its master would decide",
            )
        if first.put is not None:
            put = first.put.finished
            call = words.call("put", put.transfer, put.rank)
            return (
                LOST_STORE,
                f"the store: {call} had put the key (event {put.seq}), and it was gone {after}",
                f"See the master's log for a segment or a client that went away, up to {_at(first.failure)}.",
                "the store's own doings are not in this log; the log of its master would decide",
            )
        return (
            LOAD_FAILED,
            f"a key was not found {after}",
            f"See the log of the store's master up to {_at(first.failure)}, and whose keys the lookup asks for.",
            "",
        )


def _by_rank(answers: list[ev.RankLoaded], known: str) -> str:
    """Return what each rank answered, ranks that said the same as one: `ranks 0-1 loaded, events 14, 15; ...`.

    A code is told if it is not the `known` one.
    """
    alike: dict[str, list[ev.RankLoaded]] = {}
    for answer in answers:
        keys = f" {words.plural(answer.failed_keys, 'key')}" if answer.failed_keys else ""
        code = f" ({answer.code})" if answer.code and answer.code != known else ""
        alike.setdefault(f"{answer.outcome}{keys}{code}", []).append(answer)
    told: list[str] = []
    for how, group in alike.items():
        seqs = words.listed([answer.seq for answer in group], 4)
        told.append(
            f"{words.ranks([answer.rank for answer in group])} {how}, {'event' if len(group) == 1 else 'events'} {seqs}"
        )
    return "; ".join(told)


def _impact(became: dict[str, int], number: int, request: str, unfinished: int) -> tuple[str, ...]:
    """Return what became of the requests of `number` failures, as far as it is known; `request` is the first."""
    one = f"request {request}" if request else "its request"
    who = {1: f"{one} was", 2: "both were"}.get(number, f"all {number:,} were")
    if became == {"recomputed": number}:
        if unfinished:
            left = "" if number == 1 else f"{unfinished:,} of them "
            return (f"{who} sent back to be recomputed, and {left}had not ended when the log did",)
        return (f"no request failed: {who} recomputed, which costs time only",)
    if number == 1 and became:
        action = next(iter(became))
        how = {"failed": "ended with an error", "gone": "had ended before", "aborted": "was aborted"}
        return (f"{one} {how.get(action, action)}",)
    said = {
        "recomputed": "recomputed",
        "failed": "ended with an error",
        "gone": "had ended before",
        "aborted": "aborted",
    }
    told = [f"{became[each]:,} {word}" for each, word in said.items() if each in became]
    unknown = number - sum(became.get(each, 0) for each in said)
    told += [f"of {unknown:,} it is not known"] if unknown else []
    if unknown == number:
        return (f"what became of {one if number == 1 else 'their requests'} is not in this log",)
    return (f"of the requests of {words.plural(number, 'failed load')}: {', '.join(told)}",)


def _is_failure(event: ev.Event) -> bool:
    return isinstance(event, ev.PeerSettled | ev.TransferFinished) and event.outcome != "ok"


def _action(code: str) -> str:
    """Return what the table of codes says is to be done."""
    known = next((row for row in codes.CODES.values() if row.code == code), codes.CODES[codes.KVCacheErrorCode.UNKNOWN])
    return known.action


def _at(event: ev.Event) -> str:
    return f"{words.clock(event.ts_ns)} UTC"
