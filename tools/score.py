"""Score the verdicts by what is known to be true, and write the pages that say how well they do.

    python tools/score.py corpus --write                  # docs/score.md: logs scripted after public incidents; seconds
    python tools/score.py simulator --write               # docs/score-simulator.md: simulated engines; about 20 minutes
    python tools/score.py engine --runs FOLDER --write    # docs/score-engine.md: real engines; about 15 minutes

Without `--write` a page is only printed. Exit status: 0 if all is well, 1 if something is missed or made up (of
simulated engines, only if it is made up), 2 for wrong usage.
"""

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

import click

from tools.sim import many

if TYPE_CHECKING:
    from tools.scoring.common import RunScore

written = click.option("--write", is_flag=True, help="Write the page.")


@click.group(help=__doc__.split("\n\n", 1)[0] if __doc__ else "")
def main() -> None:
    """Read the command line."""


@main.command("corpus")
@written
def corpus(write: bool) -> None:
    """Score the logs of tests/incidents."""
    from tools.scoring import corpus

    rows = corpus.scores()
    problems = [f"{row.incident.id}: {problem}" for row in rows for problem in row.problems]
    _end(corpus.page(rows), corpus.PAGE, write, problems)


@main.command("simulator")
@click.option("--seeds", type=many.Seeds(), default="0:500", show_default=True, help="With all faults.")
@click.option("--canary-seeds", type=many.Seeds(), default="0:40", show_default=True, help="For each known mistake.")
@click.option("--pd-seeds", type=many.Seeds(), default="0:300", show_default=True, help="Of prefills and a decode.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Steps of the store's engines.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes; one for each core.")
@written
def simulator(seeds: range, canary_seeds: range, pd_seeds: range, steps: int, jobs: int, write: bool) -> None:
    """Score simulated engines, with the store connector and of P/D."""
    from tools.scoring import simulator as page
    from tools.sim.store.canaries import CANARIES

    work = [(seed, steps, "") for seed in seeds]
    work += [(seed, steps, each.name) for each in CANARIES for seed in canary_seeds]
    work += [(seed, steps, page.PD) for seed in pd_seeds]
    started_s = time.perf_counter()
    scores: list[RunScore] = []
    for each in many.played(work, page.score_one, jobs, in_order=True):
        scores.append(each)
        for alarm in each.alarms:
            print(f"seed {each.seed}, {each.name}: false alarm: {alarm}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(scores)} of {len(work)}", end="", file=sys.stderr)
    print(f"{len(work)} runs in {time.perf_counter() - started_s:.0f} s")
    _end(page.page(scores), page.PAGE, write, [alarm for each in scores for alarm in each.alarms])


@main.command("engine")
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the runs there, and use those that are there.")
@written
def engine(runs: Path | None, write: bool) -> None:
    """Score real engines: run every scenario of tests/engine, and replay what it left."""
    import pytest

    from tests.engine.expected import SCENARIOS
    from tools.scoring import engine

    with TemporaryDirectory() as temporary:
        try:
            rows = engine.run_all(runs or Path(temporary), SCENARIOS)
        except pytest.fail.Exception as failure:
            print(failure.msg, file=sys.stderr)
            sys.exit(1)
    _end(engine.page(rows), engine.PAGE, write, [problem for row in rows for problem in row.problems])


def _end(text: str, page: Path, write: bool, problems: list[str]) -> None:
    """Print a page and what is wrong, write the page if asked to, and leave with the exit status."""
    print(text)
    for problem in problems:
        print(problem)
    if write:
        page.write_text(text)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
