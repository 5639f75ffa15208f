"""kvledger's settings: one table, from which parsing, checks and the reference page come.

They stand in vLLM's `kv_connector_extra_config`, beside the keys of vLLM's own Mooncake connectors, which are listed
here so that a misspelt key is an error and not silence. This file knows no vLLM.
"""

import difflib
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from ledger.errors import SettingsError

Value: TypeAlias = bool | int | float | str


class Setting(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        unit: the unit of the value, empty when it has none.
        choices: the values allowed; empty when the type says all.
        minimum, maximum: bounds of a number, both included.
        required: whether a text must not be empty.
        schemes: what a text that is not empty must begin with, one of these.
    """

    name: str
    default: Value
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    required: bool = False
    schemes: tuple[str, ...] = ()


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "ledger_path",
        "kvledger-logs",
        "Folder of the audit logs; one file for each start of an engine.",
        required=True,
    ),
    Setting("hash_request_ids", False, "Write the first 16 hex digits of a request id's SHA-256 instead of the id."),
    Setting(
        "on_invariant_violation",
        "raise",
        "What to do when a rule is broken: `raise` ends the engine, `quarantine` keeps the blocks and serves on.",
        choices=("raise", "quarantine"),
    ),
    Setting(
        "max_inflight_store_jobs",
        512,
        "Store jobs open at a time; beyond it a save is skipped and recorded. 0 for no bound.",
        unit="jobs",
        minimum=0,
    ),
    Setting(
        "max_pinned_fraction",
        0.75,
        "Part of the GPU blocks that store jobs may pin; beyond it a save is skipped and recorded.",
        minimum=0.0,
        maximum=1.0,
    ),
    Setting(
        "stall_suspect_s",
        60.0,
        "A job, load or transfer open for longer is recorded as suspected to be stalled, once.",
        unit="seconds",
        minimum=0.0,
    ),
    Setting(
        "queue_limit_events",
        200_000,
        "Events kept in memory while the disk does not take them; beyond it events are dropped and a gap is recorded.",
        unit="events",
        minimum=1_000,
    ),
    Setting(
        "flush_interval_ms",
        50,
        "Time between two flushes to disk: what a killed process may lose.",
        unit="milliseconds",
        minimum=1,
        maximum=60_000,
    ),
    Setting(
        "checkpoint_interval_events",
        512,
        "Scheduler events between two digests of the state. 0 for none.",
        unit="events",
        minimum=0,
    ),
    Setting(
        "evidence",
        True,
        "Record what the workers know: each call to the store, with keys, bytes, duration and raw codes.",
    ),
    Setting(
        "evidence_address",
        "",
        "Where workers send evidence to, e.g. `tcp://10.0.0.1:5600` when they run on several hosts. A data-parallel "
        "engine takes that port plus its index; any other engine needs a port of its own. `ipc://` begins the path of "
        "a socket file, which each engine completes. Empty: a socket file on this host.",
        schemes=("tcp://", "ipc://"),
    ),
    Setting(
        "evidence_queue_events",
        10_000,
        "Evidence kept in a worker while the engine process does not take it; beyond it the loss is counted and "
        "recorded.",
        unit="events",
        minimum=100,
    ),
    Setting(
        "load_max_retries",
        2,
        "How often a block is asked for again when it failed for a reason that may pass.",
        unit="retries",
        minimum=0,
        maximum=100,
    ),
    Setting(
        "load_deadline_s",
        10.0,
        "Time from the start of a load after which nothing of it is tried again.",
        unit="seconds",
        minimum=0.0,
    ),
    Setting(
        "load_retry_backoff_ms",
        50,
        "Pause before the first retry; it doubles with each one. Other loads go on meanwhile.",
        unit="milliseconds",
        minimum=1,
        maximum=60_000,
    ),
    Setting(
        "load_rollback",
        "request",
        "What a failed load takes with it: `request`, all its blocks; `suffix`, those from the first failed block on. "
        "Models with several KV-cache groups always lose the whole request.",
        choices=("request", "suffix"),
    ),
    Setting(
        "load_max_cycles",
        2,
        "Failed loads of the same range of a request after which its lookups answer no hit, so that it is computed. "
        "0 for no bound.",
        unit="loads",
        minimum=0,
    ),
    Setting(
        "failure_log",
        "",
        "File that failures are appended to, one line of JSON each, for log shippers. Empty: standard error.",
    ),
    Setting(
        "integrity",
        "off",
        "Store a fingerprint of each block with its key and compare it on load: `off`, `sampled` (some keys), `all`. "
        "Turned on, values carry a trailer, and only instances that have it on share them.",
        choices=("off", "sampled", "all"),
    ),
    Setting(
        "integrity_sample_keys",
        16,
        "With `integrity` set to `sampled`: one key in so many has a fingerprint, chosen by its hash.",
        unit="keys",
        minimum=1,
    ),
)
"""All settings, in the order of the reference page."""

UPSTREAM_KEYS: frozenset[str] = frozenset(
    {
        "bootstrap_server_address",
        "cache_prefix",
        "custom_mem_pool",
        "device_name",
        "enable_cross_layers_blocks",
        "enable_group_semantics",
        "enable_lookup",
        "enable_store_tp_lcm",
        "load_async",
        "lookup_async",
        "lookup_rpc_port",
        "mooncake_protocol",
        "num_workers",
        "prefill_tp_sizes",
        "preferred_segment",
        "save_decode_cache",
        "store_tp_size",
    }
)
"""Keys of `kv_connector_extra_config` that vLLM 0.32 and 0.33 read for their Mooncake connectors."""

PASSTHROUGH = "passthrough_keys"
"""A list of further keys that somebody else reads; they are not checked."""


class Settings(msgspec.Struct, frozen=True):
    """The settings in force. Each attribute is a row of `SETTINGS`; units and meanings stand there."""

    ledger_path: str
    hash_request_ids: bool
    on_invariant_violation: Literal["raise", "quarantine"]
    max_inflight_store_jobs: int
    max_pinned_fraction: float
    stall_suspect_s: float
    queue_limit_events: int
    flush_interval_ms: int
    checkpoint_interval_events: int
    evidence: bool
    evidence_address: str
    evidence_queue_events: int
    load_max_retries: int
    load_deadline_s: float
    load_retry_backoff_ms: int
    load_rollback: Literal["request", "suffix"]
    load_max_cycles: int
    failure_log: str
    integrity: Literal["off", "sampled", "all"]
    integrity_sample_keys: int

    def changed(self) -> dict[str, str]:
        """Return the settings that differ from their defaults, as text; not those that name places on a host."""
        return {
            row.name: str(value)
            for row in SETTINGS
            if (value := getattr(self, row.name)) != row.default and row.name not in _PLACES
        }

    def digest(self) -> str:
        """Return the SHA-256 of all values, in hex."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def parse(extra_config: Mapping[str, Any]) -> Settings:
    """Return the settings that stand in vLLM's `kv_connector_extra_config`.

    Raises:
        SettingsError: a key is unknown or a value cannot be; the message lists every problem.
    """
    rows = {row.name: row for row in SETTINGS}
    passthrough = extra_config.get(PASSTHROUGH, [])
    problems: list[str] = []
    if not isinstance(passthrough, list | tuple):
        problems.append(f"{PASSTHROUGH} must be a list of keys, not {passthrough!r}")
        passthrough = ()
    values: dict[str, Value] = {row.name: row.default for row in SETTINGS}
    for key, value in extra_config.items():
        row = rows.get(key)
        if row is not None:
            problem = _problem(row, value)
            if problem:
                problems.append(problem)
            else:
                values[key] = float(value) if isinstance(row.default, float) else value
        elif key not in UPSTREAM_KEYS and key != PASSTHROUGH and key not in passthrough:
            close = difflib.get_close_matches(key, [*rows, *UPSTREAM_KEYS], n=1)
            hint = (
                f"did you mean '{close[0]}'?" if close else f"if another component reads it, list it in '{PASSTHROUGH}'"
            )
            problems.append(f"unknown setting '{key}': {hint}")
    if problems:
        raise SettingsError("kv_connector_extra_config: " + "; ".join(problems))
    return msgspec.convert(values, Settings)


def _problem(row: Setting, value: Any) -> str:
    """Say what is wrong with a value; empty if nothing is."""
    kind = type(row.default)
    if not (_is_number(value) if kind is float else type(value) is kind):
        return f"{row.name} must be {_KIND_NAMES[kind]}, not {value!r}"
    if isinstance(value, str):
        return _problem_of_text(row, value)
    if row.minimum is not None and value < row.minimum:
        return f"{row.name} must be at least {row.minimum:g}, not {value!r}"
    if row.maximum is not None and value > row.maximum:
        return f"{row.name} must be at most {row.maximum:g}, not {value!r}"
    return ""


def _is_number(value: Any) -> bool:
    """Return whether a value can be compared with bounds and stored: JSON's NaN, Infinity and 1e999 cannot."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _problem_of_text(row: Setting, value: str) -> str:
    if row.choices and value not in row.choices:
        return f"{row.name} must be one of {', '.join(row.choices)}, not {value!r}"
    if row.required and not value:
        return f"{row.name} must not be empty; leave it out for {row.default!r}"
    if row.schemes and value:
        if value in row.schemes:
            return f"{row.name} names no place after {value!r}"
        if not value.startswith(row.schemes):
            return f"{row.name} must begin with {' or '.join(row.schemes)}, not {value!r}"
    return ""


_PLACES = ("ledger_path", "evidence_address")
_KIND_NAMES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
