"""The schema: one source, revisions that build it, and files that are brought up to date and never back."""

import re
import shutil
import sqlite3
import subprocess
import sys

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from ledger.errors import FileNewer
from ledger.file import migrate, schema, sqlite
from ledger.file.read import open_log
from tests.support.log_files import ROOT, closed_log, contents

LINES = {"log": migrate.LOG, "sealed": migrate.SEALED}


def made(path, target=migrate.LOG):
    migrate.create(path)
    migrate.upgrade(path, target)
    return path


def script() -> ScriptDirectory:
    return ScriptDirectory.from_config(migrate.config())


def belongs_to_a_log(item, name, kind, reflected, compared) -> bool:
    """Leave out what only a sealed file has."""
    if kind == "index":
        return name not in {index.name for index in schema.INDEXES}
    return kind != "table" or name not in schema.sealed.tables


@pytest.mark.parametrize("line", LINES)
def test_revisions_build_what_the_schema_says(tmp_path, line):
    path = made(tmp_path / "a.db", LINES[line])
    metadata = [schema.log, schema.sealed] if line == "sealed" else schema.log
    options = {} if line == "sealed" else {"include_object": belongs_to_a_log}
    with migrate.connect(path).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, **options})
        assert compare_metadata(context, metadata) == []


def test_the_comparison_sees_a_column_that_revisions_lack(tmp_path):
    path = made(tmp_path / "a.db")
    more = sa.MetaData()
    for table in schema.log.tables.values():
        table.to_metadata(more)
    more.tables["events"].append_column(sa.Column("mood", sa.Text))
    with migrate.connect(path).connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": belongs_to_a_log})
        assert [change[0] for change in compare_metadata(context, more)] == ["add_column"]


def statements(path) -> dict[str, str]:
    """What SQLite keeps of the schema: the things that Alembic does not compare are in it, too."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL AND name != 'alembic_version'")
    found = {name: re.sub(r"\s+", " ", sql) for name, sql in rows}
    connection.close()
    return found


def test_revisions_and_schema_make_the_same_file(tmp_path):
    by_revisions = made(tmp_path / "a.db", migrate.SEALED)
    by_schema = tmp_path / "b.db"
    engine = sa.create_engine(f"sqlite:///{by_schema}")
    schema.log.create_all(engine)
    schema.sealed.create_all(engine)
    engine.dispose()
    assert statements(by_revisions) == statements(by_schema)
    assert set(schema.TRIGGERS) <= set(statements(by_revisions))


def test_the_reader_knows_every_revision():
    assert {*sqlite.LOG_REVISIONS, *sqlite.SEALED_REVISIONS} == migrate.known_revisions()


@pytest.mark.parametrize("revision", sorted(migrate.known_revisions()))
def test_a_file_of_any_older_revision_is_brought_up_to_date(tmp_path, revision):
    path = tmp_path / "a.db"
    migrate.create(path)
    line = revision.partition("_")[0]
    migrate.upgrade(path, (revision,))
    migrate.upgrade(path, LINES[line])
    heads = {head for head in script().get_heads() if line == "sealed" or head.startswith("log_")}
    assert set(migrate.current_revision(path)) == heads


def test_an_upgrade_changes_no_event(tmp_path):
    path = closed_log(tmp_path / "a.db", 100)
    with open_log(path) as log:
        before = [page.rows for page in log.pages()]
    migrate.upgrade(path, migrate.SEALED)
    with open_log(path) as log:
        assert [page.rows for page in log.pages()] == before


def test_a_file_that_is_up_to_date_is_left_alone(tmp_path):
    path = closed_log(tmp_path / "a.db", 100)
    before = contents(tmp_path)
    migrate.upgrade(path)
    assert contents(tmp_path) == before


def test_a_newer_file_is_not_touched(tmp_path):
    path = closed_log(tmp_path / "a.db", 100)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = 'log_9999'")
    connection.commit()
    connection.close()
    before = contents(tmp_path)
    with pytest.raises(FileNewer, match="log_9999") as refused:
        migrate.upgrade(path)
    assert "\n" not in str(refused.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("revision", sorted(migrate.known_revisions()))
def test_no_revision_can_be_taken_back(revision):
    with pytest.raises(NotImplementedError, match="evidence"):
        script().get_revision(revision).module.downgrade()


def test_a_file_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    # A revision that fails at its end stands in for a disk that is full there.
    def fail(*_arguments) -> None:
        raise OSError("no more")

    monkeypatch.setattr(migrate, "_run", fail)
    with pytest.raises(OSError, match="no more"):
        migrate.create(tmp_path / "a.db")
    assert contents(tmp_path) == {}


def test_a_file_of_ours_carries_our_mark(tmp_path):
    assert made(tmp_path / "a.db").read_bytes()[68:72] == b"kvLg"


def test_revisions_are_found_in_a_checkout_and_in_an_installed_package(tmp_path, monkeypatch):
    assert migrate.scripts_path() == ROOT / "migrations"
    package = tmp_path / "100% site" / "ledger"
    package.mkdir(parents=True)
    shutil.copytree(ROOT / "migrations", package / "migrations")
    monkeypatch.setattr(migrate, "__file__", str(package / "file" / "migrate.py"))
    assert migrate.scripts_path() == package / "migrations"
    made(tmp_path / "a.db", migrate.SEALED)


def test_a_developer_s_command_finds_nothing_to_add(tmp_path):
    path = made(tmp_path / "a.db", migrate.SEALED)
    command = ["-c", "migrations/alembic.ini", "-x", f"file={path}", "check"]
    done = subprocess.run(
        [sys.executable, "-m", "alembic", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "No new upgrade operations detected" in done.stdout


def test_a_developer_s_command_without_a_file_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "-c", "migrations/alembic.ini", "current"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "-x file=" in done.stderr
