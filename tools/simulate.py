"""Simulate engines: vLLM's real scheduler with the plugin attached, and clients, workers and a store that misbehave.

    python tools/simulate.py --seeds 0:2000                     # all faults, as many processes as there are cores
    python tools/simulate.py --seeds 94:95 --save failed.db     # one seed again, and its log for `kvledger replay`
    python tools/simulate.py --seeds 0:200 --canary pins-off    # a known mistake, which must be found
    python tools/simulate.py --plan failed.plan.json            # a shrunk run

A seed is one run, the same on every machine. A run that fails is told with seed, step and the last event, and made
smaller: what is printed is a plan that still fails. Exit status: 0 if all is well (with `--canary`: if it was found),
1 if not, 2 for wrong usage.
"""

import argparse
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from tools.sim import many
from tools.sim import plan as pl

SLOWEST = 10
SHOWN_FAILURES = 5


def main() -> int:
    options = _options()
    from tools.sim.engine import quiet
    from tools.sim.run import Result

    quiet()
    if options.plan is not None:
        plans = [msgspec.json.decode(options.plan.read_bytes(), type=pl.Plan)]
    else:
        plans = [_plan(options, seed) for seed in options.seeds]
    started = time.perf_counter()
    results: list[Result] = []
    for result in many.played([(plan, options.canary) for plan in plans], _play_one, options.jobs):
        results.append(result)
        if options.canary and result.broken is not None:
            break  # one is enough
        if result.broken is not None and sum(each.broken is not None for each in results) >= options.max_failures:
            break
    elapsed_s = time.perf_counter() - started
    results.sort(key=lambda result: result.seed)
    return _tell(results, plans, options, elapsed_s)


# --- running ----------------------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace, seed: int) -> pl.Plan:
    if options.canary:
        from tools.sim.canaries import canary

        return canary(options.canary).plan(seed, options.steps)
    return pl.draw(seed, options.steps, ranks=options.ranks, faults=options.faults)


def _play_one(work: tuple[pl.Plan, str]) -> Any:
    return _play(*work)


def _play(plan: pl.Plan, canary_name: str, keep_log: bool = False) -> Any:
    from tools.sim.canaries import canary
    from tools.sim.run import Run

    if canary_name:
        mistake = canary(canary_name)
        return Run(plan, only=mistake.finds, keep_log=keep_log, alter=mistake.alter).play()
    return Run(plan, keep_log=keep_log).play()


# --- telling ----------------------------------------------------------------------------------------------------------


def _tell(results: list[Any], plans: list[pl.Plan], options: argparse.Namespace, elapsed_s: float) -> int:
    failed = [result for result in results if result.broken is not None]
    by_seed = {plan.seed: plan for plan in plans}
    for result in failed[:SHOWN_FAILURES]:
        _tell_failure(result)
    if failed and options.shrink:
        _shrink(by_seed[failed[0].seed], failed[0], options)
    if options.save is not None and results:
        shown = failed[0] if failed else results[-1]
        _save(by_seed[shown.seed], options.canary, options.save)
        print(f"The log of seed {shown.seed} is in {options.save}.")
    _tell_coverage(results)
    _tell_slowest(results)
    steps = sum(result.steps for result in results)
    cpu_s = sum(result.cpu_s for result in results)
    ended = Counter(result.ended for result in results)
    digest = hashlib.sha256("".join(result.digest for result in results).encode()).hexdigest()[:16]
    print(
        f"\n{len(results):,} seeds of {options.steps} steps, {steps:,} engine steps, {steps / max(cpu_s, 1e-9):,.0f} "
        f"steps per second of one processor, {elapsed_s:.1f} s for {options.jobs} processes. Ended: "
        + ", ".join(f"{count:,} {how}" for how, count in ended.most_common())
        + f". Digest of all logs: {digest}."
    )
    if options.canary:
        return _tell_canary(options, results, failed)
    print("FAILED: " + _kinds(failed) if failed else "PASSED: every check held after every step of every seed.")
    return 1 if failed else 0


def _tell_canary(options: argparse.Namespace, results: list[Any], failed: list[Any]) -> int:
    from tools.sim.canaries import canary

    mistake = canary(options.canary)
    also = Counter[str]()
    for result in results:
        also.update(result.passed_over)
    if failed:
        print(
            f"FOUND: {mistake.name} ({mistake.incident}: {mistake.what}) shows as {_kinds(failed)}, "
            f"seed {failed[0].seed}."
        )
        print(f"Checks that would have stopped these runs before: {', '.join(sorted(also)) or 'none'}.")
        return 0
    print(
        f"NOT FOUND: {mistake.name} ({mistake.incident}: {mistake.what}). Other checks saw: {dict(also) or 'nothing'}."
    )
    return 1


def _kinds(failed: Iterable[Any]) -> str:
    kinds = Counter(result.broken.kind for result in failed)
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())


def _tell_failure(result: Any) -> None:
    broken = result.broken
    print(f"\nseed {result.seed}, step {broken.step}: {broken.kind}: {broken.detail}")
    print(f"  last event: {broken.event or 'none'}")


def _shrink(plan: pl.Plan, result: Any, options: argparse.Namespace) -> None:
    from tools.sim.shrink import shrink

    kind = result.broken.kind

    def fails(smaller: pl.Plan) -> bool:
        broken = _play(smaller, options.canary).broken
        return broken is not None and broken.kind == kind

    print(f"\nShrinking seed {plan.seed} ({len(plan.decisions)} decisions) ...", flush=True)
    smallest = shrink(plan, fails, result.broken.step)
    broken = _play(smallest, options.canary).broken
    print(f"A run of {len(smallest.decisions)} decisions and {smallest.steps} steps still fails:")
    print(f"  {msgspec.json.encode(smallest.shape).decode()}")
    for decision in smallest.decisions:
        print(f"  {msgspec.json.encode(decision).decode()}")
    if broken is not None:
        print(f"  step {broken.step}: {broken.kind}: {broken.detail}")
        print(f"  last event: {broken.event or 'none'}")
    if options.save is not None:
        path = options.save.with_suffix(".plan.json")
        path.write_bytes(msgspec.json.encode(smallest))
        print(f"It is in {path}; run it again with --plan.")


def _tell_coverage(results: list[Any]) -> None:
    seen = Counter[str]()
    for result in results:
        seen.update(result.seen)
    codes = {what: seen.pop(what) for what in list(seen) if what.startswith("faults: code ")}
    if codes:
        seen[f"faults: code ({len(codes)} of {len(pl.CODES)} codes)"] = sum(codes.values())
    print("\nWhat happened:")
    for what, count in sorted(seen.items()):
        print(f"  {count:>10,}  {what}")


def _tell_slowest(results: list[Any]) -> None:
    print(f"\nThe slowest {SLOWEST} seeds:")
    for result in sorted(results, key=lambda result: -result.cpu_s)[:SLOWEST]:
        took_ms = result.cpu_s * 1000
        print(f"  seed {result.seed:>6}  {took_ms:>7.0f} ms  {result.steps:>6,} steps  {result.events:>7,} events")


def _save(plan: pl.Plan, canary_name: str, path: Path) -> None:
    """Play a plan again and write its log: a `.db` as the plugin's writer makes it, anything else as JSON lines."""
    lines = _play(plan, canary_name, keep_log=True).lines
    if path.suffix != ".db":
        path.write_bytes(b"\n".join(lines) + b"\n")
        return
    many.write_log(lines, path, "simulated", plan.seed)


# --- options ----------------------------------------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    from tools.sim.plan import FAULTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=many.seeds, default=range(200), metavar="A:B", help="seeds, B excluded (0:200)")
    parser.add_argument("--steps", type=many.positive, default=300, help="engine steps with clients and faults (300)")
    parser.add_argument("--ranks", type=_ranks, default=(1, 2, 3, 4), help="numbers of ranks: 2, or 1..4 (the default)")
    parser.add_argument(
        "--faults", type=_faults, default=FAULTS, help=f"all (the default), none, or some of {','.join(FAULTS)}"
    )
    parser.add_argument("--canary", default="", choices=["", *pl.CANARIES], help="switch a known mistake on")
    parser.add_argument("--jobs", type=many.positive, default=os.cpu_count() or 1, help="processes (one for each core)")
    parser.add_argument(
        "--save", type=Path, help="write the log of the first seed that fails, or of the last: .db or .jsonl"
    )
    parser.add_argument("--plan", type=Path, help="play a saved plan instead of seeds")
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="do not look for a smaller run that fails"
    )
    parser.add_argument("--max-failures", type=many.positive, default=SHOWN_FAILURES, help="stop after so many (5)")
    options = parser.parse_args()
    if options.save is not None and options.save.exists():
        parser.error(f"{options.save} exists; a log is never overwritten")
    if options.plan is not None and not options.plan.is_file():
        parser.error(f"{options.plan} is not a file")
    return options


def _ranks(text: str) -> tuple[int, ...]:
    first, _, last = text.partition("..")
    ranks = tuple(range(int(first), int(last or first) + 1))
    if not ranks or ranks[0] < 1:
        raise argparse.ArgumentTypeError(f"{text} names no number of ranks; write 2, or 1..4")
    return ranks


def _faults(text: str) -> tuple[str, ...]:
    from tools.sim.plan import FAULTS

    if text == "all":
        return FAULTS
    if text == "none":
        return ()
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown faults {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
