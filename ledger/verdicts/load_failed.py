"""Loads that failed and were reported as they should: `load_failed`, `evicted_before_load`, `lost_store`.

The engine dealt with them, by recomputing or by ending the request; they are findings because every one of them cost
time or a request, and because what they have in common names the cause:

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
from typing import Any, ClassVar

import msgspec

from ledger import events as ev
from ledger.blocks import expand, from_ranges
from ledger.verdicts.base import Doubt, Facts, Finding, Kind, Role, Verdict, listed
from ledger.verdicts.history import End, EventList, History
from ledger.verdicts.shared.waits import lost_answers, with_events

STORE_LEASE_S = 5.0
"""Mooncake's default lease: what a lookup has found stays for so long."""

KEPT_LOADS = 500
"""Failed loads of one code that are kept; the rest is only counted."""

KEPT_OPEN = 2000
"""Failed loads and transfers of which it is not known yet what became of their requests."""

SHOWN_LOADS = 3
"""Failed loads that are shown rank by rank."""

KEPT_PUTS = 4096
"""Puts whose keys are remembered, to tell whether a key that is gone was stored by this engine."""

KEPT_LATE = 64
"""Failed loads whose calls are still taken after they have settled."""

NOT_FOUND = "BLOCK_NOT_FOUND"

LOAD_FAILED = Kind("load_failed", Role.REPORTED | Role.RECURS)
EVICTED_BEFORE_LOAD = Kind("evicted_before_load", Role.REPORTED | Role.RECURS)
LOST_STORE = Kind("lost_store", Role.REPORTED | Role.RECURS)


class EvictionsUnseen(Doubt, frozen=True, kw_only=True):
    """What the store evicted is not in a log of the engine."""


class StoreUnseen(Doubt, frozen=True, kw_only=True):
    """What the store did by itself is not in a log of the engine."""


class Became(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests of failed loads or transfers.

    Attributes:
        request: the request of the first; empty if the log does not say.
        number: how many failed.
        actions: how often each thing became of a request, as far as it is known: `recomputed`, `failed`, `gone`,
            `aborted`.
        unfinished: how many of the requests had not ended when the log did.
    """

    request: str
    number: int
    actions: dict[str, int]
    unfinished: int


class ByRank(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank answered for a load."""

    load: int
    request: str
    answers: tuple[ev.RankLoaded, ...]


class FailedLoads(Facts, frozen=True, kw_only=True):
    """Loads that failed with one code. The types below say what they have in common, where that is known.

    Attributes:
        code: their stable code.
        failure: the answer of the first rank on which the first of them failed.
        became: how many failed, and what became of their requests.
        by_rank: the answers of all ranks, for the first few where there is more than one load or rank.
    """

    code: str
    failure: ev.RankLoaded
    became: Became
    by_rank: tuple[ByRank, ...]


class AlwaysSameRanks(FailedLoads, frozen=True, kw_only=True):
    """All of them failed on the same ranks, and these loaded nothing in the whole log.

    Attributes:
        ranks: these ranks.
        key: a key that could not be loaded; empty if none is recorded.
    """

    ranks: tuple[int, ...]
    key: str


class LeaseRanOut(FailedLoads, frozen=True, kw_only=True):
    """The transfer outlasted the lease of its keys.

    Attributes:
        took_ns: how long the longest transfer took, in nanoseconds.
    """

    took_ns: int


class NotFound(FailedLoads, frozen=True, kw_only=True):
    """The lookup had a hit, and the load did not find the key.

    Attributes:
        after_ns: how long after the lookup the call began at the latest, in nanoseconds.
    """

    after_ns: int


class Evicted(FailedLoads, frozen=True, kw_only=True):
    """The load did not find the key, longer than the store's default lease after the lookup had a hit.

    Attributes:
        after_ns: about how long after it, in nanoseconds.
    """

    after_ns: int


class LostPut(FailedLoads, frozen=True, kw_only=True):
    """The load did not find a key that this log has seen stored, within its lease.

    Attributes:
        put: the end of the call that stored it.
        after_ns: how long after the lookup the load's call began at the latest, in nanoseconds.
    """

    put: ev.TransferFinished
    after_ns: int


class FailedTransfers(Facts, frozen=True, kw_only=True):
    """Transfers from a prefill engine that failed with one code at one stage.

    Attributes:
        code, stage: their stable code, and the stage; empty if it is not recorded.
        failure: the first failure.
        became: how many failed, and what became of their requests.
    """

    code: str
    stage: str
    failure: ev.RecvFailed
    became: Became


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
        answers: what each rank answered, for the first few.
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
    answers: tuple[ev.RankLoaded, ...] = ()

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


class LoadsThatFailed(Verdict):
    """Reported failures of loads, by what they have in common."""

    kinds: ClassVar[tuple[Kind, ...]] = (LOAD_FAILED, EVICTED_BEFORE_LOAD, LOST_STORE)

    def __init__(self, history: History) -> None:
        super().__init__(history)
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
        life = self.history.requests.get(event.request, [])
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
            chain = self.history.recvs[event.request]
            self._before[code, event.stage] = [*chain[:1], *(each for each in chain[1:] if _is_failure(each))]
        if len(known) < KEPT_LOADS:
            known.append(event)

    def on_load_settled(self, event: ev.LoadSettled) -> None:
        """Take a load that failed, with what is known of it now."""
        promised = self._promised.pop(event.load, None)
        if event.outcome != "failed":
            return
        chain = self.history.loads[event.load]
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
        chain: EventList,
        failures: list[ev.RankLoaded],
        promised: ev.LookupAnswered | None,
        number: int,
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
        if number < SHOWN_LOADS:
            failed.answers = tuple(each for each in chain if isinstance(each, ev.RankLoaded))
        self._find_put(failed)
        self._late[event.load] = failed
        if len(self._late) > KEPT_LATE:
            del self._late[next(iter(self._late))]
        return failed

    def _finding(self, code: str, failed: list[_Failed]) -> Finding:
        first = failed[0]
        counted = self._counted[code]
        facts = self._facts(code, failed, counted)
        kind, doubt = LOAD_FAILED, None
        if isinstance(facts, Evicted):
            kind, doubt = EVICTED_BEFORE_LOAD, EvictionsUnseen()
        elif isinstance(facts, LostPut):
            kind, doubt = LOST_STORE, StoreUnseen()
        missed = {key: (each.call or each.failure).ts_ns for each in failed[:20] for key in each.keys}
        put = [first.put.started, first.put.finished] if first.put is not None else []
        events = [*put, first.looked_up, first.planned, first.call, first.failure, first.settled]
        return Finding(
            of=kind,
            certainty="suspected" if doubt is not None else "proven",
            since_seq=first.planned.seq if first.planned is not None else first.failure.seq,
            requests=tuple(dict.fromkeys(each.request for each in failed if each.request)),
            blocks=listed(tuple(part for each in failed for part in (each.planned.blocks if each.planned else ()))),
            ranks=tuple(sorted({rank for each in failed for rank in each.ranks})),
            code=code,
            lead_seq=first.call.seq if first.call is not None else first.failure.seq,
            chain=with_events((), (event for event in events if event is not None)),
            loads=tuple(each.load for each in failed),
            missing_keys=tuple(missed.items()),
            doubt=doubt,
            facts=facts,
        )

    def _facts(self, code: str, failed: list[_Failed], counted: _Counted) -> FailedLoads:
        """Return what the failed loads of a code have in common."""
        first = failed[0]
        facts = FailedLoads(
            code=code,
            failure=first.failure,
            became=self._became(counted, first.request),
            by_rank=tuple(
                ByRank(load=each.load, request=each.request, answers=each.answers)
                for each in failed[:SHOWN_LOADS]
                if each.answers and (len(failed) > 1 or len(each.all_ranks) > 1)
            ),
        )
        if self._same_ranks(first, counted):
            return AlwaysSameRanks(**_fields(facts), ranks=first.ranks, key=first.keys[0] if first.keys else "")
        if code == NOT_FOUND:
            return _not_found(facts, first)
        if code == "LEASE_EXPIRED":
            took_ns = max((each.call.duration_ns for each in failed if each.call is not None), default=0)
            return LeaseRanOut(**_fields(facts), took_ns=took_ns)
        return facts

    def _became(self, counted: _Counted, request: str) -> Became:
        """Return what became of the requests of failed loads or transfers, as far as it is known."""
        ended = [self.history.ended_requests.get(request) for of, request in self._open.values() if of is counted]
        aborted = sum(isinstance(each, ev.RequestAborted) for each in ended)
        return Became(
            request=request,
            number=counted.number,
            actions=counted.became | ({"aborted": aborted} if aborted else {}),
            unfinished=len(counted.going),
        )

    def _same_ranks(self, first: _Failed, counted: _Counted) -> bool:
        """Return whether it is always the same ranks, some but not all, and these never load: no answer is lost."""
        ranks = counted.always
        return (
            counted.number > 1
            and bool(ranks)
            and set(ranks) < set(first.all_ranks)
            and self._loaded_ranks.isdisjoint(ranks)
            and lost_answers(self.history) is None
        )

    def _transfers(self, code: str, stage: str, failed: list[ev.RecvFailed]) -> Finding:
        first = failed[0]
        counted = self._counted[f"recv {code} {stage}"]
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
            facts=FailedTransfers(code=code, stage=stage, failure=first, became=self._became(counted, first.request)),
        )


def _not_found(facts: FailedLoads, first: _Failed) -> FailedLoads:
    """Return what is known of a key that was not found although the lookup had a hit."""
    if first.looked_up is None or first.call is None:
        return facts
    # By the scheduler's clock, the latest moment at which the call can have begun: it may have heard of it late. By
    # the wall clocks, when it began, if nobody has set them.
    latest_ns = max(first.failure.mono_ns - first.call.duration_ns - first.looked_up.mono_ns, 0)
    wall_ns = first.call.ts_ns - first.call.duration_ns - first.looked_up.ts_ns
    if min(latest_ns, wall_ns) >= STORE_LEASE_S * 1e9:
        return Evicted(**_fields(facts), after_ns=min(latest_ns, wall_ns))
    if first.put is not None:
        return LostPut(**_fields(facts), put=first.put.finished, after_ns=latest_ns)
    return NotFound(**_fields(facts), after_ns=latest_ns)


def _fields(facts: FailedLoads) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in FailedLoads.__struct_fields__}


def _is_failure(event: ev.Event) -> bool:
    return isinstance(event, ev.PeerSettled | ev.TransferFinished) and event.outcome != "ok"
