"""Clauses that several kinds of findings share."""

from ledger import words
from ledger.report.wording.words import Answers


def answers(clause: Answers) -> str:
    """Return a clause about requests whose answers cannot be trusted."""
    if len(clause.requests) == 1:
        sure = "is unreliable" if clause.proven else "may be wrong"
        return f"the answer of request {clause.requests[0]}, {clause.how}, {sure}"
    named = words.listed(clause.requests)
    sure = "are unreliable" if clause.proven else "may be wrong"
    return f"the answers of {len(clause.requests)} requests ({named}), {clause.how}, {sure}"
