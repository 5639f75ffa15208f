"""The sentences of findings: one file for each kind, and what all have in common.

    words       what is said of a finding, and how a function is found that says it
    say         a finding in words, with what the fold and other logs add to it
    clauses     sentences that several kinds share

Nothing here decides anything: a finding is judged before it comes here. This folder knows findings and the words of
events; nothing below `ledger.report` knows it.
"""

from ledger.report.wording.clauses import answers
from ledger.report.wording.say import public, say
from ledger.report.wording.words import Answers, Clause, SameForJob, Words

__all__ = ["Answers", "Clause", "SameForJob", "Words", "answers", "public", "say"]
