"""The page of simulated engines, those with the store connector and those of P/D."""

from collections import Counter
from collections.abc import Sequence

from tools.scoring import pd, store
from tools.scoring.common import DOCS, RunScore
from tools.scoring.pd import PD, PD_STEPS, PdScore
from tools.scoring.store import ALL_FAULTS, StoreScore

PAGE = DOCS / "score-simulator.md"
SHOWN_SEEDS = 8

HEAD = """# How well the verdicts do on simulated engines

<!-- Written by `python tools/score.py simulator --write`. -->

Runs of the simulator on vLLM's real scheduler, with every kind of fault, and with the known mistakes of its canaries
switched on. The verdicts see the log alone; the simulator knows what really happened. Each cell says how much of that
was found. *False alarms* are findings that nothing which happened explains.
"""

FAULTS_HEAD = """What struck in the runs with all faults. Most had several kinds, and what there was to find counts for
each kind.
"""

PD_HEAD = """Prefills and a decode, with several peers, ranks and stages; all logs of a run are replayed together.
*Wrong side* counts findings that call an engine which can only decode a prefill that knows nothing, or the reverse.
"""

FOOT = """
A poisoned key is found if a `poison` finding names it, if it was computed from such a key, or if `kvledger
blast-radius` lists it for a job whose blocks were freed early. *Right keys proven / suspected* are those that a finding
names and that hold the KV that they should. A suspected one was read in time. A proven one holds the KV of another
request as it says, and that one shares the prefix up to there, which the log does not tell; what was computed from
wrong KV is left out, because the simulator computes nothing.

Poisoned keys that nobody names are those of which the log holds too little: who shares blocks in the engine's own
prefix cache, and who gets a block that no open work names. The latter is why `first-failure` has most of them: the log
proves that a request went on while its load still wrote (`early_free`), and not which of the keys that it saved later
were struck.

The last five mistakes break rules of which a log keeps no trace, but for `beside-the-log`, where the digests in the log
are not those of its fold. Of the others only silence is asked here; the simulator's own checks find them.

Both sides were written by this project, and the simulator draws only faults that its authors thought of.
"""


def score_one(work: tuple[int, int, str]) -> StoreScore | PdScore:
    """Play one run: a seed, its steps, and `PD` or a known mistake of the store's simulator."""
    seed, steps, name = work
    return pd.score(seed, PD_STEPS) if name == PD else store.score(seed, steps, name)


def page(scores: Sequence[StoreScore | PdScore]) -> str:
    """Return docs/score-simulator.md."""
    stores = [each for each in scores if isinstance(each, StoreScore)]
    pds = [each for each in scores if isinstance(each, PdScore)]
    parts = [HEAD, store.table(stores), "", _seeds_of(stores, pds), "", *_missed([*stores, *pds]), ""]
    parts += [FAULTS_HEAD, store.table_of_faults(stores), "", PD_HEAD, pd.table(pds), FOOT]
    return "\n".join(parts)


def _missed(scores: Sequence[RunScore]) -> list[str]:
    """Return a line for each kind of run and case of which something was missed."""
    counted = Counter((each.name, case) for each in scores for case in each.misses)
    lines: list[str] = []
    for (name, case), number in counted.items():
        seeds = [each.seed for each in scores if each.name == name and case in each.misses]
        more = ", ..." if number > SHOWN_SEEDS else ""
        lines.append(f"* {name}: {case} missed in seeds {', '.join(map(str, seeds[:SHOWN_SEEDS]))}{more}")
    return lines


def _seeds_of(stores: Sequence[StoreScore], pds: Sequence[PdScore]) -> str:
    drawn = [each for each in stores if each.name == ALL_FAULTS]
    mistakes = [each for each in stores if each.name != ALL_FAULTS]
    return f"Seeds {_seeds(drawn)}, {_seeds(mistakes)} for each mistake, and {_seeds(pds)} for P/D."


def _seeds(scores: Sequence[RunScore]) -> str:
    seeds = [each.seed for each in scores]
    return f"{min(seeds)} to {max(seeds)}" if seeds else "none"
