"""Simulate P/D: prefill engines and a decode, real schedulers and workers, and a network that misbehaves.

    python tools/simulate_pd.py --seeds 0:1000                       # all faults, as many processes as there are cores
    python tools/simulate_pd.py --seeds 45:46 --save logs            # one seed again, and each engine's log for replay
    python tools/simulate_pd.py --seeds 0:200 --canary first-failure # a known mistake, which must be found

A seed is one run, the same on every machine. A run that fails is told with seed, step and the last event, and made
smaller: what is printed is a plan that still fails. Exit status: 0 if all is well (with `--canary`: if it was found),
1 if not, 2 for wrong usage.
"""

import argparse
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from tools.sim import many
from tools.sim.pd import plan as pl

SHOWN_FAILURES = 5


def main() -> int:
    options = _options()
    from tools.sim.engine import quiet

    quiet()
    logging.disable(logging.CRITICAL)  # asyncio would say that the tasks of a killed engine were cancelled
    started = time.perf_counter()
    plans = {seed: _plan(options.canary, seed, options.steps) for seed in options.seeds}
    results: list[Any] = []
    for result in many.played([(plan, options.canary) for plan in plans.values()], _play, options.jobs):
        results.append(result)
        if result.broken is not None and (options.canary or len(_failed(results)) >= SHOWN_FAILURES):
            break
    failed = sorted(_failed(results), key=lambda result: result.seed)
    for result in failed:
        broken = result.broken
        print(f"seed {result.seed}, step {broken.step}: {broken.kind}: {broken.detail}\n  last event: {broken.event}")
    if failed:
        _shrink(plans[failed[0].seed], failed[0], options)
    if options.save is not None and results:
        _save(failed[0] if failed else results[-1], options.save)
    seen: Counter[str] = Counter()
    for result in results:
        seen.update(result.seen)
    print("\n".join(f"{count:>9,}  {what}" for what, count in sorted(seen.items())))
    print(f"{len(results):,} seeds, {time.perf_counter() - started:.1f} s, {len(failed)} failed.")
    if options.canary:
        print(f"{'FOUND' if failed else 'NOT FOUND'}: {options.canary}")
        return 0 if failed else 1
    return 1 if failed else 0


def _failed(results: list[Any]) -> list[Any]:
    return [result for result in results if result.broken is not None]


def _plan(canary_name: str, seed: int, steps: int) -> pl.Plan:
    if canary_name:
        from tools.sim.pd.canaries import canary

        return canary(canary_name).plan(seed, steps)
    return pl.draw(seed, steps)


def _play(work: tuple[pl.Plan, str]) -> Any:
    from tools.sim.pd.canaries import canary
    from tools.sim.pd.run import Run

    plan, name = work
    if name:
        return Run(plan, only=canary(name).finds, alter=canary(name).alter).play()
    return Run(plan).play()


def _shrink(plan: pl.Plan, failed: Any, options: argparse.Namespace) -> None:
    from tools.sim.shrink import shrink

    def fails(smaller: Any) -> bool:
        broken = _play((smaller, options.canary)).broken
        return broken is not None and broken.kind == failed.broken.kind

    small: Any = shrink(plan, fails, failed.broken.step)  # type: ignore[arg-type]
    print(f"A smaller run that fails in the same way:\n{msgspec.json.encode(small).decode()}")


def _save(result: Any, folder: Path) -> None:
    """Write the log of each engine of a run, as the plugin's writer makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for engine, lines in result.lines.items():
        many.write_log(lines, folder / f"{engine}.db", engine, result.seed)
    print(f"The logs of seed {result.seed} are in {folder}.")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=many.seeds, default=range(200), metavar="A:B", help="seeds, B excluded (0:200)")
    parser.add_argument("--steps", type=many.positive, default=120, help="engine steps with clients and faults (120)")
    parser.add_argument("--canary", default="", help="switch a known mistake on; see tools/sim/pd/canaries.py")
    parser.add_argument("--jobs", type=many.positive, default=os.cpu_count() or 1, help="processes (one for each core)")
    parser.add_argument("--save", type=Path, help="a folder for the logs of the first seed that fails, or of the last")
    options = parser.parse_args()
    if options.canary:
        from tools.sim.pd.canaries import CANARIES

        names = [canary.name for canary in CANARIES]
        if options.canary not in names:
            parser.error(f"there is no canary {options.canary}; there are {', '.join(names)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
