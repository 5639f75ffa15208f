"""What all events have: the envelope, what a kind must declare, and its name in the log.

This file knows `msgspec` and nothing else.
"""

from typing import ClassVar, Literal, TypeAlias

import msgspec

SCHEDULER = "scheduler"
"""The `source` of an event that the scheduler emitted. A worker's is `rank <n>`."""

WHOLE_FILE = "the file"
"""The origin of a gap that stands for events of nobody knows whom: the file was damaged there."""

Work: TypeAlias = Literal["request", "job", "load", "send", "recv", "call", "blocks", "named", "log"]
"""What an event may be about.

    request           a request, from `request_queued` until it ends
    job, load         work with the store
    send, recv        P/D transfers
    call              one call of a worker to the store or to a peer, for the work that its fields name
    blocks            blocks of a request, while open work names them
    named             the job, load, transfer or request that its fields name, whichever that is
    log               the log itself
"""

Step: TypeAlias = Literal["begins", "goes_on", "ends", "beside"]
"""What an event is in the life of its work; `beside`: it says something of the work and is no step of it."""

Use: TypeAlias = Literal["", "owned", "pinned", "read", "written", "called"]
"""What becomes of the event's blocks until the work ends; `called`: read or written, as the call's `op` says."""

Turn: TypeAlias = Literal["never", "always", "when_failed"]
"""Whether an event turned the life of its request, so that a short answer tells it; or only if its outcome is bad."""

BAD_OUTCOMES = frozenset({"failed", "partial", "raised"})


class About(msgspec.Struct, frozen=True):
    """What events of one kind are about. History, blame, why, join and trace go by it.

    Attributes:
        work: what the event belongs to.
        step: whether it begins, carries on or ends that.
        uses: the use of its blocks that begins with it.
        turns: whether it turned the life of its request.
    """

    work: Work
    step: Step = "goes_on"
    uses: Use = ""
    turns: Turn = "never"


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind"):
    """The envelope that every event has.

    Attributes:
        seq: place in the log, from 1, without a hole. What was dropped has no place: a `gap` says so.
        ts_ns: wall clock in nanoseconds since 1970. Hosts disagree; never order events of two hosts by it alone.
        mono_ns: the emitting process's monotonic clock in nanoseconds; only differences within one `source` mean
        anything.
        source: `scheduler`, or `rank <n>` for what only a worker knows.
        step: the engine step during which the event was emitted; workers give the last step they were told of.
    """

    seq: int
    ts_ns: int
    mono_ns: int
    source: str
    step: int

    about: ClassVar[About]
    """What events of this kind are about. Each kind declares it."""

    evidence: ClassVar[bool] = False
    """Evidence is what only a worker knows. It serves the verdicts and never changes the scheduler's state."""

    def sentence(self) -> str:
        """Return what happened, in an operator's words, without place and time. Each kind declares it."""
        raise NotImplementedError(f"{type(self).__name__} declares no sentence")


def kind_of(event: Event) -> str:
    """Return the event's kind as it stands in the log, e.g. `job_registered`."""
    return str(event.__struct_config__.tag)


def declared(kind: type[Event]) -> type[Event]:
    """Return a kind of event that declares what it is about and how it reads.

    Raises:
        TypeError: it does not. Its events would be silently left out of histories, answers and traces.
    """
    if not isinstance(getattr(kind, "about", None), About):
        raise TypeError(f"event {kind.__name__} does not declare `about`: what its events are about")
    if kind.sentence is Event.sentence:
        raise TypeError(f"event {kind.__name__} does not define `sentence`: how its events read to an operator")
    return kind
