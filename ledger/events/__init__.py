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

A kind that changes shape gets a new version: its tag becomes `kind@2`, and an upcaster in `ledger.file.read` lifts what
older files hold. New fields have defaults. Stored rows are never rewritten.

This file knows `msgspec` and the shape of a block list, nothing else.
"""

from typing import ClassVar, TypeAlias

import msgspec

from ledger.blocks import Blocks, Ranges

SCHEDULER = "scheduler"
"""The `source` of an event that the scheduler emitted. A worker's is `rank <n>`."""

WHOLE_FILE = "the file"
"""The origin of a gap that stands for events of nobody knows whom: the file was damaged there."""


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

    evidence: ClassVar[bool] = False
    """Evidence is what only a worker knows. It serves the verdicts and never changes the scheduler's state."""


# --- requests ---------------------------------------------------------------------------------------------------------


class RequestQueued(Event, frozen=True, gc=False, omit_defaults=True, tag="request_queued"):
    """The scheduler took a request into its waiting queue. It holds no blocks yet."""

    request: str
    generation: int
    prompt_tokens: int = 0


class RequestScheduled(Event, frozen=True, gc=False, omit_defaults=True, tag="request_scheduled"):
    """A request runs for the first time, in this step. Not repeated for the steps that follow."""

    request: str
    generation: int
    computed_tokens: int = 0
    scheduled_tokens: int = 0


class RequestPreempted(Event, frozen=True, gc=False, omit_defaults=True, tag="request_preempted"):
    """vLLM took a running request's blocks away; it waits to run again. `generation` is the one that ended.

    The blocks may already belong to another request when this is recorded: vLLM tells its connector at the end of the
    step in which it preempted.
    """

    request: str
    generation: int


class RequestResumed(Event, frozen=True, gc=False, omit_defaults=True, tag="request_resumed"):
    """A preempted request runs again, with new blocks. `generation` is the one that begins."""

    request: str
    generation: int
    computed_tokens: int = 0
    scheduled_tokens: int = 0


class RequestFinished(Event, frozen=True, gc=False, omit_defaults=True, tag="request_finished"):
    """A request ended by itself or by an error. Its jobs may still be reading its blocks.

    Attributes:
        reason: vLLM's status in small letters: `stopped`, `length_capped`, `error`, `ignored`, ...
    """

    request: str
    generation: int
    reason: str = ""


class RequestAborted(Event, frozen=True, gc=False, omit_defaults=True, tag="request_aborted"):
    """A client or an operator ended a request. Loads into its blocks may still be running.

    Attributes:
        was: the request's state before, as in `ledger.state.apply.RequestState`.
    """

    request: str
    generation: int
    was: str = ""


# --- store jobs -------------------------------------------------------------------------------------------------------


class JobRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="job_registered"):
    """The scheduler gave a store job to the workers. It is queued there; nothing was read yet.

    Attributes:
        ranks: the ranks that must report before the job's blocks may be freed.
        tokens: the prefix length that the job may save, in tokens. A rank resumes from its own last offset below it.
    """

    job: int
    request: str
    generation: int
    ranks: Ranges
    tokens: int = 0


class PinTouched(Event, frozen=True, gc=False, omit_defaults=True, tag="pin_touched"):
    """The job references these blocks in vLLM's block pool.

    All that any of its ranks may read, boundary blocks first.
    """

    job: int
    blocks: Blocks


class JobSkipped(Event, frozen=True, gc=False, omit_defaults=True, tag="job_skipped"):
    """A save was planned and then left out, because the store is a best-effort cache and GPU blocks are not.

    No job exists. What was skipped is saved by a later job of the same request where vLLM plans one.

    Attributes:
        reason: the setting whose bound was reached.
        limit: that bound: jobs, or blocks.
        planned_blocks: how many blocks the job would have pinned.
    """

    request: str
    generation: int
    reason: str
    limit: int = 0
    planned_blocks: int = 0
    tokens: int = 0


class RankCompleted(Event, frozen=True, gc=False, omit_defaults=True, tag="rank_completed"):
    """A rank has finished with a job and reads its blocks no more. Recorded when the report reaches the scheduler.

    Attributes:
        outcome: `stored`, `present` (all keys were there), `nothing` (nothing for this rank to save), `stale` (the
            request's generation had ended on the worker), `skipped` (store under pressure), or `failed`.
        exception: the type of the exception that ended the job on that rank, if one did.
    """

    job: int
    rank: int
    outcome: str = "stored"
    code: str = ""
    raw: str = ""
    exception: str = ""


class JobSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="job_settled"):
    """Every expected rank has reported. The blocks are freed next, by `blocks_freed`, if the job pinned any.

    Attributes:
        failed_ranks: the ranks whose outcome was `failed`.
    """

    job: int
    failed_ranks: Ranges = ()


class BlocksFreed(Event, frozen=True, gc=False, omit_defaults=True, tag="blocks_freed"):
    """The job's references were given back to vLLM's block pool, the last of `blocks` first.

    It does not mean that the blocks are unused: a running request may hold them as well.
    """

    job: int
    blocks: Blocks


# --- loads from the store ---------------------------------------------------------------------------------------------


class LookupAnswered(Event, frozen=True, gc=False, omit_defaults=True, tag="lookup_answered"):
    """The store said how long a prefix of the request it holds. Recorded when the answer differs from the last one.

    Attributes:
        hit_tokens: tokens that could be loaded beyond `local_tokens`.
        local_tokens: tokens that the engine's own prefix cache holds.
    """

    request: str
    generation: int
    hit_tokens: int = 0
    local_tokens: int = 0


class LookupDeferred(Event, frozen=True, gc=False, omit_defaults=True, tag="lookup_deferred"):
    """The store has a hit, and the request was told "not known yet", because its last load failed.

    vLLM then takes it out of the requests that hold blocks; its next lookup is answered.
    """

    request: str
    generation: int
    hit_tokens: int = 0
    local_tokens: int = 0


class LookupSuppressed(Event, frozen=True, gc=False, omit_defaults=True, tag="lookup_suppressed"):
    """The store has a hit, and the request was told "no hit", so it computes instead.

    Either the loads up to this token failed as often as `load_max_cycles` allows, or a load of the request failed and
    then a hit found no room: vLLM would hold the request back for it, so it is not given again before the request runs.

    Attributes:
        failures: loads of this request up to this token that failed.
    """

    request: str
    generation: int
    hit_tokens: int = 0
    failures: int = 0
    local_tokens: int = 0


class LoadPlanned(Event, frozen=True, gc=False, omit_defaults=True, tag="load_planned"):
    """vLLM allocated blocks for tokens that will be loaded. The workers do not know of it yet.

    Attributes:
        tokens: tokens to load.
        local_tokens: tokens before them that are computed already.
        blocks: the blocks that the load will write.
    """

    load: int
    request: str
    generation: int
    blocks: Blocks
    tokens: int = 0
    local_tokens: int = 0


class LoadRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="load_registered"):
    """The scheduler gave the load to the workers. The request waits for remote KVs until every rank has answered."""

    load: int
    ranks: Ranges


class BlockFailures(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, array_like=True):
    """Blocks that failed in one way.

    Stable code, what it was translated from, stage, the blocks, how many keys of theirs.
    """

    code: str
    raw: str
    stage: str
    blocks: Blocks
    keys: int
    exception: str = ""


class RankLoaded(Event, frozen=True, gc=False, omit_defaults=True, tag="rank_loaded"):
    """A rank answered a load, and writes into its blocks no more. Recorded when the answer reaches the scheduler.

    Attributes:
        outcome: `loaded` or `failed`.
        code: that of the first block in the request that failed; `failures` has all.
        stage: where it failed; the stages are those of vLLM's failure records: `STORE_GET`, ...
        blocks: the blocks that this rank could not load.
        failed_keys: how many keys failed on this rank.
        failures: every block that failed, by code and stage.
        invalid: the blocks that were reported to vLLM as not loaded, also those that had arrived. Empty when vLLM was
        told
            of the whole request.
        retries: how often the rank asked the store again for what had failed.
    """

    load: int
    rank: int
    outcome: str = "loaded"
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""
    blocks: Blocks = ()
    failed_keys: int = 0
    failures: tuple[BlockFailures, ...] = ()
    invalid: Blocks = ()
    retries: int = 0


class LoadFailed(Event, frozen=True, gc=False, omit_defaults=True, tag="load_failed"):
    """A load failed: the first failure of any rank. Once for each load, and never taken back.

    Other ranks may still be writing; the load settles when all have answered.
    """

    load: int
    rank: int
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""
    blocks: Blocks = ()


class LoadSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="load_settled"):
    """No rank writes into the load's blocks any more, and vLLM was told so.

    Attributes:
        outcome: `loaded`, `failed`, or `cancelled` (planned, never given to the workers).
        missing: ranks that had not answered when vLLM counted the load as finished.
    """

    load: int
    outcome: str = "loaded"
    missing: Ranges = ()


class LoadRecovered(Event, frozen=True, gc=False, omit_defaults=True, tag="load_recovered"):
    """What became of the request of a failed load.

    Attributes:
        action: `recomputed` (vLLM computes the tokens itself), `failed` (`kv_load_failure_policy=fail`), or `gone` (the
            request had ended before the load did).
    """

    load: int
    request: str
    generation: int
    action: str


class ReportIgnored(Event, frozen=True, gc=False, omit_defaults=True, tag="report_ignored"):
    """A result came late or twice for a load or a transfer that had settled. Recorded; nothing was changed by it.

    Attributes:
        what: `load`, `send` or `recv`.
        why: one line in an operator's words.
    """

    what: str
    why: str
    rank: int = -1
    load: int = -1
    transfer: str = ""
    request: str = ""
    code: str = ""


# --- P/D transfers ----------------------------------------------------------------------------------------------------
#
# A prefill engine and a decode engine write a log each; both name the transfer. The prefill's side of it is a *send*,
# the decode's a *recv*. A *peer* is one worker of the other engine: `tp<rank> pp<stage>`.
#
# What orders the events of two logs, whose clocks are not to be trusted: a send starts after the decode has registered
# its recv (it had to ask), and a peer settles as `ok` after that peer's push has finished.


class SendRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="send_registered"):
    """Prefill side: a request runs whose blocks a decode engine will ask for. Nothing is held for the transfer yet.

    Attributes:
        ranks: the ranks that must report before the blocks may be freed.
    """

    transfer: str
    request: str
    generation: int
    ranks: Ranges


class SendReady(Event, frozen=True, gc=False, omit_defaults=True, tag="send_ready"):
    """Prefill side: the prompt is computed, the request has ended, and its blocks are held until they were sent.

    Attributes:
        blocks: what is held, as far as it can be sent. vLLM holds every block of the request.
        timeout_ns: how long the workers hold it for a decode engine that does not ask, in nanoseconds.
    """

    transfer: str
    request: str
    generation: int
    blocks: Blocks
    timeout_ns: int = 0


class SendStarted(Event, frozen=True, gc=False, omit_defaults=True, tag="send_started"):
    """Prefill side: a decode worker has asked, and the rank begins to push. Recorded when it reaches the scheduler.

    A push may fail and be asked for again, so this comes once for each push and not once for each transfer.

    Attributes:
        peer: the decode worker that asked.
        address: where it listens; the decode's own log has the same in `peers_named`.
    """

    transfer: str
    request: str
    rank: int
    peer: str
    address: str = ""


class RankSent(Event, frozen=True, gc=False, omit_defaults=True, tag="rank_sent"):
    """Prefill side: a rank has finished with a transfer and reads its blocks no more.

    Attributes:
        outcome: `sent` (every decode worker that pairs with this rank was served), `released` (each of them only asked
            to free the blocks), or `expired` (they did not all ask, or their pushes failed, for the whole of the send's
            `timeout_ns`).
        pushes: how many pushes this rank began.
        code, raw, stage, exception: of the last push that failed, if one did.
    """

    transfer: str
    request: str
    rank: int
    outcome: str = "sent"
    pushes: int = 0
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""


class SendSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="send_settled"):
    """Prefill side: the transfer is over, and vLLM was told that it may free the request's blocks.

    Attributes:
        outcome: `sent`, `released` (the decode engine needed nothing and only asked to free the blocks), or `withdrawn`
            (the request ended with nothing to send: it was aborted, or did not end as a prefill does). No block was
            held for one that was withdrawn.
    """

    transfer: str
    request: str
    outcome: str = "sent"


class SendExpired(Event, frozen=True, gc=False, omit_defaults=True, tag="send_expired"):
    """Prefill side: the transfer is over without having been served: at least one rank waited in vain.

    vLLM was told that it may free the request's blocks. It says nothing of why the decode engine did not ask.

    Attributes:
        expired_ranks: the ranks that waited in vain.
    """

    transfer: str
    request: str
    expired_ranks: Ranges = ()


class RecvRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_registered"):
    """Decode side: the scheduler told its workers to ask for a transfer. The request waits for remote KVs.

    With no `blocks`, nobody waits: the request ended before it ran, or its whole prompt was in the prefix cache, and
    the workers only ask the prefill engine to free what it holds.

    Attributes:
        blocks: the blocks that the prefill's workers will write into.
        ranks: the ranks of this engine that ask.
        prefill: the id of the prefill engine.
        bootstrap: the address at which that engine's workers can be found.
        peers: the prefill's workers that are expected to write, as an earlier transfer from there has shown. Empty when
            this is the first one: `peers_named` follows for each rank, and holds in either case.
        timeout_ns: after this time, in nanoseconds, the watchdog settles what no peer has settled: the search for the
            peers, the connection and the answer together. A peer that was asked for several requests has its time again
            with each that it answers for, because the prefill gives it to itself.
    """

    transfer: str
    request: str
    generation: int
    blocks: Blocks
    ranks: Ranges
    prefill: str = ""
    bootstrap: str = ""
    peers: tuple[str, ...] = ()
    timeout_ns: int = 0


class PeersNamed(Event, frozen=True, gc=False, omit_defaults=True, tag="peers_named"):
    """Decode side: a rank has found the prefill's workers that will write into its blocks, and asks each of them.

    Attributes:
        peers: one name for each prefill rank and pipeline stage that this rank asks.
        address: where this rank listens; the prefill's own log has the same in `send_started`.
    """

    transfer: str
    request: str
    rank: int
    peers: tuple[str, ...]
    address: str = ""


class PeerSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="peer_settled"):
    """Decode side: a prefill worker writes into a rank's blocks no more. Recorded when the rank's report is here.

    Attributes:
        rank: the rank of this engine that had asked.
        peer: the prefill's worker. Empty: the rank could not even name its peers, so none of them writes.
        outcome: `ok` or `failed`.
        stage: where it failed: `BOOTSTRAP`, `REGISTRATION`, `SEND` (on the prefill's side), `RECV`, or `WATCHDOG`.
    """

    transfer: str
    request: str
    rank: int
    peer: str = ""
    outcome: str = "ok"
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""


class RecvFailed(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_failed"):
    """Decode side: a transfer failed: the first failure of any peer. Once for each, and never taken back.

    Other peers, and even the one that failed, may still be writing: the blocks stay held until `recv_settled`.

    Attributes:
        blocks: the blocks that may not be trusted: all that the transfer was to write.
    """

    transfer: str
    request: str
    rank: int
    peer: str = ""
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""
    blocks: Blocks = ()


class RecvSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_settled"):
    """Decode side: nobody writes into the transfer's blocks any more, and vLLM was told so.

    Attributes:
        outcome: `loaded`, `failed`, or `released` (no blocks: the prefill engine was only asked to free its own).
    """

    transfer: str
    request: str
    outcome: str = "loaded"


class RecvRecovered(Event, frozen=True, gc=False, omit_defaults=True, tag="recv_recovered"):
    """Decode side: what became of the request of a failed transfer. Recorded before the transfer settles.

    Attributes:
        action: `recomputed` (the engine computes the prompt itself), `failed` (`kv_load_failure_policy=fail`), or
            `gone` (the request had ended before the transfer did).
    """

    transfer: str
    request: str
    generation: int
    action: str


# --- ownership --------------------------------------------------------------------------------------------------------


class BlocksAllocated(Event, frozen=True, gc=False, omit_defaults=True, tag="blocks_allocated"):
    """vLLM gave these blocks to a request to write into, while open work still names them.

    Only blocks that an open job, load or transfer names are recorded. A block that is shared by a prefix hit is not
    allocated anew and not listed.
    """

    request: str
    generation: int
    blocks: Blocks


class BlocksReleased(Event, frozen=True, gc=False, omit_defaults=True, tag="blocks_released"):
    """A request gave up these blocks while open work still names them. A job's own pins hold them all the same."""

    request: str
    generation: int
    blocks: Blocks


# --- evidence from the workers ----------------------------------------------------------------------------------------


class KeyFailure(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, array_like=True):
    """A key that failed in a transfer: the key's hash, what the store returned, its stable code, and the block."""

    key: str
    raw: str
    code: str
    group: int = 0
    block: int = -1


class TransferStarted(Event, frozen=True, gc=False, omit_defaults=True, tag="transfer_started"):
    """A worker called the store or a peer, and bytes may move from now on.

    A call to the store has keys, and the n-th key is that of the n-th of `blocks`.

    Attributes:
        transfer: names the call to the store; for a push or a pull, the P/D transfer, whose calls `peer` tells apart.
        op: `put` and `push` read the blocks; `get` and `pull` write them.
        keys: hashes of the keys, without model and rank.
        peer: the worker of the other engine.
    """

    evidence: ClassVar[bool] = True

    transfer: str
    rank: int
    op: str
    request: str = ""
    job: int = -1
    load: int = -1
    keys: tuple[str, ...] = ()
    blocks: Blocks = ()
    bytes: int = 0
    peer: str = ""


class TransferFinished(Event, frozen=True, gc=False, omit_defaults=True, tag="transfer_finished"):
    """The store's or the peer's answer to one call. No `transfer_finished` means that the call has not returned.

    Attributes:
        transfer, peer: as in the call's `transfer_started`.
        outcome: `ok`, `partial` (some keys failed), `failed` (all did), or `raised`.
        duration_ns: of the call, in nanoseconds.
        failed_keys: how many keys failed; `failures` lists the first of them.
        code, raw: of a push or a pull that failed; a call to the store has them for each key.
    """

    evidence: ClassVar[bool] = True

    transfer: str
    rank: int
    op: str
    outcome: str = "ok"
    request: str = ""
    job: int = -1
    load: int = -1
    keys: int = 0
    bytes: int = 0
    duration_ns: int = 0
    failed_keys: int = 0
    failures: tuple[KeyFailure, ...] = ()
    exception: str = ""
    peer: str = ""
    code: str = ""
    raw: str = ""


class PoisonCaught(Event, frozen=True, gc=False, omit_defaults=True, tag="poison_caught"):
    """A block changed between the registration of its job and the end of the put.

    So the store got other KV than was meant.

    A worker with `integrity` on emits it. It does not say who wrote into the block: `blocks_allocated` does.

    Attributes:
        key: hash of the key.
        before, after: the block's fingerprint at registration and after the put, in hex.
        removed: whether the key is gone from the store. If not, `raw` is the store's answer, and readers that have
            integrity off may load it.
    """

    evidence: ClassVar[bool] = True

    rank: int
    key: str
    group: int
    block: int
    before: str
    after: str
    removed: bool
    request: str = ""
    job: int = -1
    raw: str = ""


# --- the log itself ---------------------------------------------------------------------------------------------------


class LogOpened(Event, frozen=True, gc=False, omit_defaults=True, tag="log_opened"):
    """The first event of every log: who writes it, with which versions, and the shape of the engine.

    Attributes:
        boot: names this start of the engine; a later start writes another file.
        config_digest: SHA-256 over the settings and the parts of vLLM's configuration that the plugin reads.
        ranks: the ranks that report.
        block_sizes: tokens in a block, by KV-cache group.
        policy: vLLM's `kv_load_failure_policy`.
        settings: kvledger's settings that differ from their defaults.
    """

    engine: str
    boot: str
    dp_rank: int = 0
    connector: str = ""
    role: str = ""
    versions: dict[str, str] = {}
    config_digest: str = ""
    ranks: Ranges = ((0, 0),)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_blocks: int = 0
    block_sizes: tuple[int, ...] = ()
    policy: str = ""
    settings: dict[str, str] = {}


class Checkpoint(Event, frozen=True, gc=False, omit_defaults=True, tag="checkpoint"):
    """The digest of the scheduler's state after all events before this one.

    Attributes:
        digest: SHA-256 of the state in its canonical form, in hex.
        book: the whole state, only after a `gap`: a fold takes it over and goes on.
    """

    digest: str
    open_jobs: int = 0
    pinned_blocks: int = 0
    waiting_loads: int = 0
    book: msgspec.Raw = msgspec.Raw(b"")


class Gap(Event, frozen=True, gc=False, omit_defaults=True, tag="gap"):
    """Events were dropped, and this stands in their place.

    Attributes:
        origin: whose events: `scheduler`, `rank <n>`, `workers`, `another engine` whose evidence came here and is not
            taken, or `the file` where it was damaged and salvaged.
        dropped: how many; 0 where it is not known: of `workers`, when no address was free for what they send.
        reason: why, in an operator's words.
        first_ts_ns, last_ts_ns: wall clock of the first and the last one dropped.
    """

    origin: str
    dropped: int
    reason: str
    first_ts_ns: int = 0
    last_ts_ns: int = 0


class InvariantViolated(Event, frozen=True, gc=False, omit_defaults=True, tag="invariant_violated"):
    """The books are broken: a report contradicts what was recorded. Blocks stay pinned.

    Attributes:
        rule: the stable name of the rule, e.g. `rank_reported_twice`.
    """

    rule: str
    detail: str
    job: int = -1
    load: int = -1
    rank: int = -1
    request: str = ""
    transfer: str = ""


class StallSuspected(Event, frozen=True, gc=False, omit_defaults=True, tag="stall_suspected"):
    """A job, load or transfer has been open for longer than `stall_suspect_s`.

    Recorded once for each; it may still end.

    Attributes:
        missing: ranks that have not answered.
        waited_ns: time since it was registered, in nanoseconds.
    """

    waited_ns: int
    missing: Ranges = ()
    job: int = -1
    load: int = -1
    transfer: str = ""
    request: str = ""


class LogClosed(Event, frozen=True, gc=False, omit_defaults=True, tag="log_closed"):
    """The last event of a log that was closed. A log without it ended torn.

    Attributes:
        reason: `shutdown`, or `exception`: the engine stopped because of an error.
        exception: the type of that error.
    """

    reason: str = "shutdown"
    exception: str = ""


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

KINDS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in AnyEvent.__args__}
"""Every kind by its name in the log."""


def kind_of(event: Event) -> str:
    """Return the event's kind as it stands in the log, e.g. `job_registered`."""
    return str(event.__struct_config__.tag)
