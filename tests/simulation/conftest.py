"""What the simulated runs of this room share: silence, and the ten slowest seeds at the end."""

import logging

import pytest

played = []
"""Every result of a plain run, for the summary."""


@pytest.fixture(scope="package", autouse=True)
def _quiet():
    from tools.sim.engines import quiet

    loggers = [logging.getLogger(name) for name in ("vllm", "kvledger")]
    levels = [logger.level for logger in loggers]
    quiet()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)  # another room may come after this one in the same process


@pytest.fixture
def play():
    """Play a seed, or a plan, and remember the result for the summary."""
    from tools.sim.store import plan as pl
    from tools.sim.store.run import Run

    def play_one(plan, steps=300, **how):
        result = Run(pl.draw(plan, steps) if isinstance(plan, int) else plan, **how).play()
        played.append(result)
        return result

    return play_one


def pytest_terminal_summary(terminalreporter):
    """Say which seeds were slowest, and how fast they were all together."""
    if len(played) < 10:
        return
    steps, cpu_s = sum(result.steps for result in played), sum(result.cpu_s for result in played)
    terminalreporter.section("slowest simulated seeds")
    for result in sorted(played, key=lambda result: -result.cpu_s)[:10]:
        terminalreporter.write_line(f"seed {result.seed:>6}  {result.cpu_s:6.2f} s  {result.steps:>5} steps")
    terminalreporter.write_line(
        f"{len(played)} runs, {steps:,} engine steps, {steps / cpu_s:,.0f} steps per second of one processor"
    )
