"""What the arguments of a command name: a moment, a block, a store job.

This file knows click, and how such an argument is written.
"""

from typing import Any

import click

from ledger.replay.select import Moment


class MomentType(click.ParamType[Moment]):
    """A place in the log or a time."""

    name = "SEQ|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        """Return the moment that `value` names."""
        if isinstance(value, Moment):
            return value
        try:
            return Moment(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class BlockType(click.ParamType[tuple[int, int]]):
    """A block, as its group and number."""

    name = "G:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return the `(group, block)` that `value` names; a number alone is a block of group 0."""
        group, colon, block = str(value).rpartition(":")
        try:
            return int(group) if colon else 0, int(block)
        except ValueError:
            self.fail(f"'{value}' is no block: write its group and number, e.g. 0:17", param, ctx)


class JobType(click.ParamType[tuple[str, int]]):
    """A store job, with its file where several have a job of that number."""

    name = "[FILE:]JOB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return the file and the job that `value` names; the file is empty if it names a job alone."""
        file, _, job = str(value).rpartition(":")
        if not job.isdecimal() or len(job) > 18:
            self.fail(f"'{value}' is no store job: write its number, or with its file as FILE:NUMBER", param, ctx)
        return file, int(job)
