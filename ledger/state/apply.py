"""The book: what the scheduler knows, as a projection of the log.

`State.apply` is the only way to change it. It is deterministic: no I/O, no clock, no configuration; everything it needs
is in the event. It accepts an event, or refuses it with a named rule and changes nothing. The live scheduler and
`kvledger replay` run this same code, so a file and the engine that wrote it can be compared by a digest.

Two sorts of events pass through here. *Decisions* are the connector's own (a job is registered, blocks are freed): the
rules of the book hold for them, and what breaks a rule is refused. *Observations* are what vLLM did (a request was
scheduled, preempted, finished): they are facts, so they are taken as they come.

The rules stand in `requests`, `store`, `pd` and `log`, each with the kinds that it takes. This file knows where.
"""

from ledger import events as ev
from ledger.state import log, pd, requests, store
from ledger.state.projection import Projection

_RULES = {**requests.HANDLERS, **store.HANDLERS, **pd.HANDLERS, **log.HANDLERS}


class State(Projection):
    """The projection, and `apply`, which alone writes it."""

    def apply(self, event: ev.Event) -> None:
        """Change the state as `event` says.

        Raises:
            Refused: a rule of the book forbids the event. Nothing was changed.
        """
        rule = _RULES.get(event.__class__)
        if rule is not None:
            rule(self, event)
