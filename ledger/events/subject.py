"""What one event is about: the request, job, load or transfer that it belongs to, and what else its fields name.

Most kinds have only some of the fields. Whoever asks an event of any kind for one of them asks here. This file knows
the envelope, the shape of a block list and words.
"""

from typing import TypeAlias

import msgspec

from ledger import words
from ledger.blocks import Blocks
from ledger.events.base import BAD_OUTCOMES, Event

WorkKey: TypeAlias = tuple[str, int | str]
"""Names work: `("job", 2)`, `("transfer", "x1")`, `("request", "R")`."""


class Subject(msgspec.Struct, frozen=True):
    """What an event belongs to.

    Attributes:
        work: `request`, `job`, `load`, `send` or `recv`; `transfer` for a send or a recv, whichever of the two is open.
        id: a number of a job or load, else the id of the transfer or request.
        request: the request, empty if the event does not name it.
    """

    work: str
    id: int | str
    request: str = ""

    @property
    def key(self) -> WorkKey:
        """What tells it from others."""
        return self.work, self.id

    @property
    def name(self) -> str:
        """What it is called: `job 2`, `transfer x1`, `request R`."""
        return f"{self.work} {self.id}"


def subject_of(event: Event) -> Subject | None:
    """Return what an event belongs to; None if that is the log, or nothing that its fields name."""
    work = event.about.work
    match work:
        case "job":
            return Subject(work, job_of(event), request_of(event))
        case "load":
            return Subject(work, load_of(event), request_of(event))
        case "send" | "recv":
            return Subject(work, transfer_of(event), request_of(event))
        case "call" | "named":
            return named_work(event) or _named_request(event)
        case "request" | "blocks":
            return _named_request(event)
        case "log":
            return None


def named_work(event: Event) -> Subject | None:
    """Return the job, load or transfer that an event's fields name, the first that they do; None if they name none."""
    job, load, transfer = job_of(event), load_of(event), transfer_of(event)
    if job >= 0:
        return Subject("job", job, request_of(event))
    if load >= 0:
        return Subject("load", load, request_of(event))
    return Subject("transfer", transfer, request_of(event)) if transfer else None


def _named_request(event: Event) -> Subject | None:
    request = request_of(event)
    return Subject("request", request, request) if request else None


def turned_its_request(event: Event) -> bool:
    """Return whether an event turned the life of its request: it failed, was preempted, is suspected, ..."""
    turns = event.about.turns
    return turns == "always" or (turns == "when_failed" and getattr(event, "outcome", "") in BAD_OUTCOMES)


def request_of(event: Event) -> str:
    """Return the request that an event names; empty if it names none."""
    return getattr(event, "request", "")


def job_of(event: Event) -> int:
    """Return the store job that an event names; -1 if it names none."""
    return getattr(event, "job", -1)


def load_of(event: Event) -> int:
    """Return the load that an event names; -1 if it names none."""
    return getattr(event, "load", -1)


def transfer_of(event: Event) -> str:
    """Return the transfer that an event names: a P/D transfer, or of a worker's call its name; empty if none."""
    return getattr(event, "transfer", "")


def rank_of(event: Event) -> int:
    """Return the rank that an event names; -1 if it names none."""
    return getattr(event, "rank", -1)


def blocks_of(event: Event) -> Blocks:
    """Return the blocks that an event names; none if it names none."""
    return getattr(event, "blocks", ())


def failure_of(event: Event) -> str:
    """Return why what an event tells of failed, as code, raw error, exception and stage; empty if it did not."""
    code, raw, exception, stage = (str(getattr(event, name, "")) for name in ("code", "raw", "exception", "stage"))
    return words.failure(code, raw, exception, stage)
