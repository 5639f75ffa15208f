"""How times, sizes, lists and ranges are said to an operator. Pure text; this file knows block lists and nothing else.

Plain ASCII words that read well aloud and in a log collector. All times are UTC, because an incident's logs come from
more than one place.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from ledger.blocks import Blocks, Ranges


def clock(ts_ns: int) -> str:
    """Return a wall-clock time as `14:03:05.123`."""
    return datetime.fromtimestamp(ts_ns // 1_000_000 / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]


def timestamp(ts_ns: int) -> str:
    """Return a wall-clock time as `2026-01-31T14:03:05.123Z`."""
    return datetime.fromtimestamp(ts_ns // 1_000_000 / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def span(duration_ns: int) -> str:
    """Return a duration with the unit that fits it: `850 us`, `12.3 ms`, `4.56 s`, `3 min 05 s`, `2 h 03 min`.

    One below zero, as a wall clock that was set may give, keeps its sign.
    """
    if duration_ns < 0:
        return f"-{span(-duration_ns)}"
    seconds = duration_ns / 1e9
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def size(number_bytes: int) -> str:
    """Return a size in binary units: `812 B`, `3.4 MiB`."""
    value = float(number_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def file(path: Path | str) -> str:
    """Return a file's name or path as text that every encoding takes: a name may be bytes that are no UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()


_STEERING = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {number: f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" for number in _STEERING}
_ESCAPES.update({ord("\n"): r"\n", ord("\r"): r"\r", ord("\t"): r"\t"})


def escaped(text: str) -> str:
    r"""Return one line of text without what steers a terminal, ends a line or turns its direction.

    Ids come from clients, and names of files from anywhere. Each such character is shown by its number, `\x1b`.
    """
    return text.translate(_ESCAPES)


LONG_WORD = 256
"""Characters of the longest word that people are shown whole; paths, keys and what vLLM makes up as ids are shorter."""

KEPT_OF_A_WORD = 40
"""Characters of a longer one that are shown of its begin, and of its end."""


def shown(text: str) -> str:
    """Return one line of text as people are shown it: escaped, and the middle of very long words left out.

    A client may send an id of 10 kB; its begin and its end tell it from others. Data have it whole.
    """
    return _LONG_WORD.sub(lambda word: f"{word[0][:KEPT_OF_A_WORD]}...{word[0][-KEPT_OF_A_WORD:]}", escaped(text))


_LONG_WORD = re.compile(rf"\S{{{LONG_WORD + 1},}}")


def plural(number: int, noun: str, many: str = "") -> str:
    """Return `1 block`, `2 blocks`."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def lost(number: int) -> str:
    """Return how many events a gap stands for: 0 means that nobody could count them."""
    return plural(number, "event") if number else "an unknown number of events"


def ranges(runs: Ranges, limit: int = 8) -> str:
    """Return `1, 4-7`, the first `limit` runs of it."""
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:limit])
    return text if len(runs) <= limit else f"{text}, ..."


def ranks(numbers: Iterable[int]) -> str:
    """Return `rank 1` or `ranks 1-3, 7`."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ranges(tuple((first, last) for first, last in runs))
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def rank_runs(runs: Ranges) -> str:
    """Return `rank 1` or `ranks 1-3, 7`, of ranks as an event holds them."""
    return f"{'rank' if count_of(runs) == 1 else 'ranks'} {ranges(runs)}"


def count_of(runs: Ranges) -> int:
    """Return how many numbers the runs name."""
    return sum(abs(last - first) + 1 for first, last in runs)


def blocks(named: Blocks, limit: int = 6) -> str:
    """Return `5-15`, or with several groups `5-15 (group 0); 3 (group 1)`, the first `limit` runs of each.

    Where no group is named it is group 0, as in the options of the command line: most engines have no other.
    """
    if len(named) == 1 and named[0][0] == 0:
        return _sorted_ranges(named[0][1], limit)
    return "; ".join(f"{_sorted_ranges(runs, limit)} (group {group})" for group, runs in named) or "none"


def _sorted_ranges(runs: Ranges, limit: int) -> str:
    """Return the runs of blocks, which stand in the order of a table, in the order of their numbers."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted((min(run), max(run)) for run in runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return ranges(tuple(merged), limit)


def these_blocks(named: Blocks, limit: int = 6) -> str:
    """Return `block 3`, `blocks 5-15` or `blocks 5-15 (group 0); 3 (group 1)`."""
    one = len(named) == 1 and count_of(named[0][1]) == 1
    return f"{'block' if one else 'blocks'} {blocks(named, limit)}"


def call(op: str, transfer: str, rank: int) -> str:
    """Return what a call is called: `put #7 of rank 0`.

    A worker numbers its calls to the store, `0-7`. A transfer between engines has a name: `pull of x1 by rank 0`.
    """
    number = _number(transfer, rank)
    return f"{op} #{number} of rank {rank}" if number else f"{op} of {transfer} by rank {rank}"


def call_of_its_rank(op: str, transfer: str, rank: int) -> str:
    """Return what a call is called where its rank was just named: `put #7`, `pull of x1`."""
    number = _number(transfer, rank)
    return f"{op} #{number}" if number else f"{op} of {transfer}"


def _number(transfer: str, rank: int) -> str:
    lead, dash, number = transfer.partition("-")
    return number if dash and lead == str(rank) and number.isdigit() else ""


def was(named: Blocks) -> str:
    """Return the verb that goes with `these_blocks`: `was` for one block, `were` for more."""
    return "was" if len(named) == 1 and count_of(named[0][1]) == 1 else "were"


def request(name: str, generation: int = 1) -> str:
    """Return `request R`, with its generation if it was preempted before."""
    return f"request {name}" if generation <= 1 else f"request {name} (generation {generation})"


def listed(names: Iterable[object], limit: int = 6) -> str:
    """Return `a, b, c and 4 more`."""
    every = [str(name) for name in names]
    if len(every) <= limit:
        return ", ".join(every)
    return f"{', '.join(every[: limit - 1])} and {len(every) - limit + 1} more"


def failure(code: str, raw: str, exception: str, stage: str = "") -> str:
    """Return why something failed: `BLOCK_NOT_FOUND (raw -704), TimeoutError, at STORE_GET`; empty if not known."""
    parts = [f"{code} (raw {raw})" if code and raw else code or (f"raw {raw}" if raw else "")]
    parts += [exception, f"at {stage}" if stage else ""]
    return ", ".join(part for part in parts if part)


def because(code: str, raw: str, exception: str, stage: str = "") -> str:
    """Return why something failed, as the end of a sentence: `: BLOCK_NOT_FOUND (raw -704)`; empty if not known."""
    why = failure(code, raw, exception, stage)
    return f": {why}" if why else ""
