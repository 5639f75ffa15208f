"""The rules of the book: for each its name, and what it means to break it, grouped by what enforces them.

A rule is broken in a log in two ways. The engine noticed it and said so: `invariant_violated`. Or the log holds an
event that the book does not accept, because it comes from a connector that does not keep these rules.

This file knows what a rule is, and no event.
"""

from ledger.rules import Breach, Rule

# --- store jobs -------------------------------------------------------------------------------------------------------

JOB_ID_REUSED = Rule("job_id_reused", Breach.OTHER)
JOB_WITHOUT_RANKS = Rule("job_without_ranks", Breach.OTHER)
PINNED_TWICE = Rule("pinned_twice", Breach.OTHER)
# The ranks have read what was not pinned. Whether the blocks changed hands meanwhile is for `poison` to say.
PINNED_LATE = Rule("pinned_late", Breach.OTHER)
NULL_BLOCK_PINNED = Rule("null_block_pinned", Breach.OTHER)
RANK_REPORTED_TWICE = Rule("rank_reported_twice", Breach.OVER_REPORT)
UNEXPECTED_RANK = Rule("unexpected_rank", Breach.OVER_REPORT)
SETTLED_EARLY = Rule("settled_early", Breach.EARLY_FREE)
SETTLED_TWICE = Rule("settled_twice", Breach.DOUBLE_FREE)
# Quarantine is a precaution after a breach that has a finding of its own. By itself, ending it frees nothing early.
JOB_QUARANTINED = Rule("job_quarantined", Breach.OTHER)
FREED_EARLY = Rule("freed_early", Breach.EARLY_FREE)
FREED_OTHER_BLOCKS = Rule("freed_other_blocks", Breach.DOUBLE_FREE)
JOB_ALREADY_SETTLED = Rule("job_already_settled", Breach.DOUBLE_FREE, reported=Breach.OVER_REPORT)
UNKNOWN_JOB = Rule("unknown_job", Breach.STALE_COMPLETION)

# --- loads ------------------------------------------------------------------------------------------------------------

LOAD_ID_REUSED = Rule("load_id_reused", Breach.OTHER)
LOAD_STILL_OPEN = Rule("load_still_open", Breach.OTHER)
NULL_BLOCK_LOADED = Rule("null_block_loaded", Breach.OTHER)
LOAD_REGISTERED_TWICE = Rule("load_registered_twice", Breach.OTHER)
RANK_LOADED_TWICE = Rule("rank_loaded_twice", Breach.OVER_REPORT)
LOAD_FAILED_TWICE = Rule("load_failed_twice", Breach.OVER_REPORT)
LOAD_SETTLED_EARLY = Rule("load_settled_early", Breach.EARLY_FREE)
FAILURE_IS_STICKY = Rule("failure_is_sticky", Breach.UNREPORTED_FAILURE)
LOAD_ALREADY_SETTLED = Rule("load_already_settled", Breach.LATE_EVENT)
UNKNOWN_LOAD = Rule("unknown_load", Breach.STALE_COMPLETION)

# --- sends ------------------------------------------------------------------------------------------------------------

SEND_STILL_OPEN = Rule("send_still_open", Breach.OTHER)
SEND_WITHOUT_RANKS = Rule("send_without_ranks", Breach.OTHER)
SEND_READY_TWICE = Rule("send_ready_twice", Breach.OTHER)
# A read before the prefill has written; no block is given back by it, so it is not an early free.
SENT_BEFORE_READY = Rule("sent_before_ready", Breach.OTHER)
WITHDRAWN_LATE = Rule("withdrawn_late", Breach.EARLY_FREE)
SEND_NOT_SERVED = Rule("send_not_served", Breach.UNREPORTED_FAILURE)
# It says which ranks ran out of time, and others did. That they ran out of time was said, so nothing was hidden.
SEND_NOT_EXPIRED = Rule("send_not_expired", Breach.OTHER)
SEND_OVER_EARLY = Rule("send_over_early", Breach.EARLY_FREE)
RANK_SENT_TWICE = Rule("rank_sent_twice", Breach.OVER_REPORT)
UNKNOWN_SEND = Rule("unknown_send", Breach.LATE_EVENT)

# --- recvs ------------------------------------------------------------------------------------------------------------

RECV_STILL_OPEN = Rule("recv_still_open", Breach.OTHER)
RECV_WITHOUT_RANKS = Rule("recv_without_ranks", Breach.OTHER)
# Naming peers adds to what is waited for. An over-report takes away from it; this can free nothing early.
PEERS_NAMED_TWICE = Rule("peers_named_twice", Breach.OTHER)
PEERS_NOT_NAMED = Rule("peers_not_named", Breach.OTHER)
PEER_NOT_NAMED = Rule("peer_not_named", Breach.OTHER)
LOADED_FROM_NOBODY = Rule("loaded_from_nobody", Breach.UNREPORTED_FAILURE)
PEER_SETTLED_TWICE = Rule("peer_settled_twice", Breach.OVER_REPORT)
UNEXPECTED_PEER = Rule("unexpected_peer", Breach.OVER_REPORT)
RECV_FAILED_TWICE = Rule("recv_failed_twice", Breach.OVER_REPORT)
# What became of the request was said where nothing had failed, or twice. That is an act of the scheduler, not a report.
RECOVERED_FROM_NOTHING = Rule("recovered_from_nothing", Breach.OTHER)
RECOVERED_TWICE = Rule("recovered_twice", Breach.OTHER)
RECV_SETTLED_EARLY = Rule("recv_settled_early", Breach.EARLY_FREE)
UNREPORTED_FAILURE = Rule("unreported_failure", Breach.UNREPORTED_FAILURE)
UNKNOWN_RECV = Rule("unknown_recv", Breach.LATE_EVENT)

# --- sends and recvs --------------------------------------------------------------------------------------------------

NULL_BLOCK_MOVED = Rule("null_block_moved", Breach.OTHER)
TRANSFER_QUARANTINED = Rule("transfer_quarantined", Breach.OTHER)  # as JOB_QUARANTINED

RULES = {rule.name: rule for rule in tuple(globals().values()) if isinstance(rule, Rule)}
"""All rules, by name."""


def breach_of(name: str, *, is_report: bool) -> Breach:
    """Return what it means that a rule was broken; `OTHER` for a rule of a later version.

    Args:
        name: the rule's name, as a log has it.
        is_report: a rank's report broke it, and no act of the scheduler.
    """
    rule = RULES.get(name)
    return rule.breach_by(is_report=is_report) if rule is not None else Breach.OTHER
