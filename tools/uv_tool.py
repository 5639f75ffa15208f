"""The one version of uv that makes environments and locks, and what it must know of the machine's package settings.

Knows the standard library only: it runs before anything is installed. uv does not read pip's configuration, so where a
machine's indexes, folders of wheels and certificates stand there, they are handed over. uv's own settings win.
"""

from __future__ import annotations  # so that a Python that is too old still gets as far as the line that says so

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-uv"

# pip's setting -> the variables of uv that say the same. The first is set; each of them keeps it from being set.
SAME_SETTING = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("ALL_PROXY", "HTTPS_PROXY", "https_proxy"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}
SEPARATED_BY_COMMAS = "UV_FIND_LINKS"

# Where pip keeps a setting; the later one wins.
PLACES_OF_SETTINGS = ("global", "install", ":env:")


class CannotMake(Exception):
    """Something cannot be made; the message is one line that says what to do."""


def run(*command: str | Path, environment: dict[str, str] | None = None, on_failure: str = "") -> None:
    """Runs one command with no standard input and shows it first; a failure raises CannotMake with `on_failure`."""
    print("+", *command, flush=True)
    try:
        subprocess.run(
            [str(part) for part in command],
            check=True,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.CalledProcessError as error:
        failed = f"`{' '.join(map(str, command))}` ended with status {error.returncode}; its own words stand above."
        raise CannotMake(f"{failed} {on_failure}".rstrip()) from error


def project() -> dict[str, Any]:
    """What stands in pyproject.toml."""
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def version() -> str:
    """The version of uv that the project names among its tools for development."""
    (pinned,) = [line for line in project()["project"]["optional-dependencies"]["dev"] if line.startswith("uv==")]
    return pinned.removeprefix("uv==")


def has_version(program: Path, wanted: str) -> bool:
    """Whether `program` runs and is uv in the wanted version."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return said.split()[1:2] == [wanted]


def uv() -> Path:
    """The path of uv in the project's version: the machine's own, or one in an environment that is made for it."""
    wanted = version()
    made = FOLDER / "bin" / "uv"
    for found in (shutil.which("uv"), Path(sys.prefix) / "bin" / "uv", made):
        if found and has_version(Path(found), wanted):
            return Path(found)
    try:
        venv.create(FOLDER, clear=True, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise CannotMake(
            "this Python cannot make environments with pip. On Debian: apt-get install python3-venv"
        ) from error
    python = FOLDER / "bin" / "python"
    run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", f"uv=={wanted}")
    return made


def pip_settings() -> dict[str, str]:
    """pip's settings on this machine by name, from its files and its variables; empty where there is no pip to ask."""
    asked = (FOLDER / "bin" / "python", sys.executable)
    for python in asked:
        command = [str(python), "-m", "pip", "config", "list"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        return settings_in(said)
    return {}


def settings_in(listing: str) -> dict[str, str]:
    """The settings in what `pip config list` printed, of those places that hold for an install."""
    found: dict[str, dict[str, str]] = {place: {} for place in PLACES_OF_SETTINGS}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        place, _, setting = name.rpartition(".")
        if place in found:
            found[place][setting] = str(ast.literal_eval(value))
    return {name: value for place in PLACES_OF_SETTINGS for name, value in found[place].items()}


def environment() -> dict[str, str]:
    """The variables that make uv see the packages that pip sees here, for a process that has the rest already."""
    given: dict[str, str] = {
        # As pip does: an index beside the first one may hold any part of the packages, and not the newest of each.
        "UV_INDEX_STRATEGY": os.environ.get("UV_INDEX_STRATEGY", "unsafe-best-match"),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
    }
    for setting, value in pip_settings().items():
        variables = SAME_SETTING.get(setting, ())
        if variables and not any(variable in os.environ for variable in variables):
            separator = "," if variables[0] == SEPARATED_BY_COMMAS else " "
            given[variables[0]] = separator.join(value.split())
    return given
