"""Every raw error gets one stable code or stays UNKNOWN with its raw value; the tables fit the libraries in use."""

import ast
import asyncio.exceptions
import builtins
import ctypes
import errno
import importlib
import inspect
import pathlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.codes import (
    CODES,
    ERRNO,
    EXCEPTIONS,
    HTTP,
    MOONCAKE,
    REVIEWED_UNKNOWN,
    KVCacheErrorCode,
    raw_name,
    translate,
)

NAMES = (
    "BLOCK_NOT_FOUND",
    "CRC_MISMATCH",
    "VERSION_MISMATCH",
    "KV_OOM",
    "LOAD_TIMEOUT",
    "SLOT_CONFLICT",
    "LEASE_EXPIRED",
    "TRANSFER_FAILED",
    "PEER_UNREACHABLE",
    "PEER_NOT_READY",
    "PEER_OMITTED",
    "PERMISSION_DENIED",
    "CANCELLED",
    "UNKNOWN",
)


def test_the_names_of_the_codes_never_change():
    assert tuple(code.value for code in KVCacheErrorCode) == NAMES
    assert all(code.name == code.value for code in KVCacheErrorCode)


def test_every_code_says_what_it_means_whether_to_retry_and_what_to_do():
    assert tuple(CODES) == tuple(KVCacheErrorCode)
    for code, row in CODES.items():
        assert row.code is code
        assert row.meaning.endswith(".")
        assert row.action.endswith(".")
        assert not row.action.startswith("None"), "the report puts it behind the name of an engine"


def test_what_cannot_heal_by_itself_is_not_retried():
    retried = {code.value for code, row in CODES.items() if row.retryable}
    assert retried == {
        "KV_OOM",
        "LOAD_TIMEOUT",
        "LEASE_EXPIRED",
        "TRANSFER_FAILED",
        "PEER_UNREACHABLE",
        "PEER_NOT_READY",
    }


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (-1, "UNKNOWN"),
        (-10, "KV_OOM"),
        (-101, "PEER_UNREACHABLE"),
        (-103, "PEER_NOT_READY"),
        (-200, "KV_OOM"),
        (-400, "UNKNOWN"),
        (-500, "TRANSFER_FAILED"),
        (-600, "UNKNOWN"),
        (-601, "PERMISSION_DENIED"),
        (-700, "SLOT_CONFLICT"),
        (-701, "UNKNOWN"),
        (-702, "BLOCK_NOT_FOUND"),
        (-703, "PEER_NOT_READY"),
        (-704, "BLOCK_NOT_FOUND"),
        (-705, "SLOT_CONFLICT"),
        (-706, "SLOT_CONFLICT"),
        (-707, "LEASE_EXPIRED"),
        (-710, "BLOCK_NOT_FOUND"),
        (-712, "BLOCK_NOT_FOUND"),
        (-800, "TRANSFER_FAILED"),
        (-900, "PEER_UNREACHABLE"),
        (-1010, "PEER_NOT_READY"),
        (-1011, "UNKNOWN"),
        (-1100, "BLOCK_NOT_FOUND"),
        (-1101, "TRANSFER_FAILED"),
        (-1102, "TRANSFER_FAILED"),
        (-1103, "TRANSFER_FAILED"),
        (-1104, "UNKNOWN"),
        (-1105, "SLOT_CONFLICT"),
        (-1106, "TRANSFER_FAILED"),
        (-1200, "BLOCK_NOT_FOUND"),
        (-1201, "SLOT_CONFLICT"),
        (-1202, "KV_OOM"),
        (-1203, "KV_OOM"),
    ],
)
def test_a_store_code_has_its_stable_code_and_keeps_its_number_and_name(raw, code):
    translated = translate(raw)
    assert translated.code == code
    assert translated.raw == str(raw)
    assert translated.name == MOONCAKE[raw][0]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (403, "PERMISSION_DENIED"),
        (404, "BLOCK_NOT_FOUND"),
        (504, "LOAD_TIMEOUT"),
        (507, "KV_OOM"),
        (1001, "CRC_MISMATCH"),
    ],
)
def test_a_code_like_http_has_its_stable_code(raw, code):
    assert translate(raw, source="http").code == code


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ENOENT", "BLOCK_NOT_FOUND"),
        ("ENOSPC", "KV_OOM"),
        ("ENOMEM", "KV_OOM"),
        ("ETIMEDOUT", "LOAD_TIMEOUT"),
        ("ECONNREFUSED", "PEER_UNREACHABLE"),
        ("ECONNRESET", "PEER_UNREACHABLE"),
        ("EHOSTUNREACH", "PEER_UNREACHABLE"),
        ("EACCES", "PERMISSION_DENIED"),
        ("EIO", "TRANSFER_FAILED"),
        ("ECANCELED", "CANCELLED"),
        ("EBUSY", "SLOT_CONFLICT"),
    ],
)
def test_an_errno_has_its_stable_code_and_its_name(name, code):
    translated = translate(getattr(errno, name), source="errno")
    assert translated.code == code
    assert translated.name == name


@given(raw=st.integers(), source=st.sampled_from(["mooncake", "http", "errno"]))
def test_a_number_outside_its_space_stays_unknown_and_keeps_its_value(raw, source):
    translated = translate(raw, source=source)
    assert translated.raw == str(raw)
    if raw not in {"mooncake": MOONCAKE, "http": HTTP, "errno": ERRNO}[source]:
        assert translated.code == "UNKNOWN"


def test_no_number_means_something_in_two_spaces():
    assert all(number < 0 for number in MOONCAKE)
    assert all(number > 0 for number in HTTP)
    assert all(number > 0 for number in ERRNO)
    assert translate(404, source="mooncake").code == "UNKNOWN"
    assert translate(404, source="errno").code == "UNKNOWN"
    assert translate(-110, source="errno").code == "UNKNOWN"
    assert translate(110, source="mooncake").code == "UNKNOWN"


def test_an_errno_without_a_code_still_says_its_name():
    translated = translate(errno.EINVAL, source="errno")
    assert (translated.code, translated.raw, translated.name) == ("UNKNOWN", str(errno.EINVAL), "EINVAL")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (TimeoutError(), "LOAD_TIMEOUT"),
        (asyncio.exceptions.TimeoutError(), "LOAD_TIMEOUT"),
        (asyncio.exceptions.CancelledError(), "CANCELLED"),
        (asyncio.exceptions.IncompleteReadError(b"", 4), "PEER_UNREACHABLE"),
        (MemoryError(), "KV_OOM"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "PEER_UNREACHABLE"),
        (BrokenPipeError(), "PEER_UNREACHABLE"),
        (OSError(errno.ENOSPC, "full"), "KV_OOM"),
        (PermissionError(errno.EACCES, "no"), "PERMISSION_DENIED"),
        (ValueError("wrong"), "UNKNOWN"),
        (RuntimeError(), "UNKNOWN"),
    ],
)
def test_an_exception_is_known_by_its_type(raised, code):
    translated = translate(raised)
    assert translated.code == code
    assert translated.name == type(raised).__name__
    assert translated.raw.startswith(translated.name)


def test_a_missing_file_is_not_a_missing_block():
    assert translate(FileNotFoundError(errno.ENOENT, "gone")).code == "UNKNOWN"


def test_an_exception_that_carries_a_code_keeps_it():
    class Carries(Exception):
        code = KVCacheErrorCode.PEER_OMITTED
        raw = "-7"

    translated = translate(Carries())
    assert (translated.code, translated.raw) == ("PEER_OMITTED", "-7")


def test_a_translation_reads_as_code_number_and_name():
    assert str(translate(-704)) == "BLOCK_NOT_FOUND (-704 OBJECT_NOT_FOUND)"
    assert str(translate(-99999)) == "UNKNOWN (-99999)"
    assert str(translate(ConnectionRefusedError(111, ""))) == "PEER_UNREACHABLE (ConnectionRefusedError 111)"


def test_the_name_of_a_raw_store_code_is_known_and_no_other_numbers_are_taken_for_one():
    assert raw_name("-704") == "OBJECT_NOT_FOUND"
    for raw in ("", "-99999", "704", "404", "ReadTimeout", "-704: the value has 8 bytes", "-"):
        assert raw_name(raw) == ""


# --- drift: what the libraries in use can raise and return ------------------------------------------------------------


def exceptions_defined_in(package):
    """Every exception class that a package's sources define, by reading them: nothing optional has to be imported."""
    found = {}
    for path in pathlib.Path(package.__path__[0]).rglob("*.py"):
        if {"tests", "ssh", "eventloop"} & set(path.parts):  # not loaded by what uses the library here
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases}
                found[node.name] = bases
    raised = set()
    known = {
        name
        for name, kind in vars(builtins).items()
        if inspect.isclass(kind) and issubclass(kind, BaseException) and not issubclass(kind, Warning)
    }
    while True:
        more = {name for name, bases in found.items() if bases & (known | raised)} - raised
        if not more:
            return raised
        raised |= more


def exported_exceptions(module):
    return {
        name
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, BaseException) and not issubclass(kind, Warning)
    }


@pytest.mark.engine
@pytest.mark.parametrize("library", ["zmq", "httpx", "mooncake"])
def test_every_exception_of_a_library_in_use_was_looked_at(library):
    package = importlib.import_module(library)
    raised = exceptions_defined_in(package)
    for module in pkgutil.iter_modules(package.__path__):
        if library == "mooncake" and module.name in ("store", "engine"):  # compiled
            raised |= exported_exceptions(importlib.import_module(f"mooncake.{module.name}"))
    assert not raised - set(EXCEPTIONS) - REVIEWED_UNKNOWN


def test_every_exception_of_asyncio_was_looked_at():
    raised = exported_exceptions(asyncio.exceptions) | {"QueueEmpty", "QueueFull"}
    assert not raised - set(EXCEPTIONS) - REVIEWED_UNKNOWN


@pytest.mark.engine
def test_an_exception_of_the_libraries_in_use_has_its_code():
    import httpx
    import zmq

    request = httpx.Request("GET", "http://127.0.0.1/")
    assert translate(zmq.error.Again()).code == "LOAD_TIMEOUT"
    assert translate(zmq.error.ContextTerminated()).code == "CANCELLED"
    assert translate(zmq.error.ZMQError(zmq.ETERM)).code == "CANCELLED"
    assert translate(zmq.error.ZMQError(zmq.EHOSTUNREACH)).code == "PEER_UNREACHABLE"
    assert translate(zmq.error.ZMQError(zmq.EFSM)).code == "UNKNOWN"
    assert translate(zmq.error.ZMQError()).code == "UNKNOWN"
    assert translate(httpx.ReadTimeout("", request=request)).code == "LOAD_TIMEOUT"
    assert translate(httpx.ConnectError("", request=request)).code == "PEER_UNREACHABLE"
    assert translate(httpx.InvalidURL("")).code == "UNKNOWN"
    refused = httpx.HTTPStatusError("", request=request, response=httpx.Response(404, request=request))
    translated = translate(refused)
    assert (translated.code, translated.raw) == ("BLOCK_NOT_FOUND", "HTTPStatusError 404")


@pytest.mark.engine
def test_the_table_of_store_codes_is_that_of_the_store_library_in_use():
    """The library has the names itself: `mooncake::toString(ErrorCode)`, which returns a `const std::string&`."""
    library = ctypes.CDLL(importlib.import_module("mooncake.store").__file__ or "")
    to_string = library["_ZN8mooncake8toStringB5cxx11ENS_9ErrorCodeE"]
    to_string.argtypes = [ctypes.c_int32]
    to_string.restype = ctypes.POINTER(ctypes.c_void_p * 2)

    def name_of(number):
        begin, length = to_string(number).contents
        return ctypes.string_at(begin, length).decode()

    nameless = name_of(-9_999_999)
    known = {number: name for number in range(-9_999, 0) if (name := name_of(number)) != nameless}
    assert len(known) > 30
    assert known == {number: name for number, (name, _) in MOONCAKE.items() if number in known}
    assert MOONCAKE.keys() >= known.keys()
