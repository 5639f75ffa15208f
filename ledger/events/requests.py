"""What happens to a request: queued, scheduled, preempted, resumed, ended. Emitted by the scheduler half.

This file knows the envelope, the shape of a block list and words.
"""

# ruff: noqa: D102 - `sentence` is what the base says, of each kind

from ledger import words
from ledger.events.base import About, Event

# --- requests ---------------------------------------------------------------------------------------------------------


class RequestQueued(Event, frozen=True, gc=False, omit_defaults=True, tag="request_queued"):
    """The scheduler took a request into its waiting queue. It holds no blocks yet."""

    about = About("request", "begins")

    request: str
    generation: int
    prompt_tokens: int = 0

    def sentence(self) -> str:
        return f"request {self.request} queued, {words.plural(self.prompt_tokens, 'prompt token')}"


class RequestScheduled(Event, frozen=True, gc=False, omit_defaults=True, tag="request_scheduled"):
    """A request runs for the first time, in this step. Not repeated for the steps that follow."""

    about = About("request")

    request: str
    generation: int
    computed_tokens: int = 0
    scheduled_tokens: int = 0

    def sentence(self) -> str:
        return _runs(self, "scheduled")


class RequestPreempted(Event, frozen=True, gc=False, omit_defaults=True, tag="request_preempted"):
    """vLLM took a running request's blocks away; it waits to run again. `generation` is the one that ended.

    The blocks may already belong to another request when this is recorded: vLLM tells its connector at the end of the
    step in which it preempted.
    """

    about = About("request", turns="always")

    request: str
    generation: int

    def sentence(self) -> str:
        return f"request {self.request} preempted: generation {self.generation} ended, its blocks were taken"


class RequestResumed(Event, frozen=True, gc=False, omit_defaults=True, tag="request_resumed"):
    """A preempted request runs again, with new blocks. `generation` is the one that begins."""

    about = About("request")

    request: str
    generation: int
    computed_tokens: int = 0
    scheduled_tokens: int = 0

    def sentence(self) -> str:
        return _runs(self, "resumed")


class RequestFinished(Event, frozen=True, gc=False, omit_defaults=True, tag="request_finished"):
    """A request ended by itself or by an error. Its jobs may still be reading its blocks.

    Attributes:
        reason: vLLM's status in small letters: `stopped`, `length_capped`, `error`, `ignored`, ...
    """

    about = About("request", "ends")

    request: str
    generation: int
    reason: str = ""

    def sentence(self) -> str:
        return f"{words.request(self.request, self.generation)} finished{': ' + self.reason if self.reason else ''}"


class RequestAborted(Event, frozen=True, gc=False, omit_defaults=True, tag="request_aborted"):
    """A client or an operator ended a request. Loads into its blocks may still be running.

    Attributes:
        was: the request's state before, as in `ledger.state.apply.RequestState`.
    """

    about = About("request", "ends")

    request: str
    generation: int
    was: str = ""

    def sentence(self) -> str:
        return f"{words.request(self.request, self.generation)} aborted{' while ' + self.was if self.was else ''}"


def _runs(event: RequestScheduled | RequestResumed, verb: str) -> str:
    return (
        f"{words.request(event.request, event.generation)} {verb}: {words.plural(event.scheduled_tokens, 'token')} in "
        f"this step, {event.computed_tokens:,} already computed"
    )
