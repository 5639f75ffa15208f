"""What the ledger costs the engine: CPU time per step of vLLM's scheduler, with upstream's connector and with ours.

Both run the same requests in one process, in turns of a few steps, so that whatever else the machine does falls on
both. Ours writes its log to disk meanwhile, on its own thread. Counted is the CPU time of the thread that steps; the
model, which takes milliseconds a step in a real engine, is left out, so the ratio is the worst case.

    python tools/bench/step_cost.py [--steps 20000] [--rounds 5] [--events 10000,1000000]

`--events` also measures the cost of a step at these lengths of the log, to show that it does not grow.

Bias: written by the authors of one of the two. The work that upstream does in both is left as it is.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from connector.store.metadata import JobReport
from ledger import events as ev
from tools.plain_scheduler import OURS, UPSTREAM, PlainScheduler, jobs_of

TURN_STEPS = 50
REQUESTS = 10
PROMPT_TOKENS = 200
OUTPUT_TOKENS = 100


class Side:
    """One scheduler under the workload.

    Ten requests at a time, each job reported in the step after it was given out.
    """

    def __init__(self, connector: str) -> None:
        self.plain = PlainScheduler(connector)
        self._draw = random.Random(0)
        self._requests = 0
        self._jobs: list[int] = []
        self.cpu_ns = 0
        self.steps = 0

    def step(self) -> int:
        """Run one step and return the CPU time of its scheduler work in nanoseconds."""
        plain = self.plain
        scheduler = plain.scheduler
        while len(scheduler.running) + len(scheduler.waiting) < REQUESTS:
            prompt = [self._draw.randrange(3, 500) for _ in range(PROMPT_TOKENS)]
            plain.add(f"request-{self._requests}", prompt, OUTPUT_TOKENS)
            self._requests += 1
        started_ns = time.thread_time_ns()
        output = plain.schedule()
        scheduled_ns = time.thread_time_ns()
        reports = plain.reports([JobReport(job, 0, "stored") for job in self._jobs])
        self._jobs = jobs_of(output)
        updating_ns = time.thread_time_ns()
        plain.update(output, kv_connector_worker_meta=reports)
        return (scheduled_ns - started_ns) + (time.thread_time_ns() - updating_ns)

    def turn(self) -> None:
        """Run one turn and add it up."""
        for _ in range(TURN_STEPS):
            self.cpu_ns += self.step()
        self.steps += TURN_STEPS

    @property
    def events(self) -> int:
        """Events in the log so far."""
        return self.plain.connector.ledger.log.last_seq


def compare(steps: int) -> tuple[float, float, int]:
    """Return CPU microseconds per step of upstream's and of our side, and how many events ours appended."""
    upstream, ours = Side(UPSTREAM), Side(OURS)
    for side in (upstream, ours):  # caches, allocators and first calls
        side.turn()
        side.cpu_ns = side.steps = 0
    gc.collect()
    gc.freeze()  # as vLLM's engine does after its start
    for turn in range(steps // TURN_STEPS):
        for side in (upstream, ours) if turn % 2 else (ours, upstream):
            side.turn()
    gc.unfreeze()
    events = ours.events
    result = upstream.cpu_ns / upstream.steps / 1e3, ours.cpu_ns / ours.steps / 1e3, events
    upstream.plain.close()
    ours.plain.close()
    return result


def fill(side: Side, length: int) -> None:
    """Let a side's log grow to `length` events: requests that come and go. The writer keeps up."""
    ledger = side.plain.connector.ledger
    while side.events < length:
        for number in range(500):
            ledger.record(ev.RequestQueued, request=f"filler-{number}", generation=1)
            ledger.record(ev.RequestAborted, request=f"filler-{number}", generation=1, was="queued")
        while ledger.log.queued_events > 5_000:
            time.sleep(0.005)


def growth(lengths: list[int]) -> None:
    """Print the cost of a step of ours, relative to upstream's measured beside it, at each length of the log."""
    upstream, ours = Side(UPSTREAM), Side(OURS)
    for side in (upstream, ours):
        side.turn()
    gc.collect()
    gc.freeze()
    for length in lengths:
        fill(ours, length)
        for side in (upstream, ours):
            side.cpu_ns = side.steps = 0
        for turn in range(100):
            for side in (upstream, ours) if turn % 2 else (ours, upstream):
                side.turn()
        ratio = (ours.cpu_ns / ours.steps) / (upstream.cpu_ns / upstream.steps)
        print(
            f"at {ours.events:>9,} events: {ours.cpu_ns / ours.steps / 1e3:6.2f} us a step, ratio {ratio:.3f}",
            flush=True,
        )
    upstream.plain.close()
    ours.plain.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of each side in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--events", default="", help="comma-separated lengths of the log at which to measure")
    arguments = parser.parse_args()
    ratios = []
    for round_ in range(arguments.rounds):
        upstream_us, ours_us, events = compare(arguments.steps)
        ratios.append(ours_us / upstream_us)
        print(
            f"{round_ + 1}: upstream {upstream_us:6.2f} us, ours {ours_us:6.2f} us a step, ratio {ratios[-1]:.3f} "
            f"({events:,} events)",
            flush=True,
        )
    if ratios:
        print(f"CPU time per step, ours to upstream: {statistics.median(ratios):.3f}, median of {len(ratios)} rounds")
    if arguments.events:
        growth([int(length) for length in arguments.events.split(",")])


if __name__ == "__main__":
    main()
