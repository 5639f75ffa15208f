"""The words of `torn_log`."""

from ledger import words
from ledger.report.wording.words import Words, of
from ledger.verdicts.base import Finding
from ledger.verdicts.torn_log import ClosedByError, LastWord, NoLogClosed

TORN_ENDS = (
    "the process ended hard, or its disk took nothing at the end, or this copy lacks the end (its -wal was cut or not "
    "copied); the log alone does not tell which"
)
"""All that a missing `log_closed` leaves open."""


@of(NoLogClosed)
def _no_log_closed(finding: Finding, facts: NoLogClosed) -> Words:
    at = words.clock(facts.last.ts_ns)
    return Words(
        title=f"the log ends torn after event {facts.last.seq} at {at}: there is no log_closed",
        brief=f"the log ends torn after event {facts.last.seq}",
        culprit=f"{TORN_ENDS}; {_just_before(facts.last_word)}" if facts.last_word is not None else TORN_ENDS,
        advice=(
            "Replay it on the host that wrote it, or copy the -wal file too. If it ends alike there, see the engine's "
            "own log after that time (is it up, does it say that its audit log cannot be written?) and the kernel's "
            "(dmesg) for a process killed for memory. If the disk took what it was given, the engine's "
            f"last {facts.flush_ms:g} ms are missing; if not, there is no bound."
        ),
        inferred="why the log ends",
        impact=(f"engine {_engine(facts.engine)} may be down: its log ends at {at} UTC",),
        also=_also(facts),
    )


@of(ClosedByError)
def _closed_by_error(finding: Finding, facts: ClosedByError) -> Words:
    error = facts.exception or "no type was recorded"
    is_known = facts.last_word is not None
    return Words(
        title=f"the engine stopped because of an error, {error}; the log itself is whole",
        culprit=_just_before(facts.last_word) if facts.last_word else f"the engine process: its log has {error}",
        advice="Look for the error in the engine's own log at that time.",
        inferred="that the engine died of it" if is_known else "",
        impact=(f"engine {_engine(facts.engine)} is down",),
        also=_also(facts),
    )


def _engine(name: str) -> str:
    return name or "(unknown)"


def _just_before(last_word: LastWord) -> str:
    event = last_word.event
    return f"just before the end, at event {event.seq}: {last_word.refusal or event.sentence()}"


def _also(facts: NoLogClosed | ClosedByError) -> str:
    """Return what is to be done as well; the finding of a late result just before the end says it itself."""
    if facts.last_word is not None and facts.last_word.is_late:
        return ""
    return f"See the engine's own log from {words.clock(facts.last.ts_ns)} UTC on for why this log ends."
