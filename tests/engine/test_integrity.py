"""Fingerprints of blocks: how they are computed, and what they show on a real store."""

import random

import pytest
import torch
from mooncake.store import (  # pyright: ignore[reportAttributeAccessIssue] - compiled
    MooncakeDistributedStore,
    ReplicateConfig,
)
from vllm.distributed.mooncake_store import MooncakeStoreConfig, setup_mooncake_store

from connector.store.integrity import (
    KEY_MARK,
    SLOTS,
    TRAILER_BYTES,
    Fingerprints,
    Guard,
    GuardedStore,
    PlannedPut,
    Trailer,
    layout_digest,
    place_weights,
)
from connector.store.loader import Target
from tests.engine.machine import free_port, mooncake_master

BLOCKS, SEGMENT = 8, 96
MASK = (1 << 64) - 1


def splitmix64(place):
    value = place * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def reference(value):
    """The fingerprint of some bytes, by the book and slowly."""
    words = [int.from_bytes(value[at : at + 4], "little", signed=True) for at in range(0, len(value), 4)]
    return sum(word * (splitmix64(place) | 1) for place, word in enumerate(words, 1)) & MASK


def cache(seed, dtype=torch.bfloat16):
    """A KV cache of one layer: keys and values of 8 blocks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, BLOCKS, SEGMENT // dtype.itemsize, generator=generator).to(dtype)


def segments(tensor, block):
    """Where a block's keys and values are."""
    return [tensor[part, block].data_ptr() for part in range(2)]


def bytes_of(tensor, block):
    return b"".join(tensor[part, block].view(torch.uint8).numpy().tobytes() for part in range(2))


def of(fingerprints, tensor, blocks):
    taken = fingerprints.of([segments(tensor, block) for block in blocks], [SEGMENT, SEGMENT])
    return [value & MASK for value in taken.tolist()]


def test_the_weights_are_those_of_splitmix64():
    assert [weight & MASK for weight in place_weights(100).tolist()] == [splitmix64(n) | 1 for n in range(1, 101)]


def test_a_fingerprint_is_what_its_definition_says():
    tensor = cache(1)
    fingerprints = Fingerprints([tensor])
    assert of(fingerprints, tensor, range(BLOCKS)) == [reference(bytes_of(tensor, block)) for block in range(BLOCKS)]


def test_a_fingerprint_depends_on_bytes_and_not_on_where_they_are():
    tensor = cache(2)
    fingerprints = Fingerprints([tensor])
    before = of(fingerprints, tensor, [5])
    tensor[:, 1] = tensor[:, 5]
    assert of(fingerprints, tensor, [1]) == before
    shuffled = [4, 0, 7, 4]
    assert of(fingerprints, tensor, shuffled) == [of(fingerprints, tensor, [block])[0] for block in shuffled]


def test_every_changed_bit_changes_the_fingerprint():
    tensor = cache(3)
    fingerprints = Fingerprints([tensor])
    flat = tensor[1, 3].view(torch.uint8)
    before = of(fingerprints, tensor, [3])
    for at in range(SEGMENT):
        for bit in range(8):
            flat[at] ^= 1 << bit
            assert of(fingerprints, tensor, [3]) != before
            flat[at] ^= 1 << bit
    assert of(fingerprints, tensor, [3]) == before


def test_changes_that_cancel_in_a_plain_sum_are_seen():
    tensor = cache(4)
    fingerprints = Fingerprints([tensor])
    before = of(fingerprints, tensor, [2])
    words = tensor[0, 2].view(torch.int32)
    kept = words.clone()
    words[[0, 1]] = kept[[1, 0]]  # two words change places
    assert of(fingerprints, tensor, [2]) != before
    words.copy_(kept)
    words[[0, 1]] ^= -(1 << 31)  # two signs turn
    assert of(fingerprints, tensor, [2]) != before
    words.copy_(kept)
    words[4] += 1
    words[5] -= 1
    assert of(fingerprints, tensor, [2]) != before


def test_a_block_of_odd_length_is_read_byte_by_byte():
    tensor = torch.arange(4 * 7, dtype=torch.uint8).reshape(4, 7)
    fingerprints = Fingerprints([tensor])
    values = fingerprints.of([[tensor[row].data_ptr()] for row in range(4)], [7]).tolist()
    assert len(set(values)) == 4


def test_memory_that_is_no_kv_cache_is_refused():
    with pytest.raises(ValueError, match="belongs to no KV cache"):
        Fingerprints([cache(5)]).of([[16]], [SEGMENT])


def test_a_trailer_reads_back_as_it_was_written_and_nothing_else_is_a_trailer():
    trailer = Trailer(layout_digest({"dtype": "bfloat16"}), 192, (1 << 64) - 3)
    assert len(trailer.encode()) == TRAILER_BYTES
    assert Trailer.decode(trailer.encode()) == trailer
    assert Trailer.decode(trailer._replace(fingerprint=None).encode()) == trailer._replace(fingerprint=None)
    assert Trailer.decode(bytes(TRAILER_BYTES)) is None
    assert Trailer.decode(trailer.encode().replace(b"KVLEDGER\x01", b"KVLEDGER\x02")) is None


def test_layouts_that_differ_in_anything_have_other_digests():
    layout = {"model": "m", "spec": ["FullAttentionSpec", {"block_size": 32, "head_size": 64}]}
    other = {"model": "m", "spec": ["FullAttentionSpec", {"block_size": 32, "head_size": 128}]}
    assert layout_digest(layout) == layout_digest(dict(reversed(layout.items())))
    assert layout_digest(layout) != layout_digest(other)


def test_a_sample_is_the_same_everywhere_and_about_as_large_as_asked_for():
    keys = [f"model@tp_rank:{number % 4}@group:0@{random.Random(number).randbytes(16).hex()}" for number in range(4000)]
    guard = Guard(Fingerprints([]), [b""], lambda _: 0, every_keys=16)
    chosen = [key for key in keys if guard.chooses(key)]
    assert 150 < len(chosen) < 350
    assert all(guard.chooses(key.replace("model", "other").replace("tp_rank:0", "tp_rank:9")) for key in chosen)


class Fixture:
    """A worker's memory and a real store, with values that have trailers."""

    def __init__(self, every_keys=1, layout="one"):
        self.kv_cache = cache(6)
        self.changed = []
        self.real = MooncakeDistributedStore()
        setup_mooncake_store(self.real, MooncakeStoreConfig.load_from_config(), f"127.0.0.1:{free_port()}")
        assert self.real.register_buffer(self.kv_cache.data_ptr(), self.kv_cache.nbytes) == 0
        self.guard = Guard(Fingerprints([self.kv_cache]), [layout_digest({"layout": layout})], lambda _: 0, every_keys)
        self.store = GuardedStore(self.real, self.guard, self.changed.append)

    def planned(self, keys):
        return [PlannedPut(key, segments(self.kv_cache, block), [SEGMENT, SEGMENT]) for key, block in keys.items()]

    def put(self, keys, between=lambda: None):
        """Save blocks as a job does; `between` runs after its registration."""
        self.store.use(self.guard.take(self.planned(keys)))
        between()
        planned = self.planned(keys)
        return self.store.batch_put_from_multi_buffers(
            [each.key for each in planned], [each.addresses for each in planned], [each.sizes for each in planned]
        )

    def load(self, keys):
        """Load blocks and return for each what was made of it: `ok`, the store's code, or the rejection's name."""
        targets = [
            Target(key, 0, block, 0, 32, segments(self.kv_cache, block), [SEGMENT, SEGMENT])
            for key, block in keys.items()
        ]
        answers = self.store.batch_get_into_multi_buffers(
            [target.key for target in targets],
            [target.addresses for target in targets],
            [target.sizes for target in targets],
        )
        judged = self.guard.verify(targets, answers, self.store.take_trailers())
        return [
            "ok" if answer == 2 * SEGMENT else answer if isinstance(answer, int) else str(answer.code)
            for answer in judged
        ]


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    with mooncake_master(tmp_path_factory.mktemp("master")) as process:
        yield process


@pytest.fixture
def worker(master):
    fixture = Fixture()
    yield fixture
    fixture.real.remove_all(True)
    fixture.real.close()


def test_what_was_saved_is_loaded_and_verified(worker):
    content = bytes_of(worker.kv_cache, 1)
    assert worker.put({"a": 1, "b": 2}) == [0, 0]
    assert worker.store.batch_is_exist(["a", "b", "c"]) == [1, 1, 0]
    assert worker.load({"a": 5, "c": 6, "b": 7}) == ["ok", -704, "ok"]
    assert bytes_of(worker.kv_cache, 5) == content
    assert worker.store.get_size("a") == 2 * SEGMENT
    assert not worker.changed


def test_a_value_whose_bytes_were_changed_in_the_store_is_a_crc_mismatch(worker):
    worker.put({"a": 1, "b": 2})
    value = bytearray(worker.real.get("a" + KEY_MARK))
    value[3] ^= 1
    assert worker.real.remove("a" + KEY_MARK, True) == 0
    assert worker.real.put("a" + KEY_MARK, bytes(value)) == 0
    assert worker.load({"a": 5, "b": 6}) == ["CRC_MISMATCH", "ok"]


def test_a_value_written_under_another_layout_is_a_version_mismatch(worker):
    worker.put({"a": 1})
    value = worker.real.get("a" + KEY_MARK)
    trailer = Trailer.decode(value[-TRAILER_BYTES:])
    other = trailer._replace(layout=layout_digest({"layout": "another"})).encode()
    worker.real.put("b" + KEY_MARK, value[:-TRAILER_BYTES] + other)
    worker.real.put("c" + KEY_MARK, value[:-TRAILER_BYTES] + bytes(TRAILER_BYTES))
    assert worker.load({"a": 5, "b": 6, "c": 7}) == ["ok", "VERSION_MISMATCH", "VERSION_MISMATCH"]


def test_a_block_that_changes_after_its_job_was_registered_is_caught_and_its_key_removed(worker):
    def overwrite():
        worker.kv_cache[:, 2] = 0

    assert worker.put({"a": 1, "b": 2}, between=overwrite) == [0, 0]
    (changed,) = worker.changed
    assert changed.key == "b"
    assert changed.address == segments(worker.kv_cache, 2)[0]
    assert changed.after == 0 != changed.before
    assert changed.removed == 0
    assert worker.store.batch_is_exist(["a", "b"]) == [1, 0]


def test_a_key_that_is_caught_while_it_is_leased_is_removed_all_the_same(worker):
    # A lookup by anybody leases a key, and the store refuses to remove a leased key that is asked for politely.
    real_put = worker.real.batch_put_from_multi_buffers

    class LookedUpAtOnce:
        def __getattr__(self, name):
            return getattr(worker.real, name)

        def batch_put_from_multi_buffers(self, keys, *rest):
            results = real_put(keys, *rest)
            assert worker.real.batch_is_exist(keys) == [1]
            assert worker.real.remove(keys[0]) == -706
            return results

    worker.store._store = LookedUpAtOnce()
    worker.put({"a": 1}, between=worker.kv_cache[:, 1].zero_)
    assert [changed.removed for changed in worker.changed] == [0]
    assert worker.store.batch_is_exist(["a"]) == [0]


def test_values_without_a_trailer_are_not_seen_and_stay_what_they_are(worker):
    assert worker.real.put("a", bytes_of(worker.kv_cache, 1)) == 0
    assert worker.store.batch_is_exist(["a"]) == [0]
    assert worker.put({"a": 2}) == [0]
    assert worker.real.get("a") == bytes_of(worker.kv_cache, 1)


def test_more_keys_than_a_thread_has_slots_are_moved_in_several_calls(worker):
    keys = {f"key{number}": number % BLOCKS for number in range(2500)}
    assert set(worker.put(keys)) == {0}
    assert set(worker.load(keys)) == {"ok"}


def test_each_part_of_a_long_put_names_the_groups_of_its_own_keys():
    class Groups:  # Mooncake refuses a call whose groups are not as many as its keys
        def register_buffer(self, *_):
            return 0

        def batch_put_from_multi_buffers(self, keys, addrs, sizes, config):
            assert config.group_ids == [f"group of {key.removesuffix(KEY_MARK)}" for key in keys]
            return [0] * len(keys)

    tensor = cache(1)
    store = GuardedStore(Groups(), Guard(Fingerprints([tensor]), [b"x" * 16], lambda _: 0, 1), print)
    keys = [f"k{number}" for number in range(SLOTS + 10)]
    groups = [f"group of {key}" for key in keys]
    config = ReplicateConfig()
    config.group_ids = groups
    results = store.batch_put_from_multi_buffers(keys, [[0]] * len(keys), [[8]] * len(keys), config)
    assert results == [0] * len(keys)
    assert config.group_ids == groups


def test_a_sampled_save_has_fingerprints_for_its_sample_only(master):
    fixture = Fixture(every_keys=4)
    keys = {f"m@group:0@{number:032x}": number for number in range(BLOCKS)}
    fixture.put(keys)
    for key in keys:
        trailer = Trailer.decode(fixture.real.get(key + KEY_MARK)[-TRAILER_BYTES:])
        assert (trailer.fingerprint is not None) == fixture.guard.chooses(key)
    assert set(fixture.load(keys)) == {"ok"}
    fixture.real.remove_all(True)
    fixture.real.close()
