"""What poison is judged by, and how it is told: work on trial, blocks that were given away, calls that touched them.

This file knows events and words; which calls are hits, `poison` decides.
"""

from collections.abc import Iterable

import msgspec

from ledger import events as ev
from ledger import words
from ledger.blocks import of_pairs
from ledger.verdicts.base import Finding, Kind, Role, Told

Block = tuple[int, int]

POISON = Kind("poison", Role.CAUSE | Role.WRONG_KV | Role.TAINTS)

GIVEN_AWAY = "the blocks of a job were given away"
"""The cause of all findings about jobs: in one log they are one incident."""


class Work(msgspec.Struct):
    """A job, load, send or recv that was open when a block was given away.

    Attributes:
        began: its first event.
        pinned: whether it held references on its blocks.
    """

    name: str
    job: int
    request: str
    generation: int
    began: ev.Event | None
    pinned: bool
    load: int = -1
    transfer: str = ""


class Grant(msgspec.Struct):
    """A block that was given away.

    Blocks are compared by number alone: vLLM has one pool for all KV-cache groups, so what one group gives up may come
    back in another, and it is the same memory.

    Attributes:
        works: the work that was open then, by what its calls are found by.
        written: the event from whose step on the new owner has written into the block; None if it may not have. A
            request that is scheduled writes in the step in which it gets the block. One that loads or receives has
            written when that has ended well, or when it runs.
        load, transfer: by which load or recv the new owner fills the blocks; -1 and empty if by none.
        lost_by: why the old owner lost its blocks, as far as it is remembered: it was preempted, finished or aborted.
        ran: the first run of the new owner that is known, with these blocks.
    """

    event: ev.BlocksAllocated
    numbers: frozenset[int]
    released: ev.BlocksReleased | ev.RequestPreempted | ev.RequestFinished | ev.RequestAborted | None
    works: dict[tuple[str, int | str], Work]
    written: ev.Event | None = None
    load: int = -1
    transfer: str = ""
    lost_by: ev.Event | None = None
    ran: ev.Event | None = None


class Hit(msgspec.Struct):
    """A call that touched blocks of another owner."""

    started: ev.TransferStarted
    grant: Grant
    work: Work
    blocks: tuple[Block, ...]
    keys: tuple[str, ...]
    finished: ev.TransferFinished | None = None
    failed_keys: frozenset[str] = frozenset()
    caught: list[ev.PoisonCaught] = []
    answers: list[ev.PeerSettled] = []
    """What the peers of a transfer answered after the block was given away."""

    @property
    def judged_seq(self) -> int:
        """The event at which it was found: its own begin, or the grant under it."""
        return max(self.started.seq, self.grant.event.seq)

    @property
    def proven(self) -> bool:
        """Whether the events exclude that the blocks still held their old owner's KV, or some were seen to change."""
        return bool(self.caught) or self.overwritten

    @property
    def overwritten(self) -> bool:
        """Whether the new owner's first forward pass lay before the call."""
        written, finished = self.grant.written, self.finished
        failed = finished is not None and finished.outcome in ("failed", "raised")
        return (
            written is not None
            and not failed  # a call that failed may never have touched the block
            and self.started.step > written.step
            and self.started.ts_ns > written.ts_ns
            and self.grant.event.request != self.work.request
        )

    @property
    def open_after(self) -> bool:
        """Whether the call was open after the block was given away, as far as its end is known."""
        finished = self.finished
        return finished is None or finished.step > self.grant.event.step or finished.ts_ns > self.grant.event.ts_ns

    def is_proven(self, key: str) -> bool:
        """Return whether a key's block is known to have changed."""
        return self.overwritten or any(event.key == key for event in self.caught)

    def tainted_keys(self) -> list[str]:
        """Return the keys under which a put stored the blocks of another owner."""
        if self.started.op != "put" or (self.finished is not None and self.finished.outcome in ("failed", "raised")):
            return []
        return [key for key in self.keys if key not in self.failed_keys]


class Untold(msgspec.Struct):
    """What is counted and not told one by one.

    Attributes:
        calls: calls that touched blocks of another owner.
        proven: how many of them are proven to have done so after the other had written.
        first, last: the first and the last of them.
        caught: blocks that a worker has seen change.
        first_caught: the first of them.
    """

    calls: int = 0
    proven: int = 0
    first: Hit | None = None
    last: Hit | None = None
    caught: int = 0
    first_caught: ev.PoisonCaught | None = None

    def add(self, hit: Hit) -> None:
        """Count a call that has ended."""
        self.calls += 1
        self.proven += hit.proven
        self.first = self.first or hit
        self.last = hit

    def add_caught(self, event: ev.PoisonCaught) -> None:
        """Count a block that was seen to change."""
        self.caught += 1
        self.first_caught = self.first_caught or event


def untold_finding(untold: Untold) -> Finding:
    """Return the finding for all that is not told one by one."""
    first, last = untold.first, untold.last
    told: list[str] = []
    if first is not None and last is not None:
        some = 0 < untold.proven < untold.calls
        did = "touched" if untold.proven == untold.calls else "may have touched"
        told.append(
            f"{words.plural(untold.calls, 'more call')}, from event {first.started.seq} for {first.work.name} to event "
            f"{last.started.seq} for {last.work.name}, {did} blocks after they had been given away"
            f"{f', and {untold.proven:,} of them did' if some else ''}"
        )
    if untold.caught:
        changed = words.plural(untold.caught, "more block")
        told.append(f"{changed} {'was' if untold.caught == 1 else 'were'} seen to change under a put")
    calls = [hit for hit in (first, last) if hit is not None]
    events = [event for hit in calls for event in (hit.grant.event, hit.started, hit.finished)]
    chain = {event.seq: event for event in (*events, untold.first_caught) if event is not None}
    proven = untold.proven > 0 or untold.caught > 0
    advice = "Do not trust the output of whoever got blocks since then, and reset the prefix cache."
    if untold.caught or any(hit.work.job >= 0 for hit in calls):
        advice = (
            f"Take every key that was stored from event {min(chain)} on for wrong: more jobs are concerned than are "
            "named. A new cache_prefix is the safe way."
        )
    return Finding(
        of=POISON,
        certainty="proven" if proven else "suspected",
        since_seq=min(chain),
        cause=GIVEN_AWAY if first is not None and first.work.job >= 0 else "",
        lead_seq=min(chain),
        chain=tuple(chain[seq] for seq in sorted(chain)),
        overflow=True,
        facts=Told(
            title=f"{'; '.join(told)}: too many to tell one by one",
            culprit="the same as of those that are told one by one",
            advice=advice,
            also=advice,
            doubt="" if proven else "none of them is proven by itself; only the bytes would tell",
        ),
    )


def culprit_of(work: Work) -> str:
    """Return who or what let it happen."""
    if work.job >= 0 and not work.pinned:
        return f"{work.name} held no references on its blocks; concluded: so vLLM gave them away while it was queued"
    if work.job >= 0:
        return f"{work.name} is recorded as pinning its blocks, and vLLM's pool gave them away all the same"
    return f"the blocks of {work.name} were freed before everybody who may read or write them had settled"


def advice_for(work: Work, keys: list[str]) -> str:
    """Return what to do about it."""
    if keys:
        return (
            "Give all engines that share the store a new cache_prefix, so that nobody loads the keys any more: "
            "nothing heals them. Then find who read them, and remove them: "
            f"`kvledger blast-radius FILE --job {work.job} --keys`, and docs/oncall.md section 4."
        )
    return "Do not trust the output of the new owner, and reset the prefix cache."


def shown_by(hit: Hit) -> str:
    """Return what the events show of a hit that is not proven."""
    grant, ended = hit.grant.event, hit.finished
    until = f"to event {ended.seq}" if ended is not None else "on, with no return in this log"
    return (
        f"the blocks had another owner from event {grant.seq} on, and the call on them was open from event "
        f"{hit.started.seq} {until}"
    )


def doubt_of(hit: Hit) -> str:
    """Return why a hit is not proven."""
    if hit.finished is not None and hit.finished.outcome in ("failed", "raised"):
        return "the call failed, and whether it had touched the block by then is not recorded"
    if hit.grant.event.request == hit.work.request:
        return "both owners are lives of one request, whose KV may be the same; only the bytes would tell"
    if hit.started.seq < hit.grant.event.seq:
        return (
            "the call was open when the block was given away, and may have moved its bytes before; only the bytes "
            "would tell"
        )
    if hit.grant.load >= 0 or hit.grant.transfer:
        return (
            f"what request {hit.grant.event.request} itself waited for may have come into the blocks afterwards; only "
            "the bytes would tell"
        )
    return "the order of the call and of the new owner's first forward pass is not recorded; only the bytes would tell"


def time_line(hits: list[Hit]) -> Iterable[str]:
    """Yield the history of the blocks of the first few calls: who had them when, and the call in between."""
    for hit in hits[:3]:
        released, grant, finished = hit.grant.released, hit.grant.event, hit.finished
        until = f"until event {released.seq}" if released is not None else f"until event {grant.seq} at the latest"
        ended = f"to {finished.seq}" if finished is not None else "on, with no return in this log"
        call = words.call(hit.started.op, hit.started.transfer, hit.started.rank)
        later_ns = hit.started.ts_ns - grant.ts_ns
        later = f" began {words.span(later_ns)} later and" if later_ns > 0 else ""
        yield (
            f"{words.these_blocks(of_pairs(hit.blocks))} belonged to "
            f"{words.request(hit.work.request, hit.work.generation)} {until}, and to "
            f"{words.request(grant.request, grant.generation)} from event {grant.seq} on; {call} for "
            f"{hit.work.name}{later} lasted from event {hit.started.seq} {ended}"
        )


def impact_of(loaders: list[str], writes: Iterable[str], keys: list[str], *, proven: bool) -> tuple[str, ...]:
    """Return whose answers are wrong: of those who loaded the keys, and of those whose blocks were written over."""
    sure = "is unreliable" if proven else "may be wrong"
    sures = "are unreliable" if proven else "may be wrong"
    told: list[str] = []
    written = "was written over" if proven else "may have been written over"
    for names, how in ((loaders, "which loaded these keys"), (list(writes), f"whose KV {written}")):
        if len(names) == 1:
            told.append(f"the answer of request {names[0]}, {how}, {sure}")
        elif names:
            told.append(f"the answers of {len(names)} requests ({words.listed(names)}), {how}, {sures}")
    if keys:
        told.append("so is that of whoever loads them later" if loaders else "whoever loads the keys gets wrong KV")
    return tuple(told)
