"""The settings: what `parse` takes, what it refuses, and that one line names every problem."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ledger.errors import SettingsError
from ledger.settings import PASSTHROUGH, SETTINGS, UPSTREAM_KEYS, parse


def refusal(extra_config: dict[str, Any]) -> str:
    with pytest.raises(SettingsError) as refused:
        parse(extra_config)
    message = str(refused.value)
    assert message.startswith("kv_connector_extra_config: ")
    assert "\n" not in message
    return message.removeprefix("kv_connector_extra_config: ")


def test_without_settings_the_defaults_of_the_table_hold():
    settings = parse({})
    assert {row.name: getattr(settings, row.name) for row in SETTINGS} == {row.name: row.default for row in SETTINGS}
    assert settings.changed() == {}


def test_the_default_of_every_row_is_a_value_that_it_takes():
    assert parse({row.name: row.default for row in SETTINGS}) == parse({})


def test_keys_of_upstreams_connectors_pass():
    assert parse(dict.fromkeys(UPSTREAM_KEYS, "anything")) == parse({})


def test_all_problems_are_listed_at_once():
    message = refusal({"stall_suspect_s": "soon", "flush_interval_ms": 0, "no_such_thing_at_all": 1})
    assert message.split("; ") == [
        "stall_suspect_s must be a finite number, not 'soon'",
        "flush_interval_ms must be at least 1, not 0",
        "unknown setting 'no_such_thing_at_all': if another component reads it, list it in 'passthrough_keys'",
    ]


@pytest.mark.parametrize(
    ("typed", "meant"), [("ledger_pth", "ledger_path"), ("load_asinc", "load_async"), ("Evidence", "evidence")]
)
def test_a_misspelt_key_is_asked_for(typed: str, meant: str):
    assert refusal({typed: True}) == f"unknown setting '{typed}': did you mean '{meant}'?"


def test_keys_that_somebody_else_reads_pass_when_they_are_listed():
    assert parse({PASSTHROUGH: ["theirs"], "theirs": {"any": "thing"}}) == parse({})
    assert refusal({PASSTHROUGH: "theirs"}) == "passthrough_keys must be a list of keys, not 'theirs'"


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.minimum is not None], ids=lambda row: row.name)
def test_both_bounds_are_included_and_nothing_beyond_them(row: Any):
    step = type(row.default)(1)
    assert getattr(parse({row.name: type(row.default)(row.minimum)}), row.name) == row.minimum
    assert f"{row.name} must be at least" in refusal({row.name: type(row.default)(row.minimum) - step})
    if row.maximum is not None:
        assert getattr(parse({row.name: type(row.default)(row.maximum)}), row.name) == row.maximum
        assert f"{row.name} must be at most" in refusal({row.name: type(row.default)(row.maximum) + step})


@pytest.mark.parametrize("row", [row for row in SETTINGS if isinstance(row.default, float)], ids=lambda row: row.name)
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "true", "null"])
def test_a_number_is_a_finite_one(row: Any, text: str):
    # As vLLM reads them: Python's JSON takes these for numbers.
    assert refusal(json.loads(f'{{"{row.name}": {text}}}')).startswith(f"{row.name} must be a finite number, not ")


def test_a_whole_number_is_taken_for_a_number_and_not_the_other_way_round():
    assert parse({"stall_suspect_s": 5}).stall_suspect_s == 5.0
    assert refusal({"flush_interval_ms": 5.0}) == "flush_interval_ms must be a whole number, not 5.0"
    assert refusal({"flush_interval_ms": True}) == "flush_interval_ms must be a whole number, not True"


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.choices], ids=lambda row: row.name)
def test_only_the_choices_of_a_setting_are_taken(row: Any):
    for choice in row.choices:
        assert getattr(parse({row.name: choice}), row.name) == choice
    assert refusal({row.name: "other"}) == f"{row.name} must be one of {', '.join(row.choices)}, not 'other'"


def test_a_log_needs_a_folder():
    assert refusal({"ledger_path": ""}) == "ledger_path must not be empty; leave it out for 'kvledger-logs'"


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:5600", "ipc:///run/kvledger", ""])
def test_evidence_goes_over_tcp_or_a_socket_file(address: str):
    assert parse({"evidence_address": address}).evidence_address == address


@pytest.mark.parametrize("address", ["10.0.0.1:5600", "udp://10.0.0.1:5600", "inproc://x"])
def test_evidence_goes_nowhere_else(address: str):
    problem = f"evidence_address must begin with tcp:// or ipc://, not {address!r}"
    assert refusal({"evidence_address": address}) == problem


def test_an_address_names_a_place():
    assert refusal({"evidence_address": "tcp://"}) == "evidence_address names no place after 'tcp://'"


def test_a_failure_log_that_can_be_no_file_is_refused_before_the_engine_starts(tmp_path: Path):
    from connector.runtime.runtime import open_ledger

    for path, problem in ((tmp_path, "is a folder"), (tmp_path / "none" / "log", "does not exist")):
        settings = parse({"failure_log": str(path), "ledger_path": str(tmp_path / "logs")})
        with pytest.raises(SettingsError, match=f"^failure_log: .*{problem}"):
            open_ledger(SimpleNamespace(), SimpleNamespace(), "KVLedgerStoreConnector", settings)
    assert list(tmp_path.iterdir()) == []
