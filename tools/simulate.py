"""Simulate engines: vLLM's real schedulers with the plugin attached, and surroundings that misbehave.

    python tools/simulate.py store --seeds 0:2000                   # one engine, its clients, workers and store
    python tools/simulate.py pd --seeds 0:2000                      # prefills, a decode, and the network between them
    python tools/simulate.py store --seeds 94 --save failed.db      # one seed again, and its log for `kvledger replay`
    python tools/simulate.py pd --seeds 45 --save logs              # the same, with a log for each engine
    python tools/simulate.py store --seeds 0:200 --canary pins-off  # a known mistake, which must be found
    python tools/simulate.py store --plan failed.plan.json          # a run that was made smaller

A seed is one run, the same on every machine. Of a run that fails, this prints seed, step and the last event, and makes
it smaller: the plan at the end still fails. Exit status: 0 if all is well (with `--canary`: if it was found), 1 if not,
2 for wrong usage.
"""

import hashlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import msgspec

from tools.sim import many
from tools.sim.pd import plan as pd_plan
from tools.sim.plans import Plan
from tools.sim.store import plan as store_plan

if TYPE_CHECKING:
    from tools.sim.canary import Canary
    from tools.sim.result import Result

SLOWEST = 10
SHOWN_FAILURES = 5


class Simulator(NamedTuple):
    """One of the two simulators.

    Attributes:
        run: makes a run of a plan; takes `only`, `alter` and `keep_log`.
        canaries: the known mistakes by name.
    """

    run: Callable[..., Any]
    canaries: dict[str, "Canary"]


@lru_cache
def simulator(room: str) -> Simulator:
    """Return the simulator `store` or `pd`. It imports vLLM, which takes seconds."""
    from tools.sim.engines import quiet

    quiet()
    if room == "store":
        from tools.sim.store import canaries, run

        return Simulator(run.Run, dict(canaries.BY_NAME))
    logging.disable(logging.CRITICAL)  # asyncio would say that the tasks of a killed engine were cancelled
    from tools.sim.pd import canaries as pd_canaries
    from tools.sim.pd import run as pd_run

    return Simulator(pd_run.Run, dict(pd_canaries.BY_NAME))


class Options(NamedTuple):
    """What the command line says, the same for both simulators."""

    room: str
    seeds: range
    steps: int
    canary: str
    jobs: int
    save: Path | None
    plan: Path | None
    shrink: bool
    max_failures: int


def simulate(options: Options, plans: Sequence[Plan]) -> int:
    """Play plans, print what came of them, and return the exit status."""
    simulator(options.room)  # once, before the processes are forked
    started = time.perf_counter()
    results: list[Result] = []
    work = [(plan, options.canary) for plan in plans]
    for result in many.played(work, partial(_play_one, options.room), options.jobs):
        results.append(result)
        failures = sum(each.broken is not None for each in results)
        if result.broken is not None and failures >= (1 if options.canary else options.max_failures):
            break
    elapsed_s = time.perf_counter() - started
    results.sort(key=lambda result: result.seed)
    failed = [result for result in results if result.broken is not None]
    by_seed = {plan.seed: plan for plan in plans}
    for result in failed[:SHOWN_FAILURES]:
        _print_failure(result)
    if failed and options.shrink:
        _shrink(by_seed[failed[0].seed], failed[0], options)
    if options.save is not None and results:
        _save(by_seed[(failed[0] if failed else results[-1]).seed], options)
    _print_coverage(results)
    _print_slowest(results)
    _print_sum(results, options, elapsed_s)
    if options.canary:
        return _print_canary(options, results, failed)
    print("FAILED: " + _kinds(failed) if failed else "PASSED: every check held after every step of every seed.")
    return 1 if failed else 0


# --- running ----------------------------------------------------------------------------------------------------------


def _play_one(room: str, work: tuple[Plan, str]) -> Any:
    return _play(room, *work)


def _play(room: str, plan: Plan, canary: str, keep_log: bool = False) -> Any:
    simulated = simulator(room)
    if canary:
        mistake = simulated.canaries[canary]
        return simulated.run(plan, only=mistake.finds, keep_log=keep_log, alter=mistake.alter).play()
    return simulated.run(plan, keep_log=keep_log).play()


def _shrink(plan: Plan, result: "Result", options: Options) -> None:
    from tools.sim.shrink import shrink

    if result.broken is None:
        return
    kind = result.broken.kind

    def fails(smaller: Plan) -> bool:
        broken = _play(options.room, smaller, options.canary).broken
        return broken is not None and broken.kind == kind

    print(f"\nShrinking seed {plan.seed} ({len(plan.decisions)} decisions) ...", flush=True)
    smallest = shrink(plan, fails, result.broken.step)
    print(f"A run of {len(smallest.decisions)} decisions and {smallest.steps} steps still fails:")
    print(f"  {msgspec.json.encode(smallest.shape).decode()}")
    for decision in smallest.decisions:
        print(f"  {msgspec.json.encode(decision).decode()}")
    _print_failure(_play(options.room, smallest, options.canary))
    if options.save is not None:
        path = options.save.with_suffix(".plan.json")
        path.write_bytes(msgspec.json.encode(smallest))
        print(f"It is in {path}; run it again with --plan.")


def _save(plan: Plan, options: Options) -> None:
    """Play a plan again and write its log as the plugin's writer makes it, or as JSON lines; of P/D, one a engine."""
    save = options.save
    if save is None:
        return
    logs = _play(options.room, plan, options.canary, keep_log=True).lines
    if options.room == "store":
        ((engine, lines),) = logs.items()
        if save.suffix == ".db":
            many.write_log(lines, save, engine, plan.seed)
        else:
            save.write_bytes(b"\n".join(lines) + b"\n")
    else:
        save.mkdir(parents=True)
        for engine, lines in logs.items():
            many.write_log(lines, save / f"{engine}.db", engine, plan.seed)
    print(f"The log of seed {plan.seed} is in {save}.")


# --- printing ---------------------------------------------------------------------------------------------------------


def _print_failure(result: "Result") -> None:
    broken = result.broken
    if broken is not None:
        print(f"\nseed {result.seed}, step {broken.step}: {broken.kind}: {broken.detail}")
        print(f"  last event: {broken.event or 'none'}")


def _print_coverage(results: Iterable["Result"]) -> None:
    seen = Counter[str]()
    for result in results:
        seen.update(result.seen)
    codes = {what: seen.pop(what) for what in list(seen) if what.startswith("faults: code ")}
    if codes:
        seen[f"faults: code ({len(codes)} of {len(store_plan.CODES)} codes)"] = sum(codes.values())
    print("\nWhat happened:")
    for what, count in sorted(seen.items()):
        print(f"  {count:>10,}  {what}")


def _print_slowest(results: Iterable["Result"]) -> None:
    print(f"\nThe slowest {SLOWEST} seeds:")
    for result in sorted(results, key=lambda result: -result.cpu_s)[:SLOWEST]:
        took_ms = result.cpu_s * 1000
        print(f"  seed {result.seed:>6}  {took_ms:>7.0f} ms  {result.steps:>6,} steps  {result.events:>7,} events")


def _print_sum(results: Sequence["Result"], options: Options, elapsed_s: float) -> None:
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


def _print_canary(options: Options, results: Iterable["Result"], failed: Sequence["Result"]) -> int:
    mistake = simulator(options.room).canaries[options.canary]
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


def _kinds(failed: Iterable["Result"]) -> str:
    kinds = Counter(result.broken.kind for result in failed if result.broken is not None)
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())


# --- the command line -------------------------------------------------------------------------------------------------


class _Ranks(click.ParamType[tuple[int, ...]]):
    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        first, _, last = str(value).partition("..")
        last = last or first
        if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
            self.fail(f"{value} names no number of ranks; write 2, or 1..4", param, ctx)
        return tuple(range(int(first), int(last) + 1))


class _Faults(click.ParamType[tuple[str, ...]]):
    name = "faults"

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        kinds = {"all": self.known, "none": ()}.get(value, tuple(str(value).split(",")))
        unknown = [kind for kind in kinds if kind not in self.known]
        if unknown:
            self.fail(f"unknown faults {', '.join(unknown)}; there are {', '.join(self.known)}", param, ctx)
        return kinds


def _canary(ctx: click.Context, _: click.Parameter, value: str) -> str:
    known = simulator(ctx.command.name or "").canaries if value else {}
    if value and value not in known:
        raise click.BadParameter(f"there is no canary {value}; there are {', '.join(known)}")
    return value


def _new(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.exists():
        raise click.BadParameter(f"{value} exists; a log is never overwritten")
    return value


def _options(steps: int, save: str, faults: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of both simulators to a command."""
    cores = os.cpu_count() or 1
    positive = click.IntRange(1)
    existing = click.Path(exists=True, dir_okay=False, path_type=Path)
    options = [
        click.option("--seeds", type=many.Seeds(), default="0:200", show_default=True, help="A:B without B, or one."),
        click.option("--steps", type=positive, default=steps, show_default=True, help="Steps with clients and faults."),
        click.option(
            "--faults", type=_Faults(faults), default="all", help=f"all, none, or some of {','.join(faults)}."
        ),
        click.option("--canary", default="", callback=_canary, help="Switch a known mistake on; see its canaries.py."),
        click.option("--jobs", type=positive, default=cores, help="Processes; one for each core if not given."),
        click.option("--save", type=click.Path(path_type=Path), callback=_new, help=save),
        click.option("--plan", type=existing, help="Play a saved plan instead of seeds."),
        click.option("--shrink/--no-shrink", default=True, help="Look for a smaller run that fails, or do not."),
        click.option("--max-failures", type=positive, default=SHOWN_FAILURES, show_default=True, help="Stop then."),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _plans(options: Options, kind: type[Plan], draw: Callable[[int, int], Plan]) -> list[Plan]:
    if options.plan is not None:
        return [msgspec.json.decode(options.plan.read_bytes(), type=kind)]
    if options.canary:
        draw = simulator(options.room).canaries[options.canary].plan
    return [draw(seed, options.steps) for seed in options.seeds]


@click.group(help=__doc__.split("\n\n", 1)[0] if __doc__ else "")
def main() -> None:
    """Read the command line."""


@main.command("store")
@_options(300, "Write the log of the first seed that fails, or of the last: .db or .jsonl.", store_plan.FAULTS)
@click.option("--ranks", type=_Ranks(), default="1..4", show_default=True, help="Numbers of ranks: 2, or 1..4.")
def store(ranks: tuple[int, ...], faults: tuple[str, ...], **given: Any) -> None:
    """One engine: vLLM's real scheduler, and clients, workers and a store that misbehave."""
    options = Options("store", **given)
    sys.exit(simulate(options, _plans(options, store_plan.Plan, partial(store_plan.draw, ranks=ranks, faults=faults))))


@main.command("pd")
@_options(120, "A folder for the logs of the first seed that fails, or of the last.", pd_plan.FAULTS)
def pd(faults: tuple[str, ...], **given: Any) -> None:
    """P/D: prefills and a decode, real schedulers and workers, and a network that misbehaves."""
    options = Options("pd", **given)
    sys.exit(simulate(options, _plans(options, pd_plan.Plan, partial(pd_plan.draw, faults=faults))))


if __name__ == "__main__":
    main()
