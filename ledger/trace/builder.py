"""A log as a picture: what is drawn of each event, from which `ledger.trace.perfetto` makes a file for a viewer.

`TraceBuilder` draws events in the order of the log. It decides nothing: what is open, and what a request is doing, is
what the book says after each event. It is pure, and its memory grows with what is open.

How tracks are kept is in `ledger.trace.tracks`. This file knows events, the book, findings and words.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import Ranges, count, from_ranges
from ledger.errors import Refused
from ledger.report import wording
from ledger.state.apply import State
from ledger.state.open_work import OpenWork, open_work
from ledger.state.records import Book, Send
from ledger.trace.clock import Clock
from ledger.trace.tracks import Args, Key, Tracks, place_of
from ledger.verdicts.base import Finding

SHOWN_KEYS = 32
"""Hashes of keys that a call shows. The number of its keys is always there, and the log has all of them."""


class TraceBuilder(Tracks):
    """Draws one log.

    Args:
        number: the place of the log among those of the picture, from 0.
        name: what to call its process.
        findings: its findings, in their order.
        clock: puts its events on the axis.
        moved: what was done with its clock, in one line.
    """

    def __init__(
        self,
        number: int,
        name: str,
        findings: Sequence[Finding] = (),
        clock: Clock | None = None,
        moved: str = "",
    ) -> None:
        super().__init__(number, name)
        self.state = State()
        self._clock = clock or Clock()
        self._moved = moved
        self._width = 1
        self._phases: Counter[str] = Counter()
        self._counted: dict[str, int] = {}
        self._gaps: dict[str, int] = {}
        self._last_ns = 0
        self._closed = False
        self._findings: dict[int, list[Finding]] = {}
        for finding in findings:
            self._findings.setdefault(finding.since_seq, []).append(finding)

    def draw(self, event: ev.AnyEvent) -> None:
        """Draw an event. Events come in the order of the log."""
        ts_ns = self._clock.at(event)
        self._last_ns = max(self._last_ns, ts_ns)
        for finding in self._findings.pop(event.seq, ()):
            self._finding(finding, event.source, ts_ns)
        try:
            self.state.apply(event)
        except Refused as refused:
            said = f"refused by the state: {event.sentence()}"
            self._alarm(event, ts_ns, said, {"rule": refused.rule, "detail": refused.detail})
            return
        if event.evidence:
            self._evidence(event, ts_ns)
            return
        drawn = _DRAWN.get(event.__class__)
        if drawn is None:
            self._draw_by_subject(event, ts_ns)
        else:
            drawn(self, event, ts_ns)
        self._follow(ev.request_of(event), event, ts_ns)
        self._count(ts_ns)

    def end(self, how: str = "torn") -> None:
        """Draw the end of the log: what is open is open at the end.

        Args:
            how: how a log without `log_closed` ended: `torn` or `live`.
        """
        end_ns = self._last_ns
        for findings in self._findings.values():
            for finding in findings:
                self._finding(finding, ev.SCHEDULER, end_ns)
        self._findings = {}
        for key, opened in list(self._open.items()):
            of_all = ev.WHOLE_FILE if opened.source == ev.SCHEDULER else "workers"
            gap = max(self._gaps.get(origin, 0) for origin in (opened.source, of_all, ev.WHOLE_FILE))
            doubt = f"the gap at event {gap} may hide its end" if gap > opened.since_seq else ""
            self._put("instant", opened.track, end_ns, "open at the end", opened.category, {"doubt": doubt})
            self._close(key, end_ns, {"end": "open at the end", "doubt": doubt})
        for name, value in self._counted.items():
            self._put("counter", self._one(name, ev.SCHEDULER), end_ns, value=value)
        if not self._closed and self._last_ns:
            said = "torn: no log_closed" if how == "torn" else f"the log ends here ({how})"
            self._put("instant", self._one("log", ev.SCHEDULER), end_ns, said, "log")

    def _instant(self, key: Key, event: ev.Event, ts_ns: int, name: str = "", last_flows: tuple[int, ...] = ()) -> None:
        """Mark an event on what is open, or among the other events if that is not."""
        opened = self._open.get(key)
        track = opened.track if opened is not None else self._one("other events", event.source)
        said = name if opened is not None and name else event.sentence()
        args = {"what": event.sentence() if said == name else "", **_reason(event), **place_of(event)}
        self._put("instant", track, ts_ns, said, str(key[0]), args, last_flows=last_flows)

    def _draw_by_subject(self, event: ev.Event, ts_ns: int) -> None:
        """Draw an event of a kind that has no drawing of its own: on what it is about."""
        about = event.about
        if about.work == "named" and about.step != "beside":
            self._alarm(event, ts_ns)
            return
        key = _key(event)
        self._instant(key, event, ts_ns)
        if about.step == "ends" and key[0] != "request":
            self._close(key, ts_ns, {"end": event.sentence()})

    def _on_request(self, event: ev.RecvRecovered, ts_ns: int) -> None:
        """Mark on its request what became of that: the recv is told by other events."""
        self._instant(("request", event.request), event, ts_ns)

    def _alarm(self, event: ev.Event, ts_ns: int, said: str = "", args: Args | None = None) -> None:
        track = self._one("alarms", event.source)
        shown = {**(args or {}), **_reason(event), **place_of(event)}
        self._put("instant", track, ts_ns, said or event.sentence(), ev.kind_of(event), shown)

    def _finding(self, finding: Finding, source: str, ts_ns: int) -> None:
        public = wording.public(finding)
        args = {name: _text(public[name]) for name in ("kind", "certainty", "title", "culprit", "advice", "code")}
        args |= {name: words.listed(public[name]) for name in ("requests", "jobs", "ranks", "evidence") if public[name]}
        args["blocks"] = words.listed(f"{group}:{block}" for group, block in finding.blocks)
        args["since"] = f"event {finding.since_seq}"
        name = f"{finding.kind} ({finding.certainty}): {wording.say(finding).short}"
        self._put("instant", self._one("findings", source), ts_ns, name, "finding", args)

    def _count(self, ts_ns: int) -> None:
        running = self._phases["running"]
        numbers = {
            "waiting requests": self._phases.total() - running,
            "running requests": running,
            "pinned blocks": self.state.pinned_blocks(),
            "open jobs": len(self.state.book.jobs),
            "open loads": len(self.state.book.loads),
        }
        for name, value in numbers.items():
            if self._counted.get(name, 0) != value:
                self._counted[name] = value
                self._put("counter", self._one(name, ev.SCHEDULER), ts_ns, value=value)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _follow(self, request: str, event: ev.Event, ts_ns: int, args: Args | None = None) -> None:
        """Draw what the book says that a request is doing."""
        if not request:
            return
        key = ("request", request)
        record = self.state.book.requests.get(request)
        opened = self._open.get(key)
        if record is None:
            if opened is not None:
                self._phases[opened.state] -= 1
                self._close(key, ts_ns, {"end": event.sentence(), **(args or {})})
            return
        if opened is None:
            prompt_tokens = event.prompt_tokens if isinstance(event, ev.RequestQueued) else 0
            opened = self._begin(
                key,
                self._row("requests"),
                request,
                event,
                ts_ns,
                {"request": request, "prompt tokens": prompt_tokens, **(args or {})},
            )
        if opened.state != record.state:
            self._phases[record.state] += 1
            if opened.state:
                self._phases[opened.state] -= 1
            opened.state = record.state
        opened.told["generation"] = record.generation
        phase = record.state if record.generation <= 1 else f"{record.state}, generation {record.generation}"
        self._phase(key, phase, ts_ns, {"generation": record.generation, **place_of(event)})

    def _queued(self, event: ev.RequestQueued, ts_ns: int) -> None:
        opened = self._open.get(("request", event.request))
        if opened is not None:  # an id that came back, and no end of the earlier request is in this log
            self._phases[opened.state] -= 1
            self._close(("request", event.request), ts_ns, {"end": f"not in this log; queued anew, event {event.seq}"})

    def _nothing(self, event: ev.Event, ts_ns: int) -> None:
        """The book says it all."""

    # --- store jobs ---------------------------------------------------------------------------------------------------

    def _job_registered(self, event: ev.JobRegistered, ts_ns: int) -> None:
        args = {
            "request": event.request,
            "generation": event.generation,
            "tokens": event.tokens,
            "ranks": words.ranges(event.ranks),
        }
        key = ("job", event.job)
        self._begin(key, self._row("store jobs"), f"job {event.job}", event, ts_ns, args)
        self._from(key, ts_ns, "registered", self._to_ranks("job", event.job, event.ranks))

    def _pin_touched(self, event: ev.PinTouched, ts_ns: int) -> None:
        opened = self._open.get(("job", event.job))
        if opened is None:
            self._instant(("job", event.job), event, ts_ns)
        else:
            opened.told |= {"blocks": words.blocks(event.blocks), "pinned blocks": count(event.blocks)}

    def _rank_completed(self, event: ev.RankCompleted, ts_ns: int) -> None:
        flow = self._flow("job", event.job, event.rank)
        self._instant(("job", event.job), event, ts_ns, f"rank {event.rank}: {event.outcome}", (flow,))

    def _job_settled(self, event: ev.JobSettled, ts_ns: int) -> None:
        key = ("job", event.job)
        self._instant(key, event, ts_ns, "settled")
        if event.job not in self.state.book.jobs:
            self._close(key, ts_ns, {"failed ranks": words.ranges(event.failed_ranks)})
        elif key in self._open:
            self._open[key].told["failed ranks"] = words.ranges(event.failed_ranks)

    def _blocks_freed(self, event: ev.BlocksFreed, ts_ns: int) -> None:
        if ("job", event.job) in self._open:
            self._close(("job", event.job), ts_ns, {"end": "blocks freed"})
        else:
            self._instant(("job", event.job), event, ts_ns)

    # --- loads --------------------------------------------------------------------------------------------------------

    def _load_planned(self, event: ev.LoadPlanned, ts_ns: int) -> None:
        args = {
            "request": event.request,
            "generation": event.generation,
            "tokens": event.tokens,
            "blocks": words.blocks(event.blocks),
        }
        key = ("load", event.load)
        opened = self._begin(key, self._row("loads"), f"load {event.load}", event, ts_ns, args)
        opened.request = event.request

    def _load_registered(self, event: ev.LoadRegistered, ts_ns: int) -> None:
        key = ("load", event.load)
        if key not in self._open:
            self._instant(key, event, ts_ns)
        args = {"ranks": words.ranges(event.ranks), **place_of(event)}
        self._phase(key, "with the workers", ts_ns, args)
        self._from(key, ts_ns, "given to the workers", self._to_ranks("load", event.load, event.ranks))

    def _rank_loaded(self, event: ev.RankLoaded, ts_ns: int) -> None:
        flow = self._flow("load", event.load, event.rank)
        self._instant(("load", event.load), event, ts_ns, f"rank {event.rank}: {event.outcome}", (flow,))

    def _load_failed(self, event: ev.LoadFailed, ts_ns: int) -> None:
        self._instant(("load", event.load), event, ts_ns, "failed")
        self._alarm(event, ts_ns)

    def _load_settled(self, event: ev.LoadSettled, ts_ns: int) -> None:
        key = ("load", event.load)
        opened = self._open.get(key)
        if opened is None:
            self._instant(key, event, ts_ns)
            return
        self._close(key, ts_ns, {"outcome": event.outcome, "missing ranks": words.ranges(event.missing)})
        self._follow(opened.request, event, ts_ns)

    # --- P/D transfers ------------------------------------------------------------------------------------------------

    def _send_registered(self, event: ev.SendRegistered, ts_ns: int) -> None:
        args = {"request": event.request, "generation": event.generation, "ranks": words.ranges(event.ranks)}
        key, name = ("send", event.request), f"send {event.transfer}"
        self._begin(key, self._row("sends"), name, event, ts_ns, args)
        self._from(key, ts_ns, "registered", (_flow("transfer", event.transfer),))
        self._follow_send(event, ts_ns)

    def _send_ready(self, event: ev.SendReady, ts_ns: int) -> None:
        opened = self._open.get(("send", event.request))
        if opened is not None:
            opened.told |= {"blocks": words.blocks(event.blocks), "held blocks": count(event.blocks)}
        self._follow_send(event, ts_ns)

    def _send_started(self, event: ev.SendStarted, ts_ns: int) -> None:
        self._follow_send(event, ts_ns)
        args = {"transfer": event.transfer, "request": event.request, "address": event.address}
        name = f"{event.transfer}: rank {event.rank} to {event.peer}"
        self._begin(_peer(event), self._row("sends by peer"), name, event, ts_ns, args)

    def _rank_sent(self, event: ev.RankSent, ts_ns: int) -> None:
        done = {"outcome": event.outcome, **_reason(event)}
        for key in [key for key in self._open if key[:3] == ("peer", event.transfer, event.rank)]:
            self._close(key, ts_ns, done)
        self._instant(("send", event.request), event, ts_ns, f"rank {event.rank}: {event.outcome}")

    def _send_over(self, event: ev.SendSettled | ev.SendExpired, ts_ns: int) -> None:
        key = ("send", event.request)
        outcome = event.outcome if isinstance(event, ev.SendSettled) else "expired"
        if key not in self._open:
            self._instant(key, event, ts_ns)
        self._close(key, ts_ns, {"outcome": outcome})
        if isinstance(event, ev.SendExpired):
            self._alarm(event, ts_ns)

    def _follow_send(self, event: ev.SendRegistered | ev.SendReady | ev.SendStarted, ts_ns: int) -> None:
        send = self.state.book.sends.get(event.request)
        if send is not None:
            self._phase(("send", event.request), send.phase, ts_ns, place_of(event))

    def _recv_registered(self, event: ev.RecvRegistered, ts_ns: int) -> None:
        args = {
            "request": event.request,
            "generation": event.generation,
            "blocks": words.blocks(event.blocks),
            "ranks": words.ranges(event.ranks),
            "prefill": event.prefill,
        }
        key, name = ("recv", event.request), f"recv {event.transfer}"
        self._begin(key, self._row("recvs"), name, event, ts_ns, args).peers = event.peers
        to_ranks = self._to_ranks("pull", event.transfer, event.ranks)
        self._from(key, ts_ns, "registered", (_flow("transfer", event.transfer), *to_ranks))

    def _peers_named(self, event: ev.PeersNamed, ts_ns: int) -> None:
        recv = self._open.get(("recv", event.request))
        for peer in event.peers:
            args = {"transfer": event.transfer, "request": event.request, "address": event.address}
            name = f"{event.transfer}: rank {event.rank} from {peer}"
            key = ("peer", event.transfer, event.rank, peer)
            self._begin(key, self._row("recvs by peer"), name, event, ts_ns, args)
            if recv is None or peer not in recv.peers:  # else the arrow leaves the call, which is when it was asked
                self._from(key, ts_ns, f"asks {peer}", (self._pair(event.transfer, peer, event.rank),))

    def _peer_settled(self, event: ev.PeerSettled, ts_ns: int) -> None:
        key = _peer(event)
        name = f"{event.peer or 'search for peers'}: {event.outcome}"
        flow = self._pair(event.transfer, event.peer, event.rank)
        self._instant(key if key in self._open else ("recv", event.request), event, ts_ns, name, (flow,))
        self._close(key, ts_ns, {"outcome": event.outcome, **_reason(event)})

    def _recv_failed(self, event: ev.RecvFailed, ts_ns: int) -> None:
        self._instant(("recv", event.request), event, ts_ns, "failed")
        self._alarm(event, ts_ns)

    def _recv_settled(self, event: ev.RecvSettled, ts_ns: int) -> None:
        key = ("recv", event.request)
        if key not in self._open:
            self._instant(key, event, ts_ns)
        self._close(key, ts_ns, {"outcome": event.outcome})

    def _pair(self, transfer: str, prefill_worker: str, rank: int) -> int:
        """Return the arrow between a worker of the prefill engine and a rank of this one."""
        return _flow("pair", transfer, prefill_worker, self._worker(rank))

    def _worker(self, rank: int) -> str:
        """Return what the other engine calls a rank of this one."""
        width = self._width
        return f"tp{rank % width} pp{rank // width}"

    # --- evidence of the workers --------------------------------------------------------------------------------------

    def _evidence(self, event: ev.AnyEvent, ts_ns: int) -> None:
        match event:
            case ev.TransferStarted():
                self._call(event, ts_ns)
            case ev.TransferFinished():
                self._call_returned(event, ts_ns)
            case _:
                self._alarm(event, ts_ns)

    def _call(self, event: ev.TransferStarted, ts_ns: int) -> None:
        of_call = words.call_of_its_rank(event.op, event.transfer, event.rank)
        subject = ev.subject_of(event)
        work = f" for {subject.name}" if subject is not None and subject.work in ("job", "load") else ""
        args = {
            "request": event.request,
            "keys": len(event.keys),
            "bytes": event.bytes,
            "size": words.size(event.bytes),
            "blocks": words.blocks(event.blocks) if event.blocks else "",
            "peer": event.peer,
            "hashes of keys": (*event.keys[:SHOWN_KEYS], *(["..."] if len(event.keys) > SHOWN_KEYS else [])),
        }
        key, row = _call_key(event), self._row(event.op, self._rank(event.rank))
        self._begin(key, row, f"{of_call}{work}", event, ts_ns, args, self._flows_of_call(event))
        recv = self._open.get(("recv", event.request))
        if event.op == "pull" and not event.peer and recv is not None:
            asked = [self._pair(event.transfer, peer, event.rank) for peer in recv.peers]
            self._from(key, ts_ns, "asks", asked, (self._flow("pull", event.transfer, event.rank),))

    def _call_returned(self, event: ev.TransferFinished, ts_ns: int) -> None:
        key = _call_key(event)
        failures = Counter(words.failure(each.code, each.raw, "") for each in event.failures)
        args: dict[str, str | int] = {
            "outcome": event.outcome,
            "duration": words.span(event.duration_ns),
            "failed keys": event.failed_keys,
            "failures": words.listed(f"{why} ({number})" for why, number in failures.items()),
            **_reason(event),
            "end event": event.seq,
        }
        if key in self._open:
            self._close(key, ts_ns, args)
        else:
            shown = {**args, **place_of(event)}
            said = f"{event.sentence()}; its begin is not in this log"
            self._put("instant", self._rank(event.rank), ts_ns, said, "call", shown)

    def _flows_of_call(self, event: ev.TransferStarted) -> tuple[int, ...]:
        subject = ev.subject_of(event)
        if subject is not None and subject.work in ("job", "load"):
            return (self._flow(*subject.key, event.rank),)
        return (_flow("pair", event.transfer, self._worker(event.rank), event.peer),) if event.peer else ()

    def _to_ranks(self, what: str, name: int | str, ranks: Ranges) -> list[int]:
        return [self._flow(what, name, rank) for rank in from_ranges(ranks)]

    def _flow(self, what: str, name: int | str, rank: int) -> int:
        return _flow(self._number, what, name, rank)

    # --- the log itself -----------------------------------------------------------------------------------------------

    def _opened(self, event: ev.LogOpened, ts_ns: int) -> None:
        self._width = max(event.tensor_parallel, 1)
        args: dict[str, str | int] = {
            "connector": event.connector,
            "role": event.role,
            "policy": event.policy,
            "ranks": words.ranges(event.ranks),
            "GPU blocks": event.num_blocks,
            "clock": self._moved,
            **event.versions,
            **place_of(event),
        }
        self._put("instant", self._one("log", event.source), ts_ns, event.sentence(), "log", args)

    def _checkpoint(self, event: ev.Checkpoint, ts_ns: int) -> None:
        """Take over the book that follows on a gap: what ended in the gap is ended, what began in it is begun."""
        if not len(event.book):
            return
        self.state.restore(msgspec.json.decode(event.book, type=Book))
        book = self.state.book
        lost = {"end": f"in a gap before event {event.seq}; the time is that of the checkpoint after it"}
        works = {_work_key(work): work for work in open_work(book)}
        open_peers = {
            *(("peer", recv.transfer, rank, peer) for recv in book.recvs.values() for rank, peer in recv.waiting),
            *(("peer", send.transfer, rank) for send in book.sends.values() for rank in send.waiting),
        }
        for key in list(self._open):
            is_work = key[0] in _ROWS and key not in works
            is_peer = key[0] == "peer" and key not in open_peers and key[:3] not in open_peers
            if is_work or is_peer:
                self._close(key, ts_ns, lost)
        began = {"begin": f"in a gap before event {event.seq}; known from the checkpoint after it"}
        for key, work in works.items():
            self._known(key, work, event, ts_ns, began)
        followed = {str(key[1]) for key in self._open if key[0] == "request"}
        for request in sorted(followed - book.requests.keys()):
            self._follow(request, event, ts_ns, lost)
        for request in book.requests:
            self._follow(request, event, ts_ns, {} if request in followed else began)

    def _known(self, key: Key, work: OpenWork, event: ev.Event, ts_ns: int, began: dict[str, str]) -> None:
        """Begin what a checkpoint holds and no event of the log has begun."""
        if key not in self._open:
            blocks = words.blocks(work.blocks) if work.blocks else ""
            args = {"request": work.request, "generation": work.generation, "blocks": blocks, **began}
            opened = self._begin(key, self._row(_ROWS[work.kind]), work.name, event, ts_ns, args)
            if work.kind == "load":
                opened.request = work.request
        if isinstance(work.record, Send):
            self._phase(key, work.record.phase, ts_ns)

    def _gap(self, event: ev.Gap, ts_ns: int) -> None:
        self._gaps[event.origin] = event.seq
        self._alarm(event, ts_ns)

    def _log_closed(self, event: ev.LogClosed, ts_ns: int) -> None:
        self._closed = True
        self._put("instant", self._one("log", event.source), ts_ns, event.sentence(), "log", place_of(event))


_DRAWN: dict[type[ev.Event], Callable[[TraceBuilder, Any, int], None]] = {
    ev.RequestQueued: TraceBuilder._queued,
    ev.RequestScheduled: TraceBuilder._nothing,
    ev.RequestPreempted: TraceBuilder._nothing,
    ev.RequestResumed: TraceBuilder._nothing,
    ev.RequestFinished: TraceBuilder._nothing,
    ev.RequestAborted: TraceBuilder._nothing,
    ev.JobRegistered: TraceBuilder._job_registered,
    ev.PinTouched: TraceBuilder._pin_touched,
    ev.RankCompleted: TraceBuilder._rank_completed,
    ev.JobSettled: TraceBuilder._job_settled,
    ev.BlocksFreed: TraceBuilder._blocks_freed,
    ev.LoadPlanned: TraceBuilder._load_planned,
    ev.LoadRegistered: TraceBuilder._load_registered,
    ev.RankLoaded: TraceBuilder._rank_loaded,
    ev.LoadFailed: TraceBuilder._load_failed,
    ev.LoadSettled: TraceBuilder._load_settled,
    ev.SendRegistered: TraceBuilder._send_registered,
    ev.SendReady: TraceBuilder._send_ready,
    ev.SendStarted: TraceBuilder._send_started,
    ev.RankSent: TraceBuilder._rank_sent,
    ev.SendSettled: TraceBuilder._send_over,
    ev.SendExpired: TraceBuilder._send_over,
    ev.RecvRegistered: TraceBuilder._recv_registered,
    ev.PeersNamed: TraceBuilder._peers_named,
    ev.PeerSettled: TraceBuilder._peer_settled,
    ev.RecvFailed: TraceBuilder._recv_failed,
    ev.RecvSettled: TraceBuilder._recv_settled,
    ev.RecvRecovered: TraceBuilder._on_request,
    ev.LogOpened: TraceBuilder._opened,
    ev.Checkpoint: TraceBuilder._checkpoint,
    ev.Gap: TraceBuilder._gap,
    ev.LogClosed: TraceBuilder._log_closed,
}
"""How a kind is drawn; any other is an instant on what it is about. Of the requests, the book says it all."""

_ROWS = {"job": "store jobs", "load": "loads", "send": "sends", "recv": "recvs"}
"""The tracks of open work."""


def _flow(*names: str | int) -> int:
    """Return the number of an arrow: the same for the same names, in whichever log."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "big")


def _peer(event: ev.SendStarted | ev.PeerSettled) -> Key:
    return ("peer", event.transfer, event.rank, event.peer)


def _call_key(event: ev.TransferStarted | ev.TransferFinished) -> Key:
    return ("call", event.transfer, event.rank, event.peer)


def _reason(event: ev.Event) -> dict[str, str]:
    return {"why": why} if (why := ev.failure_of(event)) else {}


def _key(event: ev.Event) -> Key:
    """Return the name of the slice of what an event is about; that of its request if it is no step of its work."""
    subject = ev.subject_of(event) if event.about.step != "beside" else None
    if subject is None:
        return "request", ev.request_of(event)
    return subject.work, subject.request if subject.work in ("send", "recv") else subject.id


def _work_key(work: OpenWork) -> Key:
    """Return the name of the slice of open work: a transfer is found by its request, which has one at most."""
    return work.kind, work.request if work.is_transfer else work.id


def _text(value: object) -> str:
    return "" if value is None else str(value)
