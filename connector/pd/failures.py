"""What a failed P/D transfer is called: from exceptions, from what a prefill worker answers, and from what it left out.

A prefill worker of vLLM says why it failed in a line of English and no number. The lines that vLLM 0.32 and 0.33
write are listed here, and ours; a line that is not has no meaning to us, and stays as it is beside `UNKNOWN`. Pure
functions.
"""

from connector.runtime.failures import Failure
from ledger.codes import KVCacheErrorCode, Stage

_C = KVCacheErrorCode

RAW_LENGTH = 160
"""Characters of a peer's line that are kept: enough for the longest of vLLM's, and a bound for what a peer may send."""

PEER_LINES: tuple[tuple[str, KVCacheErrorCode, Stage], ...] = (
    ("Timeout waiting for P side ready", _C.PEER_NOT_READY, Stage.SEND),
    ("The prefill worker ends", _C.PEER_NOT_READY, Stage.SEND),
    ("Mooncake transfer engine returned", _C.TRANSFER_FAILED, Stage.SEND),
    ("P num blocks less than D", _C.BLOCK_NOT_FOUND, Stage.SEND),
    ("KV group count mismatch", _C.VERSION_MISMATCH, Stage.REGISTRATION),
    ("This D tp_rank", _C.VERSION_MISMATCH, Stage.REGISTRATION),
    # Every other line that begins so is about regions, layers or heads that do not fit each other.
    ("Mooncake KV layout", _C.PEER_NOT_READY, Stage.REGISTRATION),
    ("Mooncake ", _C.VERSION_MISMATCH, Stage.REGISTRATION),
)
"""How a line begins, and what it means. The first that fits counts."""

OMITTED = Failure(_C.PEER_OMITTED, "the peer finished without a result for this request", Stage.SEND)
NOT_REGISTERED = Failure(_C.PEER_NOT_READY, "the bootstrap server does not know this engine", Stage.REGISTRATION)
NO_PEERS = Failure(_C.PEER_NOT_READY, "the prefill engine has no worker for this rank", Stage.REGISTRATION)
ONE_ADDRESS = Failure(
    _C.PEER_NOT_READY, "the bootstrap server names one address for several of its workers", Stage.REGISTRATION
)
GONE = Failure(
    _C.PEER_UNREACHABLE, "nobody listens at the peer's address any more", Stage.RECV, "ConnectionRefusedError"
)
BROKEN = Failure(_C.PEER_UNREACHABLE, "the connection to the peer broke", Stage.RECV)
NO_CONNECTION = Failure(_C.PEER_UNREACHABLE, "no connection to the peer came about", Stage.RECV)
OVERDUE = Failure(_C.LOAD_TIMEOUT, "no result until the deadline", Stage.WATCHDOG)
NEVER_ASKED = Failure(_C.LOAD_TIMEOUT, "the peers were not found until the deadline", Stage.WATCHDOG)


def of_exception(error: BaseException, stage: Stage) -> Failure:
    """Return what to call a failure that raised `error`."""
    failure = Failure.of(error, stage)
    if stage is Stage.BOOTSTRAP and failure.code in (_C.UNKNOWN, _C.BLOCK_NOT_FOUND):
        # Whatever answers there, or does not, is no bootstrap server: the address is wrong, or it is down.
        return Failure(_C.PEER_UNREACHABLE, failure.raw, stage, failure.exception)
    return failure


def of_line(line: str | None, *, private: bool = False) -> Failure:
    """Return what to call a failure of which a prefill worker says `line`.

    Args:
        line: what the peer says, if it says anything.
        private: keep no line that is not one of vLLM's known ones: it may hold the id of a request.
    """
    said = " ".join((line or "").split())[:RAW_LENGTH]
    # One line is for all requests that failed together, whichever of its reasons is whose.
    meanings = {_meaning(part) for part in said.split("; ")}
    code, stage = meanings.pop() if len(meanings) == 1 else (_C.UNKNOWN, Stage.SEND)
    if private and code is _C.UNKNOWN:
        said = f"an unknown line of {len(said)} characters" if said else ""
    return Failure(code, said or "the peer gave no reason", stage)


def _meaning(said: str) -> tuple[KVCacheErrorCode, Stage]:
    for beginning, code, stage in PEER_LINES:
        if said.startswith(beginning):
            return code, stage
    return _C.UNKNOWN, Stage.SEND
