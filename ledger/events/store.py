"""Store jobs, which save KV, and loads, which bring it back. Emitted by the scheduler half.

This file knows the envelope, the shape of a block list and words.
"""

# ruff: noqa: D102 - `sentence` is what the base says, of each kind

import msgspec

from ledger import words
from ledger.blocks import Blocks, Ranges
from ledger.events.base import About, Event

# --- store jobs -------------------------------------------------------------------------------------------------------


class JobRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="job_registered"):
    """The scheduler gave a store job to the workers. It is queued there; nothing was read yet.

    Attributes:
        ranks: the ranks that must report before the job's blocks may be freed.
        tokens: the prefix length that the job may save, in tokens. A rank resumes from its own last offset below it.
    """

    about = About("job", "begins")

    job: int
    request: str
    generation: int
    ranks: Ranges
    tokens: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return f"store job {self.job} registered for {request}; {words.rank_runs(self.ranks)} must report"


class PinTouched(Event, frozen=True, gc=False, omit_defaults=True, tag="pin_touched"):
    """The job references these blocks in vLLM's block pool.

    All that any of its ranks may read, boundary blocks first.
    """

    about = About("job", uses="pinned")

    job: int
    blocks: Blocks

    def sentence(self) -> str:
        return f"job {self.job} pins {words.these_blocks(self.blocks)}"


class JobSkipped(Event, frozen=True, gc=False, omit_defaults=True, tag="job_skipped"):
    """A save was planned and then left out, because the store is a best-effort cache and GPU blocks are not.

    No job exists. What was skipped is saved by a later job of the same request where vLLM plans one.

    Attributes:
        reason: the setting whose bound was reached.
        limit: that bound: jobs, or blocks.
        planned_blocks: how many blocks the job would have pinned.
    """

    about = About("request", "beside", turns="always")

    request: str
    generation: int
    reason: str
    limit: int = 0
    planned_blocks: int = 0
    tokens: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return f"a save of {request} was skipped: {self.reason} ({self.limit}) was reached"


class RankCompleted(Event, frozen=True, gc=False, omit_defaults=True, tag="rank_completed"):
    """A rank has finished with a job and reads its blocks no more. Recorded when the report reaches the scheduler.

    Attributes:
        outcome: `stored`, `present` (all keys were there), `nothing` (nothing for this rank to save), `stale` (the
            request's generation had ended on the worker), `skipped` (store under pressure), or `failed`.
        exception: the type of the exception that ended the job on that rank, if one did.
    """

    about = About("job", turns="when_failed")

    job: int
    rank: int
    outcome: str = "stored"
    code: str = ""
    raw: str = ""
    exception: str = ""

    def sentence(self) -> str:
        why = words.because(self.code, self.raw, self.exception)
        return f"rank {self.rank} reported job {self.job}: {self.outcome}{why}"


class JobSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="job_settled"):
    """Every expected rank has reported. The blocks are freed next, by `blocks_freed`, if the job pinned any.

    Attributes:
        failed_ranks: the ranks whose outcome was `failed`.
    """

    about = About("job")

    job: int
    failed_ranks: Ranges = ()

    def sentence(self) -> str:
        return (
            f"job {self.job} settled: every rank has reported"
            f"{f'; failed on {words.rank_runs(self.failed_ranks)}' if self.failed_ranks else ''}"
        )


class BlocksFreed(Event, frozen=True, gc=False, omit_defaults=True, tag="blocks_freed"):
    """The job's references were given back to vLLM's block pool, the last of `blocks` first.

    It does not mean that the blocks are unused: a running request may hold them as well.
    """

    about = About("job", "ends")

    job: int
    blocks: Blocks

    def sentence(self) -> str:
        return f"job {self.job} freed {words.these_blocks(self.blocks)}"


# --- loads from the store ---------------------------------------------------------------------------------------------


class LookupAnswered(Event, frozen=True, gc=False, omit_defaults=True, tag="lookup_answered"):
    """The store said how long a prefix of the request it holds. Recorded when the answer differs from the last one.

    Attributes:
        hit_tokens: tokens that could be loaded beyond `local_tokens`.
        local_tokens: tokens that the engine's own prefix cache holds.
    """

    about = About("request")

    request: str
    generation: int
    hit_tokens: int = 0
    local_tokens: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return (
            f"the lookup of {request} answered {words.plural(self.hit_tokens, 'token')} beyond "
            f"{self.local_tokens:,} held locally"
        )


class LookupDeferred(Event, frozen=True, gc=False, omit_defaults=True, tag="lookup_deferred"):
    """The store has a hit, and the connector answered "not known yet", because its last load failed.

    vLLM then takes it out of the requests that hold blocks; its next lookup is answered.
    """

    about = About("request", turns="always")

    request: str
    generation: int
    hit_tokens: int = 0
    local_tokens: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return (
            f"the lookup of {request} was put off once, since its last load failed "
            f"({words.plural(self.hit_tokens, 'token')} in the store)"
        )


class LookupSuppressed(Event, frozen=True, gc=False, omit_defaults=True, tag="lookup_suppressed"):
    """The store has a hit, and the connector answered "no hit", so the request computes instead.

    Either the loads up to this token failed as often as `load_max_cycles` allows, or a load of the request failed and
    then a hit found no room: vLLM would hold the request back for it, so it is not given again before the request runs.

    Attributes:
        failures: loads of this request up to this token that failed.
    """

    about = About("request", turns="always")

    request: str
    generation: int
    hit_tokens: int = 0
    failures: int = 0
    local_tokens: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return f"lookup of {request} suppressed ({words.plural(self.hit_tokens, 'token')} in the store): " + (
            f"{words.plural(self.failures, 'load')} up to the same token failed"
            if self.failures
            else "a load of it had failed, and since then a hit found no room"
        )


class LoadPlanned(Event, frozen=True, gc=False, omit_defaults=True, tag="load_planned"):
    """vLLM allocated blocks for tokens that will be loaded. The workers do not know of it yet.

    Attributes:
        tokens: tokens to load.
        local_tokens: tokens before them that are computed already.
        blocks: the blocks that the load will write.
    """

    about = About("load", "begins", uses="written")

    load: int
    request: str
    generation: int
    blocks: Blocks
    tokens: int = 0
    local_tokens: int = 0

    def sentence(self) -> str:
        request = words.request(self.request, self.generation)
        return (
            f"load {self.load} planned for {request}: {words.plural(self.tokens, 'token')} into "
            f"{words.these_blocks(self.blocks)}"
        )


class LoadRegistered(Event, frozen=True, gc=False, omit_defaults=True, tag="load_registered"):
    """The scheduler gave the load to the workers. The request waits for remote KVs until every rank has answered."""

    about = About("load")

    load: int
    ranks: Ranges

    def sentence(self) -> str:
        return f"load {self.load} given to the workers; {words.rank_runs(self.ranks)} must answer"


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

    about = About("load", turns="when_failed")

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

    def sentence(self) -> str:
        why = words.because(self.code, self.raw, self.exception, self.stage)
        return f"rank {self.rank} answered load {self.load}: {self.outcome}{why}"


class LoadFailed(Event, frozen=True, gc=False, omit_defaults=True, tag="load_failed"):
    """A load failed: the first failure of any rank. Once for each load, and never taken back.

    Other ranks may still be writing; the load settles when all have answered.
    """

    about = About("load", turns="always")

    load: int
    rank: int
    code: str = ""
    raw: str = ""
    stage: str = ""
    exception: str = ""
    blocks: Blocks = ()

    def sentence(self) -> str:
        why = words.because(self.code, self.raw, self.exception, self.stage)
        return f"load {self.load} failed on rank {self.rank}{why}"


class LoadSettled(Event, frozen=True, gc=False, omit_defaults=True, tag="load_settled"):
    """No rank writes into the load's blocks any more, and vLLM has the result.

    Attributes:
        outcome: `loaded`, `failed`, or `cancelled` (planned, never given to the workers).
        missing: ranks that had not answered when vLLM counted the load as finished.
    """

    about = About("load", "ends")

    load: int
    outcome: str = "loaded"
    missing: Ranges = ()

    def sentence(self) -> str:
        missing = words.rank_runs(self.missing)
        return f"load {self.load} settled: {self.outcome}{f'; {missing} had not answered' if self.missing else ''}"


class LoadRecovered(Event, frozen=True, gc=False, omit_defaults=True, tag="load_recovered"):
    """What became of the request of a failed load.

    Attributes:
        action: `recomputed` (vLLM computes the tokens itself), `failed` (`kv_load_failure_policy=fail`), or `gone` (the
            request had ended before the load did).
    """

    about = About("request", turns="always")

    load: int
    request: str
    generation: int
    action: str

    def sentence(self) -> str:
        return f"after load {self.load}, {words.request(self.request, self.generation)}: {self.action}"


class ReportIgnored(Event, frozen=True, gc=False, omit_defaults=True, tag="report_ignored"):
    """A result came late or twice for a load or a transfer that had settled. Recorded; nothing was changed by it.

    Attributes:
        what: `load`, `send` or `recv`.
        why: one line in an operator's words.
    """

    about = About("named", "beside", turns="always")

    what: str
    why: str
    rank: int = -1
    load: int = -1
    transfer: str = ""
    request: str = ""
    code: str = ""

    def sentence(self) -> str:
        of = f" of request {self.request}" if self.request else ""
        late = f"{self.what} {self.transfer or (self.load if self.load >= 0 else '')}".rstrip() + of
        return (
            f"a late result{f' of rank {self.rank}' if self.rank >= 0 else ''} for {late}"
            f"{f', failed with {self.code},' if self.code else ''} was ignored: {self.why}"
        )
