"""The stable codes of a failed load or transfer, and the one place where raw errors become such a code.

A code is a promise: alerts, dashboards and incident files match it for years, so a name is never changed or reused.
What a store, a socket or a library said is *raw*; `translate` gives it a code when its meaning is known, and `UNKNOWN`
with the raw value kept when it is not. A number alone means nothing: -110 is not ETIMEDOUT, and an errno of 404 is not
"not found". So the caller says which space a number is from, and a number outside that space is `UNKNOWN`.

Sources of the tables:

    Mooncake    `enum class ErrorCode` in `mooncake-store/include/types.h`. The store library has the names in it as
                well; a test compares this table with the library in use (0.3.13 at the time of writing).
    HTTP        RFC 9110; RFC 4918 for 507; 1001 is what KV-cache services with HTTP-like codes say of a wrong checksum.
    errno       POSIX, and the numbers that ZeroMQ adds (`zmq.h`).
    exceptions  the class trees of Python 3.11 to 3.13, pyzmq, httpx and Mooncake, by name: none of them is imported.

This file knows only names and numbers.
"""

import errno
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec


class KVCacheErrorCode(StrEnum):
    """Why KV cache could not be moved. `CODES` says of each what it means, whether to try again, and what to do."""

    BLOCK_NOT_FOUND = "BLOCK_NOT_FOUND"
    CRC_MISMATCH = "CRC_MISMATCH"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    KV_OOM = "KV_OOM"
    LOAD_TIMEOUT = "LOAD_TIMEOUT"
    SLOT_CONFLICT = "SLOT_CONFLICT"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    PEER_UNREACHABLE = "PEER_UNREACHABLE"
    PEER_NOT_READY = "PEER_NOT_READY"
    PEER_OMITTED = "PEER_OMITTED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"


_C = KVCacheErrorCode


class Stage(StrEnum):
    """Where it failed. The names are those that vLLM's operators ask for in its failure records."""

    BOOTSTRAP = "BOOTSTRAP"
    """A decode engine asked where a prefill engine is."""
    REGISTRATION = "REGISTRATION"
    """The peers agreed on memory and layout."""
    SEND = "SEND"
    """A prefill engine wrote blocks to a decode engine."""
    RECV = "RECV"
    """A decode engine waited for blocks of a prefill engine."""
    STORE_PUT = "STORE_PUT"
    """Blocks were written to the store."""
    STORE_GET = "STORE_GET"
    """Blocks were read from the store."""
    VERIFY = "VERIFY"
    """Blocks that arrived were compared with what was written."""
    WATCHDOG = "WATCHDOG"
    """Nothing was heard until the deadline."""


class CodeRow(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        short: the meaning in a few words, to stand beside the code.
        retryable: whether the same call may succeed a moment later with nothing else done.
        meaning: what happened, for a reader who knows KV caches but not this library.
        action: what to do about it.
    """

    code: KVCacheErrorCode
    short: str
    retryable: bool
    meaning: str
    action: str


_ROWS: tuple[CodeRow, ...] = (
    CodeRow(
        _C.BLOCK_NOT_FOUND,
        "no readable copy of the block",
        False,
        "The store or the peer holds no readable copy of the block: it was evicted, removed, or never written.",
        "Nothing for single blocks: they are computed again. If it is frequent, the store is too small, or its lease "
        "too "
        "short for the time between lookup and load.",
    ),
    CodeRow(
        _C.CRC_MISMATCH,
        "the bytes are not those that were written",
        False,
        "The bytes that arrived are not the bytes that were written.",
        "The block is not used. `kvledger replay` shows whether its source was overwritten while it was saved; if it "
        "was "
        "not, suspect memory or network hardware.",
    ),
    CodeRow(
        _C.VERSION_MISMATCH,
        "written under another layout",
        False,
        "The value was written under another layout: dtype, shape, block size, model or format differ.",
        "Drop the old values: `reset_prefix_cache` with the connector, or another `cache_prefix`. KV of another "
        "layout is "
        "never read.",
    ),
    CodeRow(
        _C.KV_OOM,
        "no room",
        True,
        "No room: in the store's segments, in a staging buffer, or in the memory of the process.",
        "Give the store more memory (`global_segment_size`, `local_buffer_size`) or fewer writers.",
    ),
    CodeRow(
        _C.LOAD_TIMEOUT,
        "no answer in time",
        True,
        "The answer did not come in time. The data may exist.",
        "Compare the durations of the transfers with the deadline; look at the network and the load of the store's "
        "hosts.",
    ),
    CodeRow(
        _C.SLOT_CONFLICT,
        "the key or slot is taken",
        False,
        "The key or the slot is taken: it exists already, is leased, or another operation holds it.",
        "Nothing for a save: somebody else has stored the block. For a load it means two writers of one slot; see the "
        "log.",
    ),
    CodeRow(
        _C.LEASE_EXPIRED,
        "the store's lease ended before the transfer",
        True,
        "The store's promise not to evict the block ended before the transfer did, so what arrived cannot be trusted.",
        "Raise the lease (`default_kv_lease_ttl` of the master) above the duration of the slowest transfer, or load "
        "less "
        "at a time.",
    ),
    CodeRow(
        _C.TRANSFER_FAILED,
        "the bytes were not moved, or not all",
        True,
        "The bytes could not be moved, or not all of them.",
        "See the log of the transfer engine on both hosts at that time; look at the network.",
    ),
    CodeRow(
        _C.PEER_UNREACHABLE,
        "the other side cannot be reached",
        True,
        "The other side cannot be reached: it is down, its address is wrong, or the connection broke.",
        "See whether the master, the store's nodes or the prefill engine are alive, and their addresses.",
    ),
    CodeRow(
        _C.PEER_NOT_READY,
        "the other side cannot serve yet",
        True,
        "The other side is there and cannot serve yet: still starting, still writing, or not serving in its present "
        "state.",
        "If it stays so, the writer has probably died half way: the master drops what a dead writer left after a "
        "timeout.",
    ),
    CodeRow(
        _C.PEER_OMITTED,
        "the peer left it out of its answer",
        False,
        "The peer ended the transfer and left this request or block out of its answer.",
        "The peer no longer knew the request: it had expired or was aborted there. See the peer's log for it.",
    ),
    CodeRow(
        _C.PERMISSION_DENIED,
        "the other side refused",
        False,
        "The other side refused this client.",
        "See that client, tenant and credentials are those that the store expects.",
    ),
    CodeRow(
        _C.CANCELLED,
        "ended on purpose",
        False,
        "The operation was ended on purpose: shutdown, abort, or a cancelled task.",
        "Nothing to do, unless nobody cancelled anything.",
    ),
    CodeRow(
        _C.UNKNOWN,
        "its meaning is not known",
        False,
        "An error whose meaning kvledger does not know; its raw value is kept with it.",
        "Look up the raw value with its source; if it should have a code, report it to kvledger.",
    ),
)

CODES: Mapping[KVCacheErrorCode, CodeRow] = MappingProxyType({row.code: row for row in _ROWS})
"""Every code with its row, in the order of the reference page."""

Source: TypeAlias = Literal["mooncake", "http", "errno"]
"""The space that a number is from. Exceptions need none: they are known by their type."""


class Translation(msgspec.Struct, frozen=True):
    """What `translate` made of a raw error.

    Attributes:
        code: the stable code.
        raw: the raw error unchanged: a number as text, or the type of an exception with the number that it carries.
        name: the raw error's own name, e.g. `OBJECT_NOT_FOUND`, `ECONNREFUSED` or `ReadTimeout`; empty if it has none.
    """

    code: KVCacheErrorCode
    raw: str
    name: str = ""

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed a moment later with nothing else done."""
        return CODES[self.code].retryable

    def __str__(self) -> str:
        said = f"{self.raw} {self.name}" if self.name and self.name not in self.raw else self.raw
        return f"{self.code} ({said})"


MOONCAKE: Mapping[int, tuple[str, KVCacheErrorCode]] = MappingProxyType(
    {
        # A code stands as UNKNOWN here when none of ours says what it says: its own name then says more than a near
        # miss.
        -1: ("INTERNAL_ERROR", _C.UNKNOWN),
        -10: ("BUFFER_OVERFLOW", _C.KV_OOM),  # the client's staging buffer
        -100: ("SHARD_INDEX_OUT_OF_RANGE", _C.UNKNOWN),
        -101: ("SEGMENT_NOT_FOUND", _C.PEER_UNREACHABLE),  # the node that offered the memory has left
        -102: ("SEGMENT_ALREADY_EXISTS", _C.SLOT_CONFLICT),
        -103: (
            "CLIENT_NOT_FOUND",
            _C.PEER_NOT_READY,
        ),  # the master has dropped this client, which mounts again by itself
        -200: ("NO_AVAILABLE_HANDLE", _C.KV_OOM),
        -300: ("INVALID_VERSION", _C.UNKNOWN),  # a version of the store's own books, not of the KV
        -400: ("INVALID_KEY", _C.UNKNOWN),
        -500: ("WRITE_FAIL", _C.TRANSFER_FAILED),
        -600: ("INVALID_PARAMS", _C.UNKNOWN),
        -601: ("ILLEGAL_CLIENT", _C.PERMISSION_DENIED),
        -700: ("INVALID_WRITE", _C.SLOT_CONFLICT),  # the object is not in the state that this writer left it in
        -701: ("INVALID_READ", _C.UNKNOWN),
        -702: ("INVALID_REPLICA", _C.BLOCK_NOT_FOUND),  # none of the copies can be read
        -703: ("REPLICA_IS_NOT_READY", _C.PEER_NOT_READY),
        -704: ("OBJECT_NOT_FOUND", _C.BLOCK_NOT_FOUND),
        -705: ("OBJECT_ALREADY_EXISTS", _C.SLOT_CONFLICT),
        -706: ("OBJECT_HAS_LEASE", _C.SLOT_CONFLICT),
        -707: ("LEASE_EXPIRED", _C.LEASE_EXPIRED),
        -708: ("OBJECT_HAS_REPLICATION_TASK", _C.SLOT_CONFLICT),
        -709: ("OBJECT_NO_REPLICATION_TASK", _C.UNKNOWN),
        -710: ("REPLICA_NOT_FOUND", _C.BLOCK_NOT_FOUND),
        -711: ("REPLICA_ALREADY_EXISTS", _C.SLOT_CONFLICT),
        -712: ("REPLICA_IS_GONE", _C.BLOCK_NOT_FOUND),
        -713: ("REPLICA_NOT_IN_LOCAL_MEMORY", _C.UNKNOWN),
        -714: ("OBJECT_REPLICA_BUSY", _C.SLOT_CONFLICT),
        -800: ("TRANSFER_FAIL", _C.TRANSFER_FAILED),
        -801: ("CHECKSUM_MISMATCH", _C.CRC_MISMATCH),
        -900: ("RPC_FAIL", _C.PEER_UNREACHABLE),
        -901: ("RPC_TIMEOUT", _C.LOAD_TIMEOUT),
        -1000: ("ETCD_OPERATION_ERROR", _C.UNKNOWN),
        -1001: ("ETCD_KEY_NOT_EXIST", _C.UNKNOWN),
        -1002: ("ETCD_TRANSACTION_FAIL", _C.UNKNOWN),
        -1003: ("ETCD_CTX_CANCELLED", _C.CANCELLED),
        -1004: ("OPLOG_ENTRY_NOT_FOUND", _C.UNKNOWN),
        -1005: ("K8S_LEASE_OPERATION_ERROR", _C.UNKNOWN),  # leases of the master's election, not of a block
        -1006: ("K8S_LEASE_NOT_FOUND", _C.UNKNOWN),
        -1007: ("INCOMPLETE_OPLOG_CATCH_UP", _C.PEER_NOT_READY),
        -1010: ("UNAVAILABLE_IN_CURRENT_STATUS", _C.PEER_NOT_READY),
        -1011: ("UNAVAILABLE_IN_CURRENT_MODE", _C.UNKNOWN),
        -1012: ("NOT_SUPPORTED", _C.UNKNOWN),
        -1100: ("FILE_NOT_FOUND", _C.BLOCK_NOT_FOUND),
        -1101: ("FILE_OPEN_FAIL", _C.TRANSFER_FAILED),
        -1102: ("FILE_READ_FAIL", _C.TRANSFER_FAILED),
        -1103: ("FILE_WRITE_FAIL", _C.TRANSFER_FAILED),
        -1104: ("FILE_INVALID_BUFFER", _C.UNKNOWN),
        -1105: ("FILE_LOCK_FAIL", _C.SLOT_CONFLICT),
        -1106: ("FILE_INVALID_HANDLE", _C.TRANSFER_FAILED),
        -1200: ("BUCKET_NOT_FOUND", _C.BLOCK_NOT_FOUND),
        -1201: ("BUCKET_ALREADY_EXISTS", _C.SLOT_CONFLICT),
        -1202: ("KEYS_EXCEED_BUCKET_LIMIT", _C.KV_OOM),
        -1203: ("KEYS_ULTRA_LIMIT", _C.KV_OOM),
        -1300: ("UNABLE_OFFLOAD", _C.UNKNOWN),
        -1301: ("UNABLE_OFFLOADING", _C.UNKNOWN),
        -1400: ("TASK_NOT_FOUND", _C.UNKNOWN),
        -1401: ("TASK_PENDING_LIMIT_EXCEEDED", _C.PEER_NOT_READY),
        -1402: ("JOB_NOT_FOUND", _C.UNKNOWN),
        -1500: ("SERIALIZE_UNSUPPORTED", _C.UNKNOWN),
        -1501: ("SERIALIZE_FAIL", _C.UNKNOWN),
        -1502: ("DESERIALIZE_FAIL", _C.UNKNOWN),
        -1503: ("PERSISTENT_FAIL", _C.UNKNOWN),
        -1600: ("DFS_NETWORK_TIMEOUT", _C.LOAD_TIMEOUT),
        -1601: ("DFS_SERVICE_UNAVAILABLE", _C.PEER_UNREACHABLE),
        -1602: ("DFS_QUOTA_EXCEEDED", _C.KV_OOM),
        -1603: ("DFS_PERMISSION_DENIED", _C.PERMISSION_DENIED),
        -1604: ("DFS_STALE_HANDLE", _C.TRANSFER_FAILED),
        -1605: ("DFS_PARTIAL_WRITE", _C.TRANSFER_FAILED),
        -1700: ("TENANT_QUOTA_EXCEEDED", _C.KV_OOM),
        -1701: ("TENANT_NOT_REGISTERED", _C.PERMISSION_DENIED),
        -1702: ("TENANT_NOT_EMPTY", _C.SLOT_CONFLICT),
    }
)
"""The store's codes: their names there, and ours. 0 and above are no errors."""

HTTP: Mapping[int, tuple[str, KVCacheErrorCode]] = MappingProxyType(
    {
        401: ("Unauthorized", _C.PERMISSION_DENIED),
        403: ("Forbidden", _C.PERMISSION_DENIED),
        404: ("Not Found", _C.BLOCK_NOT_FOUND),
        408: ("Request Timeout", _C.LOAD_TIMEOUT),
        409: ("Conflict", _C.SLOT_CONFLICT),
        410: ("Gone", _C.BLOCK_NOT_FOUND),
        423: ("Locked", _C.SLOT_CONFLICT),
        429: ("Too Many Requests", _C.PEER_NOT_READY),
        502: ("Bad Gateway", _C.PEER_UNREACHABLE),
        503: ("Service Unavailable", _C.PEER_NOT_READY),
        504: ("Gateway Timeout", _C.LOAD_TIMEOUT),
        507: ("Insufficient Storage", _C.KV_OOM),
        1001: ("Checksum Error", _C.CRC_MISMATCH),
    }
)
"""HTTP-like codes that say something about a block or a peer."""

_ERRNO_NAMES: Mapping[str, KVCacheErrorCode] = MappingProxyType(
    {
        "ENOENT": _C.BLOCK_NOT_FOUND,
        "ENODATA": _C.BLOCK_NOT_FOUND,
        "ENOMEM": _C.KV_OOM,
        "ENOBUFS": _C.KV_OOM,
        "ENOSPC": _C.KV_OOM,
        "EDQUOT": _C.KV_OOM,
        "ETIMEDOUT": _C.LOAD_TIMEOUT,
        "ETIME": _C.LOAD_TIMEOUT,
        "EEXIST": _C.SLOT_CONFLICT,
        "EBUSY": _C.SLOT_CONFLICT,
        "EIO": _C.TRANSFER_FAILED,
        "EREMOTEIO": _C.TRANSFER_FAILED,
        "EINTR": _C.TRANSFER_FAILED,
        "ECONNREFUSED": _C.PEER_UNREACHABLE,
        "ECONNRESET": _C.PEER_UNREACHABLE,
        "ECONNABORTED": _C.PEER_UNREACHABLE,
        "EHOSTDOWN": _C.PEER_UNREACHABLE,
        "EHOSTUNREACH": _C.PEER_UNREACHABLE,
        "ENETDOWN": _C.PEER_UNREACHABLE,
        "ENETRESET": _C.PEER_UNREACHABLE,
        "ENETUNREACH": _C.PEER_UNREACHABLE,
        "ENOLINK": _C.PEER_UNREACHABLE,
        "ENOTCONN": _C.PEER_UNREACHABLE,
        "EPIPE": _C.PEER_UNREACHABLE,
        "ESHUTDOWN": _C.PEER_UNREACHABLE,
        "EAGAIN": _C.PEER_NOT_READY,
        "EINPROGRESS": _C.PEER_NOT_READY,
        "EALREADY": _C.PEER_NOT_READY,
        "EACCES": _C.PERMISSION_DENIED,
        "EPERM": _C.PERMISSION_DENIED,
        "EKEYREJECTED": _C.PERMISSION_DENIED,
        "ECANCELED": _C.CANCELLED,
    }
)

_ZMQ_HAUSNUMERO = 156384712
"""Where ZeroMQ's own error numbers begin (`ZMQ_HAUSNUMERO` in `zmq.h`)."""

_ZMQ_ERRNO: Mapping[int, tuple[str, KVCacheErrorCode]] = MappingProxyType(
    {
        _ZMQ_HAUSNUMERO + 51: ("EFSM", _C.UNKNOWN),  # a call out of turn: a fault of the caller
        _ZMQ_HAUSNUMERO + 52: ("ENOCOMPATPROTO", _C.UNKNOWN),
        _ZMQ_HAUSNUMERO + 53: ("ETERM", _C.CANCELLED),
        _ZMQ_HAUSNUMERO + 54: ("EMTHREAD", _C.UNKNOWN),
    }
)

ERRNO: Mapping[int, tuple[str, KVCacheErrorCode]] = MappingProxyType(
    {
        **{
            number: (name, code)
            for name, code in _ERRNO_NAMES.items()
            if (number := getattr(errno, name, None)) is not None  # not every system has all of them
        },
        **_ZMQ_ERRNO,
    }
)
"""errno values by number on this system. Others are UNKNOWN with their name."""

EXCEPTIONS: Mapping[str, KVCacheErrorCode] = MappingProxyType(
    {
        # Python, asyncio. An OSError is known by its errno first.
        "TimeoutError": _C.LOAD_TIMEOUT,
        "CancelledError": _C.CANCELLED,
        "KeyboardInterrupt": _C.CANCELLED,
        "SystemExit": _C.CANCELLED,
        "GeneratorExit": _C.CANCELLED,
        "MemoryError": _C.KV_OOM,
        "PermissionError": _C.PERMISSION_DENIED,
        "ConnectionError": _C.PEER_UNREACHABLE,
        "IncompleteReadError": _C.PEER_UNREACHABLE,  # the peer closed in the middle of a message
        "EOFError": _C.PEER_UNREACHABLE,
        "InterruptedError": _C.TRANSFER_FAILED,
        "BlockingIOError": _C.PEER_NOT_READY,
        # torch, whose out-of-memory error is a RuntimeError elsewhere
        "OutOfMemoryError": _C.KV_OOM,
        # ZeroMQ. `Again` is what a socket raises when its receive or send timeout has passed.
        "Again": _C.LOAD_TIMEOUT,
        "ContextTerminated": _C.CANCELLED,
        "InterruptedSystemCall": _C.TRANSFER_FAILED,
        "NotDone": _C.LOAD_TIMEOUT,  # a tracked message was not sent within the time given
        # httpx. An HTTPStatusError is known by its status first.
        "ConnectError": _C.PEER_UNREACHABLE,
        "ConnectTimeout": _C.PEER_UNREACHABLE,  # no connection came about, so nothing that was asked for was late
        "TimeoutException": _C.LOAD_TIMEOUT,
        "ReadTimeout": _C.LOAD_TIMEOUT,
        "WriteTimeout": _C.LOAD_TIMEOUT,
        "PoolTimeout": _C.LOAD_TIMEOUT,
        "NetworkError": _C.PEER_UNREACHABLE,
        "ReadError": _C.PEER_UNREACHABLE,
        "WriteError": _C.PEER_UNREACHABLE,
        "CloseError": _C.PEER_UNREACHABLE,
        "ProxyError": _C.PEER_UNREACHABLE,
        "RemoteProtocolError": _C.PEER_UNREACHABLE,
    }
)
"""Exception types that say what happened, by the name of the class. A subclass means what its nearest base means."""

REVIEWED_UNKNOWN: frozenset[str] = frozenset(
    {
        "BrokenBarrierError",
        "CookieConflict",
        "DecodingError",
        "HTTPError",
        "HTTPStatusError",
        "InvalidStateError",
        "InvalidURL",
        "LimitOverrunError",
        "LocalProtocolError",
        "MaxRetryExceeded",
        "ProtocolError",
        "QueueEmpty",
        "QueueFull",
        "QueueShutDown",
        "RequestError",
        "RequestNotRead",
        "ResponseNotRead",
        "SendfileNotAvailableError",
        "SharedSegmentError",
        "StreamClosed",
        "StreamConsumed",
        "StreamError",
        "TooManyRedirects",
        "TransportError",
        "UnsupportedProtocol",
        "ZMQBaseError",
        "ZMQBindError",
        "ZMQError",
        "ZMQVersionError",
    }
)
"""Exception types that were looked at and say nothing about a block or a peer: faults of the caller, states of a
library.

A test compares both sets with the libraries in use, so that a new type of theirs is looked at too.
"""


def translate(raw: int | BaseException, *, source: Source = "mooncake") -> Translation:
    """Return the stable code for a raw error. Never raises, and never guesses.

    Args:
        raw: a number, or an exception.
        source: the space that a number is from. An exception ignores it.
    """
    if isinstance(raw, BaseException):
        return _translate_exception(raw)
    table = _TABLES[source]
    row = table.get(raw)
    if row is not None:
        return Translation(row[1], str(raw), row[0])
    return Translation(_C.UNKNOWN, str(raw), errno.errorcode.get(raw, "") if source == "errno" else "")


def raw_name(raw: str) -> str:
    """Return the store's own name for a raw code as it stands in events, e.g. `OBJECT_NOT_FOUND` for `-704`.

    Empty for everything else. Only the store has numbers below zero.
    """
    if raw.startswith("-") and raw[1:].isdigit():
        return MOONCAKE.get(int(raw), ("",))[0]
    return ""


_TABLES: Mapping[Source, Mapping[int, tuple[str, KVCacheErrorCode]]] = {
    "mooncake": MOONCAKE,
    "http": HTTP,
    "errno": ERRNO,
}


def _translate_exception(raised: BaseException) -> Translation:
    """An exception by what it carries: a code of ours, an HTTP status, its type, an errno - the most telling first."""
    name = type(raised).__name__
    carried = getattr(raised, "code", None)
    if isinstance(carried, KVCacheErrorCode):
        return Translation(carried, str(getattr(raised, "raw", "") or name), name)
    status = getattr(getattr(raised, "response", None), "status_code", None)
    if isinstance(status, int):
        return Translation(translate(status, source="http").code, f"{name} {status}", name)
    number = getattr(raised, "errno", None)
    number = number if isinstance(number, int) else None
    said = name if number is None else f"{name} {number}"
    for kind in type(raised).__mro__:
        code = EXCEPTIONS.get(kind.__name__)
        if code is not None:
            return Translation(code, said, name)
        if kind.__name__ in _ERRNO_CARRIERS:
            break
    # A file that is missing is not a block that is missing: only a caller who knows that may say so.
    if number is not None and number not in (errno.ENOENT, getattr(errno, "ENODATA", errno.ENOENT)):
        return Translation(translate(number, source="errno").code, said, name)
    return Translation(_C.UNKNOWN, said, name)


_ERRNO_CARRIERS = frozenset({"OSError", "ZMQError"})
"""Where the way up the classes ends: from here on the number says more than the type."""
