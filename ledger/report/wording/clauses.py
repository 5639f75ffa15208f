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


DOWN = "The engine has shut down: nothing is held any more."
"""What to say of blocks once the engine has shut down."""


def likewise(number: int, what: str) -> str:
    """Return how a title ends that tells the first of several alike, of which `number` are left."""
    return f"; {words.plural(number, 'more ' + what)} likewise" if number else ""
