"""The wheel installed alone, without vLLM, torch, Mooncake and ZeroMQ: what an engineer has on a laptop."""

import json
from pathlib import Path

import ledger
from tests.package.conftest import LightEnvironment

SERVING_STACK = ("vllm", "torch", "mooncake", "zmq")

IMPORT_ALL = """
import importlib, pkgutil, sys
import ledger
names = ["ledger"]
# Alembic runs the files of ledger.migrations by their path; they are no modules to import.
for module in pkgutil.walk_packages(ledger.__path__, "ledger."):
    if not module.name.startswith("ledger.migrations"):
        importlib.import_module(module.name)
        names.append(module.name)
print(len(names), *sorted({"vllm", "torch", "mooncake", "zmq", "connector"} & set(sys.modules)))
"""


def test_environment_is_light(light: LightEnvironment):
    look = f"import importlib.util as u; print([n for n in {SERVING_STACK!r} if u.find_spec(n)])"
    assert light.run("python", "-c", look).stdout.strip() == "[]"


def test_every_module_of_ledger_imports(light: LightEnvironment):
    done = light.run("python", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    count, *heavy = done.stdout.split()
    assert int(count) > 10
    assert heavy == []


def test_command_names_its_version(light: LightEnvironment):
    done = light.run("kvledger", "--version")
    assert done.returncode == 0, done.stderr
    assert ledger.__version__ in done.stdout


def test_command_lists_what_it_can_do(light: LightEnvironment):
    done = light.run("kvledger", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("replay", "seal", "browse", "demo"):
        assert command in done.stdout


def test_replay_names_the_rank_that_never_answered(light: LightEnvironment, incident: Path):
    done = light.run("kvledger", "replay", "--json", str(incident))
    assert done.returncode == 1, done.stderr
    first, *_ = json.loads(done.stdout)["findings"]
    assert first["kind"] == "stall"
    assert first["ranks"] == [1]


def test_a_trace_names_the_extra_that_it_needs(light: LightEnvironment, incident: Path, tmp_path: Path):
    done = light.run("kvledger", "trace", str(incident), "-o", str(tmp_path / "new"))
    assert done.returncode == 2
    assert "pip install 'kvledger[trace]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_reading_an_incident_leaves_it_as_it_was(light: LightEnvironment, incident: Path):
    before = incident.read_bytes()
    light.run("kvledger", "replay", str(incident))
    assert incident.read_bytes() == before
    assert not [path for path in incident.parent.iterdir() if path.name.endswith(("-wal", "-shm", "-journal"))]


def test_demo_ends_with_the_next_command_to_type(light: LightEnvironment):
    done = light.run("kvledger", "demo")
    assert done.returncode == 0, done.stderr
    assert "kvledger " in done.stdout.strip().splitlines()[-1]


def test_missing_file_is_one_line_and_status_3(light: LightEnvironment):
    done = light.run("kvledger", "replay", "no-such-file.db")
    assert done.returncode == 3
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no-such-file.db" in done.stderr


def test_datasette_loads_the_plugin(light: LightEnvironment):
    done = light.run("datasette", "plugins")
    assert done.returncode == 0, done.stderr
    assert "kvledger" in {plugin["name"] for plugin in json.loads(done.stdout)}
