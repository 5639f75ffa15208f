"""The locked environments: what the machine's package settings become for uv, and when a lock is too old to be used."""

from pathlib import Path

import pytest

from tools import clean_room, lock, uv_tool


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No setting of this machine's uv, and none of its certificates and proxies."""
    for variable in {variable for same in uv_tool.SAME_SETTING.values() for variable in same}:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_variables_win_over_files_and_what_is_for_other_commands_is_left_out():
    listing = ":env:.find-links='/a /b'\nglobal.find-links='/c'\nglobal.cert='/ca.pem'\ndownload.cert='/other.pem'\n"
    assert uv_tool.settings_in(listing) == {"find-links": "/a /b", "cert": "/ca.pem"}


def test_uv_sees_the_packages_that_pip_sees(unset: pytest.MonkeyPatch):
    settings = {
        "find-links": "/a\n/b",
        "extra-index-url": "https://x.example/simple\nfile:///y",
        "constraint": "/c.txt",
    }
    unset.setattr(uv_tool, "pip_settings", lambda: settings)
    given = uv_tool.environment()
    assert given["UV_FIND_LINKS"] == "/a,/b"
    assert given["UV_INDEX"] == "https://x.example/simple file:///y"
    assert "/c.txt" not in given.values()


def test_what_is_set_for_uv_itself_wins(unset: pytest.MonkeyPatch):
    unset.setenv("UV_EXTRA_INDEX_URL", "https://mine.example/simple")
    unset.setattr(uv_tool, "pip_settings", lambda: {"extra-index-url": "https://pips.example/simple"})
    assert "UV_INDEX" not in uv_tool.environment()


@pytest.mark.parametrize("each", lock.LOCKS, ids=lambda each: each.name)
def test_each_lock_follows_the_project_file(each: lock.Lock):
    lock.require_in_step(each)


@pytest.mark.parametrize("each", lock.LOCKS, ids=lambda each: each.name)
def test_a_lock_names_no_place_that_packages_come_from(each: lock.Lock):
    text = each.path.read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text


def test_a_lock_of_another_project_file_is_refused_with_the_command_that_renews_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "inputs_digest", lambda: "0" * 64)
    with pytest.raises(uv_tool.CannotMake, match=r"tools/locks/full\.txt .* Renew it: make lock"):
        lock.require_in_step(lock.FULL)


def test_a_build_that_each_place_makes_itself_has_no_hash():
    text = "a==1+cpu ; x \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n    # via b\nb==2 \\\n    --hash=sha256:3\n"
    kept = "a==1+cpu ; x\n    # via b\nb==2 \\\n    --hash=sha256:3\n"
    assert lock.without_hashes_of_local_versions(text) == kept


def test_uv_runs_in_the_version_that_the_project_names(tmp_path: Path):
    assert uv_tool.has_version(uv_tool.uv(), uv_tool.version())
    assert not uv_tool.has_version(uv_tool.uv(), "0.0.1")
    assert not uv_tool.has_version(tmp_path / "uv", uv_tool.version())


def test_a_clean_room_gets_the_folders_that_the_package_settings_name(unset: pytest.MonkeyPatch, tmp_path: Path):
    for folder in ("wheels", "index/simple"):
        (tmp_path / folder).mkdir(parents=True)
    settings = {
        "find-links": f"{tmp_path}/wheels {tmp_path}/missing https://wheels.example",
        "extra-index-url": f"file://{tmp_path}/index/simple https://index.example/simple",
    }
    unset.setattr(uv_tool, "pip_settings", lambda: settings)
    assert clean_room.folders_of_packages() == [f"{tmp_path}/index", f"{tmp_path}/wheels"]
