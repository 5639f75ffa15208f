"""Runs the project's commands where nobody prepared anything: in a root file system made from Debian's packages alone.

    python3 tools/clean_room.py                              # make demo and make test, without and with wide fonts
    python3 tools/clean_room.py --fonts none --target check  # one command, once
    python3 tools/clean_room.py --load                       # beside a busy process on each core

There is Python, make, git, and nothing else; the project is a fresh clone of HEAD. Of this machine the room has the
kernel, the network, and its settings for packages: pip's, with the folders that they name, and the certificates. Needs
root and mmdebstrap. All mounts lie in a namespace of the run and end with it. Knows the standard library only.
"""

from __future__ import annotations  # as the other tools that run under the machine's own Python

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import uv_tool
from tools.uv_tool import ROOT, CannotMake

FOLDER = ROOT / "build" / "clean-room"
INSIDE = "/home/newcomer/kvledger"
"""Where the clone lies within the room."""

PACKAGES = ("python3", "python3-venv", "make", "git", "ca-certificates")
FONT_PACKAGES = {"none": (), "wide": ("fonts-dejavu",)}
TARGETS = ("demo", "test")

CERTIFICATES = "/etc/ssl/certificates-of-the-machine.pem"
"""Within the room. A file of its own, so that Debian's packages find theirs as they left it."""

HANDED_THROUGH = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")

CLOSING_LINES = 6

# The last argument of this script is the root, the others are bound into it, read-only, at their own paths.
ENTER = """
set -e
root=$1; shift
for folder in dev sys; do mount --rbind /$folder "$root/$folder"; done
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do
    mkdir -p "$root$1"; mount --bind "$1" "$root$1"; mount -o remount,bind,ro "$root$1"; shift
done
shift
exec chroot "$root" "$@"
"""


def base(suite: str) -> Path:
    """An archive of the bare root file system. Made once; raises CannotMake."""
    archive = FOLDER / f"{suite}.tar"
    if not archive.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        part = archive.with_suffix(".part.tar")
        uv_tool.run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, part)
        part.rename(archive)
    return archive


@contextmanager
def room(suite: str, fonts: str, *, keep: bool) -> Generator[Path]:
    """A new root file system with a clone of the project in it; removed at the end unless it is to be kept."""
    root = FOLDER / f"root-{fonts}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        uv_tool.run("tar", "--extract", "--file", base(suite), "--directory", root, "--numeric-owner")
        shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
        (root / "etc" / "hosts").write_text("127.0.0.1 localhost clean-room\n")
        if certificates():
            shutil.copy(certificates(), root / CERTIFICATES.lstrip("/"))
        clone = root / INSIDE.lstrip("/")
        uv_tool.run("git", "clone", "--quiet", "--no-hardlinks", ROOT, clone)
        if FONT_PACKAGES[fonts]:
            install = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", *FONT_PACKAGES[fonts])
            for command in (("apt-get", "update", "-qq"), install):
                uv_tool.run(*entering(root, *command))
        yield root
    finally:
        if keep:
            print(f"clean_room: kept {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def certificates() -> str:
    """The file with the certificates that this machine trusts, where a setting names one; else an empty string."""
    return uv_tool.pip_settings().get("cert") or os.environ.get("SSL_CERT_FILE", "")


def package_settings() -> dict[str, str]:
    """pip's settings on this machine, as variables for the room."""
    settings = {
        f"PIP_{name.upper().replace('-', '_')}": value
        for name, value in uv_tool.pip_settings().items()
        if name in uv_tool.SAME_SETTING
    }
    if certificates():
        settings["PIP_CERT"] = CERTIFICATES
    return settings


def folders_of_packages() -> list[str]:
    """The folders of this machine that its package settings name."""
    found: set[Path] = set()
    settings = uv_tool.pip_settings()
    for name in ("index-url", "extra-index-url", "find-links"):
        for place in settings.get(name, "").split():
            path = Path(urlsplit(place).path if place.startswith("file:") else place)
            if path.is_absolute() and path.is_dir():
                # The files of an index may lie beside its pages.
                found.add(path.parent if name != "find-links" and path.parent != Path("/") else path)
    return sorted(map(str, found))


def entering(root: Path, *command: str) -> list[str]:
    """The command that runs another one within the room, with nothing of this process's environment."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "DEBIAN_FRONTEND": "noninteractive",
        **package_settings(),
        **{name: os.environ[name] for name in HANDED_THROUGH if name in os.environ},
    }
    inside = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), *command]
    namespace = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
    return [*namespace, "sh", "-c", ENTER, "enter", str(root), *folders_of_packages(), "--", *inside]


def attempt(root: Path, fonts: str, target: str) -> bool:
    """Runs one target within the room, prints how it ended, and returns whether it passed."""
    log = FOLDER / f"{target}-{fonts}.log"
    print(f"clean_room: make {target}, fonts: {fonts}; all that it prints is in {log.relative_to(ROOT)}", flush=True)
    started = time.monotonic()
    with log.open("wb") as out:
        done = subprocess.run(
            entering(root, "make", "--no-print-directory", "-C", INSIDE, target),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds = round(time.monotonic() - started)
    for line in log.read_text(errors="replace").splitlines()[-CLOSING_LINES:]:
        print(f"    {line}")
    print(f"clean_room: make {target}, fonts: {fonts}: status {done.returncode} after {seconds} s", flush=True)
    return done.returncode == 0


@contextmanager
def load() -> Generator[None]:
    """A busy process on each core."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
        for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def require() -> None:
    """Raises CannotMake when this machine cannot make a room."""
    if os.geteuid() != 0:
        raise CannotMake("a root file system is made and entered as root. Run it as root")
    if shutil.which("mmdebstrap") is None:
        raise CannotMake("mmdebstrap is missing. On Debian: apt-get install mmdebstrap")


def suite_of_machine() -> str:
    """The name of the Debian that this machine runs, or of the one that was stable when this was written."""
    text = Path("/etc/os-release").read_text() if Path("/etc/os-release").is_file() else ""
    fields = dict(field.split("=", 1) for field in shlex.split(text) if "=" in field)
    return fields.get("VERSION_CODENAME", "bookworm") if fields.get("ID") == "debian" else "bookworm"


def main() -> int:
    """Exit status: 0 all passed, 1 one did not or no room can be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fonts", choices=("none", "wide", "both"), default="both", help="beside those of Chromium")
    parser.add_argument("--target", action="append", help=f"of the Makefile; again for more; else {TARGETS}")
    parser.add_argument("--suite", default=suite_of_machine(), help="the Debian to make it of (%(default)s)")
    parser.add_argument("--load", action="store_true", help="keep each core busy meanwhile")
    parser.add_argument("--keep", action="store_true", help="keep the root file system, to look around in it")
    options = parser.parse_args()
    passed: list[bool] = []
    try:
        require()
        for fonts in FONT_PACKAGES if options.fonts == "both" else (options.fonts,):
            with room(options.suite, fonts, keep=options.keep) as root, ExitStack() as beside:
                if options.load:
                    beside.enter_context(load())
                passed += [attempt(root, fonts, target) for target in options.target or TARGETS]
    except CannotMake as error:
        print(f"clean_room: {error}", file=sys.stderr)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
