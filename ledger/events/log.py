"""What the log says of itself and of the books: its begin and end, checkpoints, gaps, broken rules, stalls.

This file knows the envelope, the shape of a block list and words.
"""

# ruff: noqa: D102 - `sentence` is what the base says, of each kind

import msgspec

from ledger import words
from ledger.blocks import Ranges
from ledger.events.base import About, Event
from ledger.events.subject import subject_of

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

    about = About("log")

    engine: str
    boot: str
    dp_rank: int = 0
    connector: str = ""
    role: str = ""
    versions: dict[str, str] = {}  # noqa: RUF012 - msgspec gives each event a dict of its own
    config_digest: str = ""
    ranks: Ranges = ((0, 0),)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_blocks: int = 0
    block_sizes: tuple[int, ...] = ()
    policy: str = ""
    settings: dict[str, str] = {}  # noqa: RUF012 - msgspec gives each event a dict of its own

    def sentence(self) -> str:
        return f"log opened by engine {self.engine}, boot {self.boot}"


class Checkpoint(Event, frozen=True, gc=False, omit_defaults=True, tag="checkpoint"):
    """The digest of the scheduler's state after all events before this one.

    Attributes:
        digest: SHA-256 of the state in its canonical form, in hex.
        book: the whole state, only after a `gap`: a fold takes it over and goes on.
    """

    about = About("log")

    digest: str
    open_jobs: int = 0
    pinned_blocks: int = 0
    waiting_loads: int = 0
    book: msgspec.Raw = msgspec.Raw(b"")

    def sentence(self) -> str:
        jobs = words.plural(self.open_jobs, "open job")
        return (
            f"checkpoint {self.digest[:12]}: {jobs}, {words.plural(self.pinned_blocks, 'pinned block')}, "
            f"{words.plural(self.waiting_loads, 'open load')}"
        )


class Gap(Event, frozen=True, gc=False, omit_defaults=True, tag="gap"):
    """Events were dropped, and this stands in their place.

    Attributes:
        origin: whose events: `scheduler`, `rank <n>`, `workers`, `another engine` whose evidence came here and is not
            taken, or `the file` where it was damaged and salvaged.
        dropped: how many; 0 where it is not known: of `workers`, when no address was free for what they send.
        reason: why, in an operator's words.
        first_ts_ns, last_ts_ns: wall clock of the first and the last one dropped.
    """

    about = About("log")

    origin: str
    dropped: int
    reason: str
    first_ts_ns: int = 0
    last_ts_ns: int = 0

    def sentence(self) -> str:
        return f"GAP: {words.lost(self.dropped)} of {self.origin} lost: {self.reason}"


class InvariantViolated(Event, frozen=True, gc=False, omit_defaults=True, tag="invariant_violated"):
    """The books are broken: a report contradicts what was recorded. Blocks stay pinned.

    Attributes:
        rule: the stable name of the rule, e.g. `rank_reported_twice`.
    """

    about = About("named", turns="always")

    rule: str
    detail: str
    job: int = -1
    load: int = -1
    rank: int = -1
    request: str = ""
    transfer: str = ""

    def sentence(self) -> str:
        return f"BROKEN RULE {self.rule}: {self.detail}"


class StallSuspected(Event, frozen=True, gc=False, omit_defaults=True, tag="stall_suspected"):
    """A job, load or transfer has been open for longer than `stall_suspect_s`.

    Recorded once for each; it may still end.

    Attributes:
        missing: ranks that have not answered.
        waited_ns: time since it was registered, in nanoseconds.
    """

    about = About("named", turns="always")

    waited_ns: int
    missing: Ranges = ()
    job: int = -1
    load: int = -1
    transfer: str = ""
    request: str = ""

    def sentence(self) -> str:
        work = subject_of(self)
        return (
            f"{work.name if work else 'the books'} suspected to be stalled: open for {words.span(self.waited_ns)}"
            f"{f', no answer of {words.rank_runs(self.missing)}' if self.missing else ''}"
        )


class LogClosed(Event, frozen=True, gc=False, omit_defaults=True, tag="log_closed"):
    """The last event of a log that was closed. A log without it ended torn.

    Attributes:
        reason: `shutdown`, or `exception`: the engine stopped because of an error.
        exception: the type of that error.
    """

    about = About("log")

    reason: str = "shutdown"
    exception: str = ""

    def sentence(self) -> str:
        return f"log closed: {self.reason}{' ' + self.exception if self.exception else ''}"
