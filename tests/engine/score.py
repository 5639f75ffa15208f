"""How well the verdicts do on real engines: what was done to each, what the replay must find, and what it found.

Run `python -m tests.engine.score` to run every scenario and print the table, with `--write` to write
docs/score-engine.md, with `--runs FOLDER` to keep the runs there and use those that are there already.

What must be found is what was done to the engine: the scenario knows it, and the log does not say it. Where it can be
told only after the run (which key was struck, which bytes in the store are wrong), the scenario left it in its result
or beside it. Nothing here is read from the log that is judged, except to call a request by the id that vLLM gave it.
"""

import argparse
import base64
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from connector.store.recording_store import key_hash
from ledger import events as ev
from ledger.file.read import open_log
from ledger.replay.case import replay_files
from ledger.replay.fold import replay
from ledger.report.wording import say
from ledger.verdicts.base import Finding
from tests.engine.conftest import Run, run_scenario

PAGE = Path(__file__).parents[2] / "docs" / "score-engine.md"

WRONG_RELATIVE_ERROR = 0.05
"""The same KV computed in another batch differs by less than 1e-3; KV of other tokens differs by about 1."""

TOO_FAST = "the run was not slow enough to poison a key"


class Must(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that a replay must have.

    Attributes:
        log: the engine whose log must show it; empty where there is one engine.
        code: the stable code that it must give; None if the fault has none.
        requests: beginnings of the ids of requests it must name, all of them; vLLM appends to the ids it is given.
        ranks: the ranks that it must name.
        struck: the episode whose keys, those that were struck, are the keys that it must name.
        says: words that its title and culprit must contain.
        denies: words that they must not contain: they would send the reader to somebody who has nothing to do with it.
        certainty: `any` where it depends on when a call came.
        keys: for as many findings as there are jobs: gives the keys that they must name together, no more and no fewer,
            and those that they name.
    """

    kind: str
    certainty: str = "proven"
    log: str = ""
    code: str | None = None
    requests: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    struck: str = ""
    says: tuple[str, ...] = ()
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


class Row(msgspec.Struct):
    """The score of one run.

    Attributes:
        due: findings that there had to be.
        verdict: how many of them were there.
        culprit: how many of these named the right cause.
        false_alarms: findings beside those.
        versions: of what the engines ran.
        keys: for poison, how many keys were wrong, and how many were named.
    """

    scenario: Scenario
    found: list[tuple[str, Finding]]
    due: int = 0
    verdict: int = 0
    culprit: int = 0
    false_alarms: int = 0
    events: int = 0
    problems: list[str] = []
    versions: dict[str, str] = {}
    keys: tuple[int, int] | None = None


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


# --- judging ----------------------------------------------------------------------------------------------------------


def replayed(run: Run, others: dict[str, Run]) -> Replayed:
    """Return what the logs of a run say, replayed together as `kvledger replay` does."""
    paths = run.logs
    events: dict[str, list[ev.AnyEvent]] = {}
    names: list[str] = []
    for path in paths:
        with open_log(path) as log:
            told = list(log.events())
        name = told[0].engine if isinstance(told[0], ev.LogOpened) else path.name
        names.append(name)
        events[name] = told
    found = [(names[index], finding) for index, finding in replay_files(paths).findings]
    return Replayed(run, found, events, others)


def score(scenario: Scenario, run: Run, others: dict[str, Run]) -> Row:
    """Return the score of a run.

    Args:
        others: by name, the runs that the scenario's truth is read from.
    """
    seen = replayed(run, others)
    opened = [events[0] for events in seen.events.values() if isinstance(events[0], ev.LogOpened)]
    row = Row(scenario, seen.found, events=sum(map(len, seen.events.values())))
    row.versions = {name: version for each in opened for name, version in each.versions.items()}
    left = list(seen.found)
    for must in scenario.must:
        row.due += 1
        candidates = [each for each in left if _is_the_verdict(must, each)]
        if must.keys is not None:
            chosen = candidates
        else:
            candidates.sort(key=lambda each: len(mismatches(must, [each[1]], seen, row)))
            chosen = candidates[:1]
        if not chosen:
            nothing_there = must.keys is not None and not must.keys(seen, ())[0]
            row.problems.append(TOO_FAST if nothing_there else f"missed: {must}")
            continue
        row.verdict += 1
        left = [each for each in left if not any(each is other for other in chosen)]
        wrong = mismatches(must, [finding for _, finding in chosen], seen, row)
        row.culprit += not wrong
        row.problems += [f"{must}: {each}" for each in wrong]
    row.false_alarms = len(left)
    row.problems += [
        f"false alarm in {log}: {finding.kind} ({finding.certainty}): {say(finding).title}; {say(finding).culprit}"
        for log, finding in left
    ]
    return row


def _is_the_verdict(must: Must, found: tuple[str, Finding]) -> bool:
    log, finding = found
    return (
        finding.kind == must.kind
        and must.certainty in ("any", finding.certainty)
        and must.log in ("", log)
        and (must.code is None or finding.code == must.code)
    )


def mismatches(must: Must, findings: Sequence[Finding], seen: Replayed, row: Row) -> list[str]:
    """Return what the findings do not name as they must."""
    wrong: list[str] = []
    requests = {request for finding in findings for request in finding.requests}
    wrong += [
        f"requests {sorted(requests)}, none of them {prefix}"
        for prefix in must.requests
        if not any(request == prefix or request.startswith(prefix + "-") for request in requests)
    ]
    for finding in findings:
        if must.ranks is not None and tuple(finding.ranks) != must.ranks:
            wrong.append(f"ranks {list(finding.ranks)}, not {list(must.ranks)}")
        said = f"{say(finding).title}; {say(finding).culprit}"
        wrong += [f"does not say '{words}', but '{said}'" for words in must.says if words not in said]
        wrong += [f"sends to the wrong side: '{said[said.index(words) :]}'" for words in must.denies if words in said]
    if must.struck:
        struck = {key_hash(key) for key in seen.run.result["struck"][must.struck]}
        named = {key for finding in findings for key, _ in finding.missing_keys}
        if struck != named:
            wrong.append(f"names the keys {sorted(named)}, and {sorted(struck)} were struck")
    if must.keys is not None:
        truth, named = must.keys(seen, findings)
        row.keys = len(truth), len(named & truth)
        if truth != named:
            wrong.append(
                f"of {len(truth)} wrong keys {sorted(truth - named)} are not named; "
                f"{sorted(named - truth)} are named and right"
            )
        if not truth:
            wrong.append(TOO_FAST)
    return wrong


# --- the page ---------------------------------------------------------------------------------------------------------

HEAD = """# How well the verdicts do on real engines

<!-- Written by `python -m tests.engine.score --write`; a test fails when this page and the code disagree. -->

The scenarios of `tests/engine/`: real vLLM on a CPU, real Mooncake over TCP on loopback, a tiny model with dummy
weights. Each is run, something is done to it from outside, and the logs that it leaves are replayed together.
*Verdict* counts findings whose kind, certainty, code and engine are right. *Culprit* counts those that also name the
right requests, ranks, keys and cause. *False alarms* counts every other finding.
"""

FOOT = """
What was done to an engine is the truth here, not what its log says: the keys that were removed or changed are noted by
the second client that did it, and which keys are poisoned is told by their bytes in the store, compared with those of
the clean run. In the guarded run the poisoned keys are gone from the store, so there the fingerprints that the worker
took of its own memory are the truth, and the keys are those that the replay names without having been told of them.

What this says, and what not. What must be found was written by this project, beside the verdicts, and the faults are
those that its tests can make: one run of each scenario, on one machine, with one version of vLLM. So it shows that
verdicts which hold on [scripted logs](score.md) and in [simulation](score-simulator.md) also hold on what real engines
write, and that healthy runs with preemptions, aborts and several ranks stay silent. It says little about how often a
verdict would be wrong in production, and nothing about accelerators, RDMA, or many engines.

The tests of fingerprints and of the receive thread (`test_integrity.py`, `test_load_thread.py`) drive parts of a worker
and leave no log, so they have no row.
"""


PROBLEM_LENGTH = 240


def cells(scenario: Scenario) -> list[str]:
    """Return the cells of a scenario's row that no run can change."""
    return [scenario.name, scenario.done, ", ".join(map(str, scenario.must)) or "nothing"]


def page(rows: Sequence[Row]) -> str:
    """Return docs/score-engine.md."""
    lines = [HEAD]
    versions = {name: version for row in rows for name, version in row.versions.items()}
    lines.append(f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}.\n")
    lines += ["| scenario | what was done to it | must find | events | verdict | culprit | false alarms |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        keys = f" ({row.keys[1]} of {row.keys[0]} keys)" if row.keys is not None else ""
        lines.append(
            f"| {' | '.join(cells(row.scenario))} | {row.events:,} | {row.verdict} of {row.due} "
            f"| {row.culprit} of {row.due}{keys} | {row.false_alarms} |"
        )
    due = sum(row.due for row in rows)
    lines.append(
        f"| **all** | | {due} findings | {sum(row.events for row in rows):,} "
        f"| {sum(row.verdict for row in rows)} of {due} | {sum(row.culprit for row in rows)} of {due} "
        f"| {sum(row.false_alarms for row in rows)} |"
    )
    problems = [f"* {row.scenario.name}: {_cut(problem)}" for row in rows for problem in row.problems]
    if problems:
        lines += ["", "What was not as it must be:", "", *problems]
    return "\n".join(lines) + "\n" + FOOT


def _cut(problem: str) -> str:
    return problem if len(problem) <= PROBLEM_LENGTH else f"{problem[: PROBLEM_LENGTH - 3].rstrip()}..."


def run_all(folder: Path, scenarios: Sequence[Scenario]) -> list[Row]:
    """Run scenarios for real, those that have not left a result in `folder` yet, and return their scores."""
    runs: dict[str, Run] = {}
    for scenario in scenarios:
        own = folder / scenario.name
        result = own / "result.json"
        if result.exists():
            runs[scenario.name] = Run(json.loads(result.read_text()), own)
            continue
        own.mkdir(parents=True, exist_ok=True)
        print(f"{scenario.name} ...", file=sys.stderr, flush=True)
        left = run_scenario(f"tests.engine.{scenario.module}", scenario.name, own, scenario.timeout_s)
        runs[scenario.name] = Run(left, own)
    return [
        score(scenario, runs[scenario.name], {name: runs[name] for name in scenario.beside}) for scenario in scenarios
    ]


def main() -> int:
    """Run the scenarios, print the table and all that is wrong; the status is 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder, and use those that are there")
    parser.add_argument("--write", action="store_true", help="write docs/score-engine.md")
    options = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        try:
            rows = run_all(options.runs or Path(temporary), SCENARIOS)
        except pytest.fail.Exception as failure:
            print(failure.msg, file=sys.stderr)
            return 1
    text = page(rows)
    print(text)
    if options.write:
        PAGE.write_text(text)
    return 1 if any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
