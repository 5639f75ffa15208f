"""The vocabulary of the log: one frozen struct for each kind of event, in the past tense.

The docstring of a kind is its documentation; the reference page is generated from it. A docstring says who emits the
event, when, and what it does *not* mean. Events hold numbers, ids, codes and hashes of keys. They never hold tokens,
prompts or KV.

Words that stand in many events:

    request, generation   a request id comes back after preemption, so it is never a key alone. The generation is 1 at
                          first and grows by one with each preemption.
    job                   a store job; the id is never reused in the life of an engine. vLLM calls it `store_job_id`.
    load                  the load of one request's blocks from the store; the id is never reused.
    transfer              a P/D transfer (vLLM's `transfer_id`), or one call to the store, named `<rank>-<number>`.
    rank                  a worker's rank within its engine, counted over tensor, pipeline and context parallelism.
    blocks                `((group, ((first, last), ...)), ...)`, see `ledger.blocks`. The order means something.
    code, raw             the stable name of an error and what was translated to it, unchanged. Both empty: no error.

A kind that changes shape gets a new version: its tag becomes `kind@2`, and an upcaster in `ledger.events.upcast`
lifts what older files hold. New fields have defaults. Stored rows are never rewritten.

A kind declares what its events are about and how they read; it stands in the union below. This room knows `msgspec`,
the shape of a block list and words, nothing else.
"""

# What is imported here is what `from ledger import events as ev` offers, used here or not.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from typing import TypeAlias

import msgspec

from ledger.events.base import SCHEDULER, WHOLE_FILE, About, Event, declared, kind_of
from ledger.events.lines import between, line, lines, losses, lost_at
from ledger.events.log import Checkpoint, Gap, InvariantViolated, LogClosed, LogOpened, StallSuspected
from ledger.events.ownership import BlocksAllocated, BlocksReleased
from ledger.events.pd import (
    PeerSettled,
    PeersNamed,
    RankSent,
    RecvFailed,
    RecvRecovered,
    RecvRegistered,
    RecvSettled,
    SendExpired,
    SendReady,
    SendRegistered,
    SendSettled,
    SendStarted,
)
from ledger.events.requests import (
    RequestAborted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestResumed,
    RequestScheduled,
)
from ledger.events.store import (
    BlockFailures,
    BlocksFreed,
    JobRegistered,
    JobSettled,
    JobSkipped,
    LoadFailed,
    LoadPlanned,
    LoadRecovered,
    LoadRegistered,
    LoadSettled,
    LookupAnswered,
    LookupDeferred,
    LookupSuppressed,
    PinTouched,
    RankCompleted,
    RankLoaded,
    ReportIgnored,
)
from ledger.events.subject import (
    Subject,
    WorkKey,
    blocks_of,
    failure_of,
    job_of,
    load_of,
    named_work,
    rank_of,
    request_of,
    subject_of,
    transfer_of,
    turned_its_request,
)
from ledger.events.upcast import UPCASTERS, lift
from ledger.events.workers import KeyFailure, PoisonCaught, TransferFinished, TransferStarted

AnyEvent: TypeAlias = (
    RequestQueued
    | RequestScheduled
    | RequestPreempted
    | RequestResumed
    | RequestFinished
    | RequestAborted
    | JobRegistered
    | PinTouched
    | JobSkipped
    | RankCompleted
    | JobSettled
    | BlocksFreed
    | LookupAnswered
    | LookupDeferred
    | LookupSuppressed
    | LoadPlanned
    | LoadRegistered
    | RankLoaded
    | LoadFailed
    | LoadSettled
    | LoadRecovered
    | ReportIgnored
    | SendRegistered
    | SendReady
    | SendStarted
    | RankSent
    | SendSettled
    | SendExpired
    | RecvRegistered
    | PeersNamed
    | PeerSettled
    | RecvFailed
    | RecvSettled
    | RecvRecovered
    | BlocksAllocated
    | BlocksReleased
    | TransferStarted
    | TransferFinished
    | PoisonCaught
    | LogOpened
    | Checkpoint
    | Gap
    | InvariantViolated
    | StallSuspected
    | LogClosed
)

KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): declared(kind) for kind in AnyEvent.__args__}
"""Every kind by its name in the log."""

if _left_out := [kind.__name__ for kind in Event.__subclasses__() if kind not in KINDS.values()]:
    raise TypeError(f"events that are not in the union AnyEvent: {', '.join(_left_out)}")

_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def decode(fields: dict[str, object]) -> AnyEvent:
    """Return the event that has these fields, in the shape that `lift` gives them.

    Raises:
        msgspec.DecodeError: no kind of today has these fields.
    """
    return _DECODER.decode(msgspec.json.encode(fields))
