"""Writes the pages of docs/ that have their source in the code; with --check, fails when a page and the code disagree.

One function for each page, from text and tables to Markdown. Events are read from their source, because their
docstrings are their documentation and the headings of their files are the headings of the page.
"""

import argparse
import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the checkout this file stands in, whatever is installed

import ledger.cli.commands
import ledger.codes
import ledger.demo
import ledger.events
import ledger.settings

HEADING = re.compile(r"^# --- (?P<title>.+?) -+$")
EVENT_FILES = ("requests", "store", "pd", "ownership", "workers", "log")
"""The files of ledger/events/ that hold kinds, in the order of the page."""

ATTRIBUTE = re.compile(r"^(?P<names>[a-z_]+(?:, [a-z_]+)*): (?P<text>.*)$")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def generated(title: str, source: str, *parts: str) -> str:
    """A page with its title and the line that says where to edit it."""
    note = f"<!-- Generated from {source} by `make docs`. Edit that, not this. -->"
    return "\n\n".join([f"# {title}", note, *(part.strip("\n") for part in parts if part.strip())]) + "\n"


def split_attributes(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring's prose, and the meaning of each field that its `Attributes:` section names."""
    prose, _, section = docstring.partition("\nAttributes:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        text = line.strip()
        match = ATTRIBUTE.match(text) if line.startswith("    ") and not line.startswith("     ") else None
        if match:
            names = match["names"].split(", ")
            text = match["text"]
        for name in names:
            meanings[name] = f"{meanings.get(name, '')} {text}".strip()
    return prose.strip(), meanings


class StructSource:
    """What the source of one msgspec struct says: kind, prose and fields."""

    def __init__(self, node: ast.ClassDef) -> None:
        docstring = ast.get_docstring(node)
        if docstring is None:
            raise SystemExit(f"docs: {node.name} has no docstring, and its docstring is its documentation")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        tag = keywords.get("tag")
        self.name = str(ast.literal_eval(tag)) if tag is not None else node.name
        self.is_kind = tag is not None
        self.line = node.lineno
        self.is_evidence = False
        self.prose, self.meanings = split_attributes(docstring)
        self.fields: list[tuple[str, str, str]] = []
        for item in node.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            if "ClassVar" in ast.unparse(item.annotation):
                self.is_evidence |= item.target.id == "evidence" and ast.unparse(item.value or item.target) == "True"
                continue
            default = ast.unparse(item.value) if item.value is not None else ""
            self.fields.append((item.target.id, ast.unparse(item.annotation), default))
        unknown = set(self.meanings) - {name for name, _, _ in self.fields}
        if unknown:
            raise SystemExit(f"docs: {node.name} describes fields it does not have: {', '.join(sorted(unknown))}")

    def markdown(self, level: int) -> str:
        """The section of a page that describes this struct."""
        parts = [f"{'#' * level} `{self.name}`" if self.is_kind else f"{'#' * level} {self.name}"]
        if self.is_evidence:
            parts.append("*Evidence of a worker; it never changes the scheduler's state.*")
        parts.append(self.prose)
        if self.fields:
            rows = [
                (f"`{name}`", f"`{kind}`", f"`{default}`" if default else "", self.meanings.get(name, ""))
                for name, kind, default in self.fields
            ]
            parts.append(table(["field", "type", "default", "meaning"], rows))
        return "\n\n".join(parts)


def events_page() -> str:
    """docs/events.md: every kind of event, under the headings of the files in ledger/events/."""
    room = ROOT / "ledger/events"
    base = ast.parse((room / "base.py").read_text())
    envelope = next(StructSource(node) for node in base.body if isinstance(node, ast.ClassDef) and node.name == "Event")
    parts = [
        ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "",
        envelope.markdown(2).replace(f"## {envelope.name}", "## The envelope", 1),
    ]
    for name in EVENT_FILES:
        parts += _kinds((room / f"{name}.py").read_text())
    left_out = {kind.__module__.rpartition(".")[2] for kind in ledger.events.KINDS.values()} - set(EVENT_FILES)
    if left_out:
        raise SystemExit(f"docs: {', '.join(sorted(left_out))} in ledger/events/ holds kinds and is not on the page")
    return generated("Events", "ledger/events/", *parts)


def _kinds(text: str) -> Iterator[str]:
    """The sections of one file of kinds: its headings, and its structs below them."""
    headings = [
        (number, match["title"])
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := HEADING.match(line))
    ]
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        struct = StructSource(node)
        while headings and headings[0][0] < struct.line:
            title = headings.pop(0)[1]
            yield f"## {title[0].upper()}{title[1:]}"
        yield struct.markdown(3)


def settings_page() -> str:
    """docs/settings.md: every key of kv_connector_extra_config that is ours, and the upstream keys that pass."""
    rows: list[tuple[str, str, str, str]] = []
    for row in ledger.settings.SETTINGS:
        default = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
        limits = " or ".join(f"`{choice}`" for choice in row.choices)
        if row.minimum is not None and row.maximum is not None:
            limits = f"{row.minimum:g} to {row.maximum:g}"
        elif row.minimum is not None:
            limits = f"at least {row.minimum:g}"
        elif row.required:
            limits = "not empty"
        elif row.schemes:
            limits = f"begins with {' or '.join(f'`{scheme}`' for scheme in row.schemes)}, or empty"
        unit = f" {row.unit}" if row.unit else ""
        rows.append((f"`{row.name}`", f"`{default}`{unit}" if default else "empty", limits, row.help))
    upstream = ", ".join(f"`{key}`" for key in sorted(ledger.settings.UPSTREAM_KEYS))
    return generated(
        "Settings",
        "ledger/settings.py",
        "These stand in `kv_connector_extra_config` of vLLM's `--kv-transfer-config`. An unknown key or a value that "
        "cannot be ends the start, with one line that lists every problem.",
        table(["setting", "default", "allowed", "meaning"], rows),
        "## Keys of vLLM's own connectors",
        f"These are read by vLLM's Mooncake connectors and keep their meaning: {upstream}.",
        f"`{ledger.settings.PASSTHROUGH}` lists further keys that another component reads; they are not checked.",
    )


def codes_page() -> str:
    """docs/codes.md: the stable codes, the stages, and which raw errors become which code."""
    codes = ledger.codes
    meanings = [
        (f"`{row.code}`", "yes" if row.retryable else "no", row.meaning, row.action) for row in codes.CODES.values()
    ]

    def numbers(of: Mapping[int, tuple[str, ledger.codes.KVCacheErrorCode]]) -> str:
        return table(
            ["raw", "its name there", "code"],
            [(f"`{number}`", f"`{name}`", f"`{code}`") for number, (name, code) in of.items()],
        )

    return generated(
        "Codes",
        "ledger/codes.py",
        ast.get_docstring(ast.parse((ROOT / "ledger/codes.py").read_text())) or "",
        table(["code", "try again", "what happened", "what to do"], meanings),
        "## Stages",
        f"Where it failed: {', '.join(f'`{stage}`' for stage in codes.Stage)}.",
        "## Mooncake",
        numbers(codes.MOONCAKE),
        "## HTTP-like",
        numbers(codes.HTTP),
        "## errno",
        # By name only: the numbers are those of the system that the page was made on.
        table(["raw", "code"], [(f"`{name}`", f"`{code}`") for name, code in codes.ERRNO.values()]),
        "## Exceptions",
        "By the name of the class; a subclass means what its nearest base means.",
        table(["raw", "code"], [(f"`{name}`", f"`{code}`") for name, code in codes.EXCEPTIONS.items()]),
    )


def cli_page() -> str:
    """docs/cli.md: the help of every command, as `--help` prints it."""

    def sections(command: click.Command, parents: list[click.Context]) -> Iterator[str]:
        parent = parents[-1] if parents else None
        name = "kvledger" if parent is None else command.name
        # Resilient: parses nothing, so that an argument that is missing does not matter.
        context = command.make_context(name, [], parent, resilient_parsing=True, terminal_width=80)
        yield f"## {context.command_path}\n\n```\n{command.get_help(context).rstrip()}\n```"
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                if child is not None and not child.hidden:
                    yield from sections(child, [*parents, context])

    return generated("Command line", "ledger/cli/commands.py", *sections(ledger.cli.commands.cli, []))


def findings_page() -> str:
    """docs/findings.md: what `kvledger replay` finds, from the docstrings of the verdicts."""
    general = ast.get_docstring(ast.parse((ROOT / "ledger/verdicts/__init__.py").read_text())) or ""
    owed = general.partition("What every verdict owes its reader:")[2].partition("This folder knows")[0]
    parts = ["What each kind of finding means, and when it is proven. Every verdict keeps to this:", owed]
    for path in sorted((ROOT / "ledger/verdicts").glob("[!_]*.py")):
        heading, _, prose = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
        if path.stem in {"base", "history"}:  # what verdicts are made of
            continue
        kinds, _, what = heading.partition(": ") if heading.startswith("`") else (f"`{path.stem}`", "", heading)
        parts += [f"## {kinds}", f"{what[:1].upper()}{what[1:]}", _tables_kept(prose)]
    return generated("Findings", "the verdicts in ledger/verdicts/", *parts)


def _tables_kept(prose: str) -> str:
    """Prose in which lines that are indented stay as they are: they are small tables of words and meanings."""
    paragraphs = prose.split("\n\n")
    return "\n\n".join(f"```\n{each}\n```" if each.startswith("    ") else each for each in paragraphs)


def readme() -> str:
    """README.md with what `kvledger demo` prints in its place; the rest of the file is written by hand."""
    text = (ROOT / "README.md").read_text()
    if not ledger.demo.incidents():
        return text
    shown = subprocess.run(
        [sys.executable, "-m", "ledger", "demo"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    ).stdout
    # As `make demo` shows it, whose command is not on the PATH.
    shown = shown.replace(f"{ROOT}/", "").replace("\n  kvledger ", "\n  .venv-demo/bin/kvledger ")
    # The first incident of the first log tells what a report is like; the whole is one `make demo` away.
    opening = "This is what"
    shown = opening + shown.split(opening)[1].rstrip()
    rest = re.search(r"\n(?:2\. |Open at the end)", shown)
    if rest:
        shown = f"{shown[: rest.start()]}\n[...]\n\nType next:{shown.partition('Type next:')[2]}"
    before, begin, rest = text.partition("<!-- replay-of-the-demo: begin -->\n")
    _, end, after = rest.partition("<!-- replay-of-the-demo: end -->\n")
    if not begin or not end:
        raise SystemExit("docs: README.md has lost the marks between which the replay of the demo stands")
    return f"{before}{begin}\n```\n$ make demo\n{shown.strip()}\n```\n\n{end}{after}"


PAGES: dict[str, Callable[[], str]] = {
    "docs/events.md": events_page,
    "docs/settings.md": settings_page,
    "docs/codes.md": codes_page,
    "docs/cli.md": cli_page,
    "docs/findings.md": findings_page,
    "README.md": readme,
}


def main() -> int:
    """Exit status: 0 the pages are right, 1 --check found one that is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page and the code disagree")
    check = parser.parse_args().check
    stale = 0
    for name, page in PAGES.items():
        path = ROOT / name
        old = path.read_text() if path.exists() else ""
        new = page()
        if old == new:
            continue
        stale += 1
        if check:
            sys.stdout.writelines(
                difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "from the code")
            )
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new)
            print(f"wrote {name}")
    if check and stale:
        print(f"docs: {stale} generated page(s) and the code disagree. Run `make docs` and commit.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
