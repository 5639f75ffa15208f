"""Serves a sealed copy of a log in Datasette: on loopback, for as long as the program runs.

The log itself is read once, to make the copy, and is then left alone: a live engine is not disturbed by a long look at
its pages. The copy lies in a temporary folder that is removed at the end. This file knows files, signals and Datasette.
"""

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sqlite3
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from datasette.app import Datasette
from datasette.plugins import pm

from ledger.browse import extras, pages, plugin
from ledger.errors import LedgerError, LedgerNotWritable
from ledger.file.explain import explain
from ledger.file.read import open_log
from ledger.file.seal import seal
from ledger.replay.case import Progress

LOOPBACK = "127.0.0.1"

SHUTDOWN_S = 2
"""How long a page that is being made may take when the program ends: longer than Datasette lets a query run."""


def browse(
    path: Path | str,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    ready: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Serve a sealed copy of a log until a signal ends the program: SIGINT, SIGTERM or SIGHUP.

    Args:
        port: 0 for any that is free.
        ready: called with the address of the log's page, once it can be asked for.

    Raises:
        LedgerFileError: the log cannot be read.
        LedgerNotWritable: there is no room for the copy.
        LedgerError: the address cannot be used.
    """
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="kvledger-") as folder:
        copy = make_copy(Path(path), Path(folder), progress)
        with _listen(host, port) as server_socket, contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(copy, server_socket, ready))


def open_page(address: str) -> None:
    """Open a page in the user's browser, without waiting: a browser in the terminal would not return."""
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


# --- the copy -------------------------------------------------------------------------------------------------------


def make_copy(path: Path, folder: Path, progress: Progress | None = None) -> Path:
    """Make a sealed copy of a log, with what only browsing needs, in a folder. The log is not changed.

    Raises:
        LedgerFileError: the log cannot be read.
        LedgerNotWritable: the copy cannot be written.
    """
    with open_log(path) as log:
        total, sealed = log.last_seq, log.sealed
        copy = folder / f"{database_name(path)}.db"

        def advance(events: int) -> None:
            # Two passes over the log: sealing, and the fold.
            if progress is not None:
                progress(path, events, 2 * total)

        try:
            if sealed:
                log.copy(copy)
            else:
                seal(path, copy, advance)
            extras.add(copy, lambda events: advance(total + events))
        except (OSError, sqlite3.Error, LedgerNotWritable) as error:
            reason = explain(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            raise LedgerNotWritable(
                f"no copy of {path} can be made in {folder.parent}: {reason}. TMPDIR names another folder."
            ) from error
    return copy


def database_name(path: Path) -> str:
    """Return the name of a log in addresses: that of its file, without what an address has for itself."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "log"


# --- the server -------------------------------------------------------------------------------------------------------


def make_datasette(copy: Path) -> Any:
    """Return a Datasette with one database, which it cannot change."""
    if not pm.is_registered(plugin):  # in a checkout that is not installed, or when plugins are switched off
        pm.register(plugin, name="kvledger")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return Datasette(
        [],
        immutables=[str(copy)],
        metadata={
            "title": "kvledger",
            "databases": {copy.stem: {"tables": {table: {"hidden": True} for table in pages.HIDDEN}}},
        },
        settings={
            # Guesses at what to count by cost two seconds on a large log; the page of the events offers what is apt.
            "suggest_facets": False,
            # A million events are counted by kind in 40 ms, which on a busy machine becomes more than the usual 200.
            "facet_time_limit_ms": 1000,
        },
    )


async def _serve(copy: Path, server_socket: socket.socket, ready: Callable[[str], None] | None) -> None:
    datasette = make_datasette(copy)
    await datasette.invoke_startup()
    # Requests are not logged: stdout is for the address.
    config = uvicorn.Config(
        datasette.app(), log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=SHUTDOWN_S
    )
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not on Windows, not in a thread
        loop.add_signal_handler(signal.SIGHUP, server.handle_exit, signal.SIGHUP, None)
    if ready is not None:
        # Whoever asks before the server accepts is kept waiting by the socket, which listens.
        host, port = server_socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{port}{datasette.urls.database(copy.stem)}")
    await server.serve(sockets=[server_socket])


@contextlib.contextmanager
def _listen(host: str, port: int) -> Generator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server_socket = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LedgerError(f"{host} is no address: {error.strerror or error}. Use {LOOPBACK}.") from error
    with server_socket:
        try:
            server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server_socket.bind(address)
            server_socket.listen()
        except OSError as error:
            raise LedgerError(
                f"{host} port {port} cannot be used: {error.strerror or error}. Choose another; 0 takes a free one."
            ) from error
        yield server_socket


@contextlib.contextmanager
def _ended_by_signals() -> Generator[None]:
    """End by an exception, so that the copy is removed, where a signal would end the program at once."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                number = signal.Signals[name]
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
