"""What was done to each real engine, and what a replay of its logs must find.

What must be found is what was done to the engine: the scenario knows it, and the log does not say it. Where it can be
told only after the run (which key was struck, which bytes in the store are wrong), the scenario left it in its result
or beside it. Nothing here is read from the log that is judged, except to call a request by the id that vLLM gave it.
`tools/scoring/engine.py` compares.
"""

import base64
import json
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from connector.store.recording_store import key_hash
from ledger import events as ev
from ledger.replay.fold import replay
from ledger.verdicts.base import Finding
from tests.engine.conftest import Run
from tools.scoring import common

WRONG_RELATIVE_ERROR = 0.05
"""The same KV computed in another batch differs by less than 1e-3; KV of other tokens differs by about 1."""


class Must(common.Must, frozen=True, kw_only=True):
    """A finding that a replay must have.

    Attributes:
        code: the stable code that it must give; None if the fault has none.
        requests: beginnings of the ids of requests it must name, all of them; vLLM appends to the ids it is given.
        struck: the episode whose keys, those that were struck, are the keys that it must name.
        denies: words that it must not contain: they would send the reader to somebody who has nothing to do with it.
        certainty: `any` where it depends on when a call came.
        keys: for as many findings as there are jobs: gives the keys that they must name together, no more and no fewer,
            and those that they name.
    """

    requests: tuple[str, ...] = ()
    code: str | None = None
    struck: str = ""
    denies: tuple[str, ...] = ()
    keys: Callable[["Replayed", Sequence[Finding]], tuple[set[str], set[str]]] | None = None

    def __str__(self) -> str:
        """Return it as it stands in the table."""
        where = f" in {self.log}" if self.log else ""
        certainty = {"proven": "", "any": " (of any certainty)"}.get(self.certainty, f" ({self.certainty})")
        where += " of each job, with the wrong keys and no other" if self.keys is not None else ""
        return f"`{self.kind}`{f' {self.code}' if self.code else ''}{certainty}{where}"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A run of real engines.

    Attributes:
        module: what runs it, below `tests.engine`.
        done: what was done to the engine.
        must: all that a replay of its logs must find; empty if it must be silent.
        beside: other scenarios of the same module that the truth is read from.
    """

    module: str
    name: str
    done: str
    must: tuple[Must, ...] = ()
    beside: tuple[str, ...] = ()
    timeout_s: float = 500


class Replayed(msgspec.Struct):
    """A run, and what the replay of all its logs together says.

    Attributes:
        found: each finding with the name of its engine.
        events: the events of each engine.
        others: the runs that the truth is read from.
    """

    run: Run
    found: list[tuple[str, Finding]]
    events: dict[str, list[ev.AnyEvent]]
    others: dict[str, Run]


# --- truths that stand beside a run -----------------------------------------------------------------------------------


def stored(run: Run) -> dict[str, torch.Tensor]:
    """Return the KV that the store held at the end of a poison run, by the hash that stands in the log for its key."""
    held = json.loads((run.folder / "truth.json").read_text())
    return {
        key_hash(key): torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.bfloat16).float()
        for key, value in held.items()
    }


def wrong_keys(run: Run, clean: Run) -> set[str]:
    """Return the keys of a poison run whose bytes in the store are not those of the clean run."""
    right = stored(clean)
    return {
        key
        for key, value in stored(run).items()
        if ((value - right[key]).norm() / right[key].norm()).item() > WRONG_RELATIVE_ERROR
    }


def by_bytes(replayed: Replayed, findings: Sequence[Finding]) -> tuple[set[str], set[str]]:
    """Return the keys whose bytes in the store are wrong, and those that the findings name."""
    return wrong_keys(replayed.run, replayed.others["clean"]), _tainted(findings)


def by_fingerprints(replayed: Replayed, findings: Sequence[Finding]) -> tuple[set[str], set[str]]:
    """Return the keys whose fingerprints changed under their put, and those that ownership alone names.

    The replay takes what a worker has caught for proof, so it is asked again without that.
    """
    del findings
    (events,) = replayed.events.values()
    caught = {event.key for event in events if isinstance(event, ev.PoisonCaught)}
    others = [event for event in events if not isinstance(event, ev.PoisonCaught)]
    unaided = [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(others, 1)]
    return caught, _tainted(finding for finding in replay(unaided).findings if finding.kind == "poison")


def _tainted(findings: Iterable[Finding]) -> set[str]:
    return {entry.key for finding in findings for entry in finding.tainted}


# --- the scenarios ----------------------------------------------------------------------------------------------------

STORE = "scenarios"
LOAD_ERRORS = "load_error_scenarios"
PD = "pd_scenarios"
POISON = "poison"

GONE = Must(
    kind="lost_store",
    certainty="suspected",
    code="BLOCK_NOT_FOUND",
    requests=("removed",),
    ranks=(0,),
    struck="removed",
    says=("had put the key", "was gone"),
)


def failed_load(episode: str, code: str, *says: str) -> Must:
    """Return what must be found of a load that failed and was told of."""
    return Must(kind="load_failed", code=code, requests=(episode,), ranks=(0,), struck=episode, says=("rank 0", *says))


LEASED = Must(
    kind="load_failed",
    code="LEASE_EXPIRED",
    requests=("leased",),
    ranks=(0,),
    struck="leased",
    says=("the transfer took", "lease"),
)

FOUR_LOADS = (
    GONE,
    failed_load("changed", "CRC_MISMATCH", "VERIFY"),
    failed_load("relaid", "VERSION_MISMATCH"),
    LEASED,
)
MASTERLESS = failed_load("masterless", "PEER_UNREACHABLE")

FAULTS = (
    "between lookup and load, to a prompt each: a key removed; a bit of a value turned over; values of another layout "
    "and of another size; the store's memory stopped for longer than the lease; the master killed"
)


OTHER_SIDE = ("the prefill engine D", "the decode engine P")
"""What no finding may say: which engines prefill and which decode stands in their names here, and in their logs."""


def failed_pulls(decode: str, policy: str) -> tuple[Must, ...]:
    """Return what must be found of the transfers that failed on one decode."""
    return (
        Must(
            kind="load_failed",
            log=decode,
            code="PEER_NOT_READY",
            requests=("request",),
            ranks=(0,),
            says=(f"P1 knows nothing of transfer never-{policy}", "SEND"),
            denies=OTHER_SIDE,
        ),
        Must(
            kind="load_failed",
            log=decode,
            code="PEER_UNREACHABLE",
            ranks=(0,),
            says=("at BOOTSTRAP",),
            denies=OTHER_SIDE,
        ),
        Must(
            kind="load_failed",
            log=decode,
            code="PEER_NOT_READY",
            ranks=(0,),
            says=("the bootstrap server does not know this engine", "REGISTRATION"),
            denies=OTHER_SIDE,
        ),
        Must(
            kind="load_failed",
            log=decode,
            code="PEER_UNREACHABLE",
            ranks=(0,),
            says=("the prefill engine P1 began to push and did not end",),
            denies=OTHER_SIDE,
        ),
    )


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        module=STORE,
        name="store",
        done="nothing: prompts are saved and loaded; then requests are aborted while they run, load and wait",
    ),
    Scenario(module=STORE, name="preempt", done="nothing but a pool so small that vLLM preempts again and again"),
    Scenario(module=STORE, name="two_ranks", done="nothing: two tensor-parallel ranks save and load"),
    Scenario(
        module=STORE,
        name="killed",
        done="the engine's processes are killed while four requests run",
        must=(Must(kind="torn_log", says=("the process ended hard", "no log_closed")),),
    ),
    Scenario(
        module=LOAD_ERRORS,
        name="recompute",
        done=f"{FAULTS}; vLLM computes again",
        must=(*FOUR_LOADS, MASTERLESS),
    ),
    Scenario(
        module=LOAD_ERRORS,
        name="fail",
        done="the same; vLLM ends the requests",
        must=(*FOUR_LOADS, MASTERLESS),
    ),
    Scenario(
        module=LOAD_ERRORS,
        name="suffix",
        done="the same without the master's end; vLLM keeps what was loaded in front of the fault",
        must=FOUR_LOADS,
    ),
    Scenario(
        module=LOAD_ERRORS,
        name="hybrid",
        done="a model with two KV-cache groups: one prompt is loaded whole, of another a key is removed",
        must=(GONE,),
    ),
    Scenario(
        module=PD,
        name="failures",
        done="one prefill, two decodes (one for each policy): transfers that nobody computes, a wrong address, an "
        "unknown engine, clients that go away; then the prefill is killed within its pushes, and each decode before "
        "one",
        must=(
            *failed_pulls("D-fail", "fail"),
            *failed_pulls("D-recompute", "recompute"),
            Must(
                kind="leak",
                log="P1",
                says=("the decode engine D-fail knows nothing of transfer never_asked",),
                denies=OTHER_SIDE,
            ),
            Must(
                kind="leak",
                log="P2",
                code="TRANSFER_FAILED",
                says=("the decode engine D-fail still waits for it",),
                denies=OTHER_SIDE,
            ),
            Must(kind="torn_log", log="P1"),
            Must(kind="torn_log", log="D-fail"),
            Must(kind="torn_log", log="D-recompute"),
        ),
    ),
    Scenario(
        module=PD,
        name="ranks",
        done="a prefill of two ranks, decodes of two and of one: a good transfer each, and one that nobody computes",
        must=(
            Must(
                kind="load_failed",
                log="D1",
                code="PEER_NOT_READY",
                says=("P knows nothing of transfer never-D1",),
                denies=OTHER_SIDE,
            ),
            Must(
                kind="load_failed",
                log="D2",
                code="PEER_NOT_READY",
                says=("P knows nothing of transfer never-D2",),
                denies=OTHER_SIDE,
            ),
        ),
    ),
    Scenario(module=POISON, name="clean", done="nothing: a large pool, eight long requests", timeout_s=700),
    Scenario(
        module=POISON,
        name="poisoned",
        done="a small pool, every put waits before it reads, and the connector takes no block references",
        must=(Must(kind="poison", certainty="any", keys=by_bytes, says=("after they had been given to",)),),
        beside=("clean",),
        timeout_s=700,
    ),
    Scenario(
        module=POISON,
        name="pinned",
        done="the same small pool and slow puts, with block references",
        timeout_s=700,
    ),
    Scenario(
        module=POISON,
        name="guarded",
        done="as poisoned, with `integrity` on: what changes under a put is caught and removed",
        must=(Must(kind="poison", keys=by_fingerprints),),
        timeout_s=700,
    ),
)

NAMES = [scenario.name for scenario in SCENARIOS]
