"""Fingerprints of blocks, kept in the store with the blocks, and compared when a block is saved and when it is loaded.

With `integrity` on, every value in the store ends in a trailer: the layout it was written under, and, for the chosen
keys, a fingerprint of the block's bytes. Trailer and block are one object, so they cannot part or mix. Because such
values are longer, their keys end in a mark of their own, and only instances that have integrity on see them.

    save   the fingerprint is taken when the job is registered, and again after the put. Two fingerprints that differ
           mean that the block changed under the transfer: what was stored is not what was meant, so the key is removed
    load   another layout is VERSION_MISMATCH, another fingerprint CRC_MISMATCH, before any block counts as loaded

A fingerprint is computed where the tensor lives; only its 8 bytes are copied to the host. It is made to find accidents
(a block that was overwritten, a bit that flipped), not forgery. This file knows torch and the store's calls, and
nothing of scheduling.
"""

import hashlib
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from connector.runtime.failures import Failure
from connector.store.loader import Answer, Target
from ledger.codes import KVCacheErrorCode, Stage

FORMAT = 1
"""The version of the trailer. A value of another version is of another layout."""

KEY_MARK = f"#kvledger{FORMAT}"
"""What the keys of values with a trailer end in."""

MAGIC = b"KVLEDGER"

_TRAILER = struct.Struct("<8sHHIQQ16s16x")
TRAILER_BYTES = _TRAILER.size
"""64: magic, format, flags, 4 spare bytes; the block's bytes, its fingerprint, its layout's digest, 16 spare bytes."""

HAS_FINGERPRINT = 1

SLOTS = 1024
"""Trailers that a transfer thread holds, in 64 KiB of registered memory. More keys are asked for in several calls."""

_WORDS_AT_ONCE = 1 << 22
"""Words that are worked on at a time: 32 MiB of temporary memory."""


class Trailer(NamedTuple):
    """What stands behind a block in the store.

    Attributes:
        layout: digest of the layout that the block was written under.
        value_bytes: the block's length.
        fingerprint: of the block's bytes; None if this key was not chosen to have one.
    """

    layout: bytes
    value_bytes: int
    fingerprint: int | None

    def encode(self) -> bytes:
        """Return the trailer's 64 bytes."""
        flags = 0 if self.fingerprint is None else HAS_FINGERPRINT
        return _TRAILER.pack(MAGIC, FORMAT, flags, 0, self.value_bytes, self.fingerprint or 0, self.layout)

    @staticmethod
    def decode(raw: bytes) -> "Trailer | None":
        """Return the trailer in `raw`; None if it is none of this format."""
        magic, version, flags, _, value_bytes, fingerprint, layout = _TRAILER.unpack(raw)
        if magic != MAGIC or version != FORMAT:
            return None
        return Trailer(layout, value_bytes, fingerprint if flags & HAS_FINGERPRINT else None)


def layout_digest(description: dict[str, Any]) -> bytes:
    """Return 16 bytes that stand for a layout: equal only for equal descriptions."""
    return hashlib.sha256(msgspec.json.encode([FORMAT, description], order="sorted", enc_hook=str)).digest()[:16]


class Fingerprints:
    """Computes fingerprints of memory that belongs to registered tensors.

    A value is read as 32-bit words and each is multiplied by a fixed odd 64-bit number of its place; the sum, modulo
    2^64, is the fingerprint. One changed word always changes it; any other change is missed with a chance of about
    2^-33 or less. (Multilinear hashing: D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014.)

    Args:
        tensors: the KV caches. Every address that is asked for must lie in the storage of one of them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._regions: list[tuple[int, int, torch.Tensor]] = []
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._regions.append((storage.data_ptr(), storage.nbytes(), flat))
        self._weights: dict[tuple[torch.device, int], torch.Tensor] = {}

    def of(self, addresses: Sequence[Sequence[int]], sizes: Sequence[int]) -> torch.Tensor:
        """Return the fingerprints of values that are laid out alike, as int64 on the device that holds them.

        Args:
            addresses: for each value, where its segments are.
            sizes: the bytes of each segment, the same for all values.

        Raises:
            ValueError: an address lies in no registered tensor.
        """
        word_bytes = 4 if all(size % 4 == 0 for size in sizes) else 1
        total: torch.Tensor | None = None
        first_word = 0
        for number, size in enumerate(sizes):
            words = size // word_bytes
            starts = [segments[number] for segments in addresses]
            rows = self._rows(starts, size, word_bytes)
            weights = self._weights_for(rows.device, sum(sizes) // word_bytes)[first_word : first_word + words]
            part = _weighted_sums(rows, weights)
            total = part if total is None else total.add_(part.to(total.device))
            first_word += words
        if total is None:
            return torch.zeros(len(addresses), dtype=torch.int64)
        return total

    def _rows(self, starts: Sequence[int], size: int, word_bytes: int) -> torch.Tensor:
        """Return one row of words for each segment. A copy on its device, or a view."""
        base, length, flat = self._region(starts[0])
        offsets = [start - base for start in starts]
        if min(offsets) < 0 or max(offsets) + size > length:
            raise ValueError("the segments of a block lie in different tensors")
        if word_bytes == 4 and not any(offset % 4 for offset in offsets) and length % 4 == 0:
            flat, words = flat.view(torch.int32), size // 4
            offsets = [offset // 4 for offset in offsets]
        elif word_bytes == 4:
            raise ValueError("a block does not begin at a whole word")
        else:
            words = size
        phase = offsets[0] % words if words else 0
        if words and not any(offset % words != phase for offset in offsets):
            table = flat[phase : phase + (len(flat) - phase) // words * words].view(-1, words)
            # From pinned memory, because a copy from any other waits for all that the device was given before.
            pinned = flat.device.type == "cuda"
            numbers = torch.tensor([(offset - phase) // words for offset in offsets], pin_memory=pinned)
            return table.index_select(0, numbers.to(flat.device, non_blocking=pinned))
        return torch.stack([flat[offset : offset + words] for offset in offsets])

    def _region(self, address: int) -> tuple[int, int, torch.Tensor]:
        for region in self._regions:
            if region[0] <= address < region[0] + region[1]:
                return region
        raise ValueError(f"address {address:#x} belongs to no KV cache that was registered")

    def _weights_for(self, device: torch.device, words: int) -> torch.Tensor:
        weights = self._weights.get((device, words))
        if weights is None:
            weights = self._weights[device, words] = place_weights(words).to(device)
        return weights


def _weighted_sums(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's words, each times its weight, modulo 2^64."""
    at_once = max(1, _WORDS_AT_ONCE // max(len(weights), 1))
    if len(rows) <= at_once:
        return rows.to(torch.int64).mul_(weights).sum(1)
    return torch.cat([part.to(torch.int64).mul_(weights).sum(1) for part in torch.split(rows, at_once)])


def place_weights(words: int) -> torch.Tensor:
    """Return the odd 64-bit number of each word's place: the outputs of SplitMix64, which are the same everywhere."""
    mask = {shift: (1 << (64 - shift)) - 1 for shift in (30, 27, 31)}

    def shifted(value: torch.Tensor, shift: int) -> torch.Tensor:
        return (value >> shift) & mask[shift]  # torch shifts the sign in; the mask takes it out

    value = torch.arange(1, words + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    value = (value ^ shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return (value ^ shifted(value, 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unsigned(values: torch.Tensor) -> list[int]:
    """Bring fingerprints to the host: 8 bytes for each block."""
    return [int(value) & 0xFFFF_FFFF_FFFF_FFFF for value in values.cpu().numpy()]


class ChangedBlock(NamedTuple):
    """A block that changed between the registration of its job and the end of the put.

    Attributes:
        key: the key that it was stored under, without the mark.
        address: where the block begins.
        before, after: its fingerprint at registration and after the put.
        removed: the store's answer to removing the key: 0, or a negative code.
    """

    key: str
    address: int
    before: int
    after: int
    removed: int


class PlannedPut(NamedTuple):
    """A key that a job will put: where its bytes are, and its layout by the number of its group."""

    key: str
    addresses: list[int]
    sizes: list[int]


class Guard:
    """Fingerprints and layouts of one worker.

    Args:
        fingerprints: computes fingerprints.
        layouts: the digest of each store group's layout.
        group_of: gives the store group that a key names.
        every_keys: one key in so many has a fingerprint; 1 for all.
    """

    def __init__(
        self,
        fingerprints: Fingerprints,
        layouts: Sequence[bytes],
        group_of: Callable[[str], int],
        every_keys: int = 1,
    ) -> None:
        self._fingerprints = fingerprints
        self._layouts = layouts
        self._group_of = group_of
        self._every_keys = every_keys

    def chooses(self, key: str) -> bool:
        """Whether a key is one of those that have a fingerprint: by the key's own hash, so everywhere the same."""
        if self._every_keys == 1:
            return True
        digest = hashlib.blake2b(key.rsplit("@", 1)[-1].encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self._every_keys == 0

    def layout_of(self, key: str) -> bytes:
        """Return the digest of the layout of a key's block."""
        return self._layouts[self._group_of(key)]

    def take(self, blocks: Sequence[PlannedPut]) -> "JobFingerprints":
        """Take fingerprints of those blocks that have one; queued on the device, and not waited for."""
        chosen = [block for block in blocks if self.chooses(block.key)]
        keys: list[str] = []
        parts: list[torch.Tensor] = []
        for alike in _by_sizes(chosen):
            keys.extend(block.key for block in alike)
            parts.append(self._fingerprints.of([block.addresses for block in alike], alike[0].sizes))
        return JobFingerprints(keys, parts)

    def verify(self, targets: Sequence[Target], answers: Sequence[int], trailers: Sequence[bytes]) -> list[Answer]:
        """Compare what arrived with what its trailers say; return the answers, with a rejection where they differ."""
        judged: list[Answer] = list(answers)
        to_compare: list[tuple[int, int]] = []
        for index, (target, answer, raw) in enumerate(zip(targets, answers, trailers, strict=True)):
            if answer < 0:
                continue
            trailer = Trailer.decode(raw)
            layout = self.layout_of(target.key)
            if trailer is None:
                judged[index] = _rejected(KVCacheErrorCode.VERSION_MISMATCH, f"no trailer of format {FORMAT}")
            elif trailer.layout != layout or trailer.value_bytes != sum(target.sizes):
                said = f"layout {trailer.layout.hex()[:16]}, expected {layout.hex()[:16]}"
                judged[index] = _rejected(KVCacheErrorCode.VERSION_MISMATCH, said)
            elif trailer.fingerprint is not None and self.chooses(target.key):
                to_compare.append((index, trailer.fingerprint))
        blocks = [PlannedPut(str(index), targets[index].addresses, targets[index].sizes) for index, _ in to_compare]
        stored = {str(index): fingerprint for index, fingerprint in to_compare}
        for alike in _by_sizes(blocks):
            found = self._fingerprints.of([block.addresses for block in alike], alike[0].sizes)
            for block, fingerprint in zip(alike, _unsigned(found), strict=True):
                if fingerprint != stored[block.key]:
                    said = f"fingerprint {fingerprint:016x}, stored {stored[block.key]:016x}"
                    judged[int(block.key)] = _rejected(KVCacheErrorCode.CRC_MISMATCH, said)
        return judged


def _rejected(code: KVCacheErrorCode, raw: str) -> Failure:
    """Return why a value that arrived may not be used."""
    return Failure(code, raw, Stage.VERIFY)


class JobFingerprints:
    """Fingerprints that were taken when a job was registered, and are copied to the host when first needed."""

    def __init__(self, keys: Sequence[str], parts: Sequence[torch.Tensor]) -> None:
        self._keys = keys
        self._parts = parts
        self._values: dict[str, int] | None = None

    @property
    def values(self) -> dict[str, int]:
        """The fingerprint of each chosen key."""
        if self._values is None:
            numbers = [number for part in self._parts for number in _unsigned(part)]
            self._values = dict(zip(self._keys, numbers, strict=True))
            self._parts = ()
        return self._values


def _by_sizes(blocks: Iterable[PlannedPut]) -> list[list[PlannedPut]]:
    """Return blocks sorted into those with the same segment sizes."""
    groups: dict[tuple[int, ...], list[PlannedPut]] = {}
    for block in blocks:
        groups.setdefault(tuple(block.sizes), []).append(block)
    return list(groups.values())


class _Thread(threading.local):
    """What a transfer thread has of its own."""

    slots: torch.Tensor | None = None
    taken: JobFingerprints | None = None
    trailers: list[bytes] | None = None


class GuardedStore:
    """Stands in for a `MooncakeDistributedStore` and gives every value its trailer.

    Args:
        store: the real store.
        guard: the worker's fingerprints.
        on_changed: called with each block that changed under a put.
    """

    def __init__(self, store: Any, guard: Guard, on_changed: Callable[[ChangedBlock], None]) -> None:
        self._store = store
        self._guard = guard
        self._on_changed = on_changed
        self._mine = _Thread()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the real store."""
        return getattr(self._store, name)

    def use(self, taken: JobFingerprints | None) -> None:
        """Let the puts of this thread carry these fingerprints from now on."""
        self._mine.taken = taken

    def take_trailers(self) -> list[bytes]:
        """Return the trailers that this thread's last get brought, one for each key."""
        trailers, self._mine.trailers = self._mine.trailers, None
        return trailers or []

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Ask which keys exist with a trailer."""
        return self._store.batch_is_exist([key + KEY_MARK for key in keys])

    def get_size(self, key: str) -> int:
        """Return a value's bytes without its trailer, or a negative code."""
        size = int(self._store.get_size(key + KEY_MARK))
        return size - TRAILER_BYTES if size >= TRAILER_BYTES else size

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, Any]:
        """Return where values lie, by key without its mark, for upstream's log of tiers."""
        found = dict(self._store.batch_get_replica_desc([key + KEY_MARK for key in keys]))
        return {key: found.get(key + KEY_MARK) for key in keys}

    def remove(self, key: str, force: bool = False) -> int:
        """Remove a value; return 0 or a negative code."""
        return int(self._store.remove(key + KEY_MARK, force))

    def batch_put_from_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], *args: Any
    ) -> list[int]:
        """Put blocks with their trailers, then look whether one changed meanwhile. The results are the real store's.

        Mooncake's `ReplicateConfig` may name a group for each key of a call, so each part of a call gets its own.
        """
        config: Any = args[0] if args else None
        groups = list(getattr(config, "group_ids", None) or ())
        results: list[int] = []
        try:
            for start in range(0, len(keys), SLOTS):
                part = slice(start, start + SLOTS)
                if groups:
                    config.group_ids = groups[part]
                results.extend(self._put(keys[part], addrs[part], sizes[part], *args))
        finally:
            if groups:
                config.group_ids = groups
        return results

    def _put(self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], *args: Any) -> list[int]:
        guard = self._guard
        known = self._mine.taken.values if self._mine.taken is not None else {}
        trailers = b"".join(
            Trailer(guard.layout_of(key), sum(size), known.get(key)).encode()
            for key, size in zip(keys, sizes, strict=True)
        )
        slots = self._slots()
        slots[: len(trailers)] = torch.frombuffer(bytearray(trailers), dtype=torch.uint8)
        results: list[int] = self._store.batch_put_from_multi_buffers(
            *self._with_slots(slots, keys, addrs, sizes), *args
        )
        stored = [
            PlannedPut(key, addr, size)
            for key, addr, size, result in zip(keys, addrs, sizes, results, strict=True)
            if result >= 0 and key in known
        ]
        after = guard.take(stored).values
        for block in stored:
            if after[block.key] != known[block.key]:
                removed = self.remove(block.key, force=True)
                self._on_changed(
                    ChangedBlock(block.key, block.addresses[0], known[block.key], after[block.key], removed)
                )
        return results

    def batch_get_into_multi_buffers(
        self, keys: list[str], addrs: list[list[int]], sizes: list[list[int]], *args: Any
    ) -> list[int]:
        """Get blocks and their trailers; return for each the bytes read without the trailer, or a negative code."""
        answers: list[int] = []
        trailers: list[bytes] = []
        slots = self._slots()
        for start in range(0, len(keys), SLOTS):
            part = slice(start, start + SLOTS)
            slots.zero_()
            got = self._store.batch_get_into_multi_buffers(
                *self._with_slots(slots, keys[part], addrs[part], sizes[part]), *args
            )
            answers.extend(size - TRAILER_BYTES if size >= TRAILER_BYTES else size for size in got)
            raw = slots.numpy().tobytes()
            trailers.extend(raw[index * TRAILER_BYTES : (index + 1) * TRAILER_BYTES] for index in range(len(got)))
        self._mine.trailers = trailers
        return answers

    def _with_slots(
        self, slots: torch.Tensor, keys: list[str], addrs: list[list[int]], sizes: list[list[int]]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        base = slots.data_ptr()
        return (
            [key + KEY_MARK for key in keys],
            [[*addr, base + index * TRAILER_BYTES] for index, addr in enumerate(addrs)],
            [[*size, TRAILER_BYTES] for size in sizes],
        )

    def _slots(self) -> torch.Tensor:
        """Return this thread's memory for trailers, registered with the store."""
        slots = self._mine.slots
        if slots is None:
            slots = torch.zeros(SLOTS * TRAILER_BYTES, dtype=torch.uint8)
            status = self._store.register_buffer(slots.data_ptr(), slots.nbytes)
            if status != 0:
                raise RuntimeError(f"Mooncake cannot register memory for trailers ({status}). Set integrity to off.")
            self._mine.slots = slots
        return slots
