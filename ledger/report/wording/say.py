"""A finding in words: its own, and what the fold and the logs of other engines add to them."""

import importlib
import pkgutil
from functools import cache
from typing import Any

import msgspec

from ledger.replay.join import Said
from ledger.report.wording.words import Words, words_of
from ledger.verdicts.base import Finding


@cache
def _load() -> None:
    """Import every file of this folder once: that registers its functions."""
    for module in pkgutil.iter_modules(importlib.import_module("ledger.report.wording").__path__):
        importlib.import_module(f"ledger.report.wording.{module.name}")


def say(finding: Finding) -> Words:
    """Return what is said of a finding."""
    _load()
    said = words_of(finding)
    said = _with_other_logs(finding, said)
    return _in_doubt(finding, said)


PUBLIC_FIELDS = (
    "kind",
    "certainty",
    "title",
    "since_seq",
    "requests",
    "jobs",
    "blocks",
    "ranks",
    "code",
    "evidence",
    "culprit",
    "advice",
)
"""The public shape of a finding, in its order."""


def public(finding: Finding) -> dict[str, Any]:
    """Return a finding in the shape that `kvledger replay --json` promises.

    What keeps it from being proven, and what another log would show, is said in its advice.
    """
    said = say(finding)
    doubt = f"Not proven: {said.doubt}" if said.doubt else ""
    in_words = {
        "title": said.title,
        "culprit": said.culprit,
        "advice": " ".join(part for part in (said.other_log, said.advice, doubt) if part),
    }
    return {name: in_words[name] if name in in_words else getattr(finding, name) for name in PUBLIC_FIELDS}


def _with_other_logs(finding: Finding, said: Words) -> Words:
    """Return the words with what other logs know: why a transfer went wrong is said by the log of the other side."""
    known = [each for each in finding.other_side if isinstance(each, Said)]
    if not known:
        return said
    of_transfer = known[0].of_transfer
    texts = [each.text for each in known]
    inferred = [said.inferred] if said.inferred and not of_transfer else []
    if finding.elsewhere:
        inferred.append("that what the other log has of these keys is why they cannot be loaded")
    return msgspec.structs.replace(
        said,
        culprit="; ".join([said.culprit, *texts] if of_transfer else [*texts, said.culprit]),
        inferred="; ".join(inferred),
        brief=f"{said.title}; {texts[0]}" if finding.elsewhere else said.brief,
        other_log="" if of_transfer else said.other_log,
    )


def _in_doubt(finding: Finding, said: Words) -> Words:
    """Return the words as they are, or those for a damaged file, whose lost events may say otherwise."""
    if finding.lost is None:
        return said
    return msgspec.structs.replace(
        said,
        doubt=f"the file has lost events, the first at event {finding.lost.seq}, and they may say otherwise",
        culprit=f"if nothing that is lost says otherwise: {said.culprit}",
        advice=f"First find the whole log, where it was written. If there is none: {said.advice}",
        brief=f"as far as the file goes, which has lost events: {said.short}",
        shown="",
    )
