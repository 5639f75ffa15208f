"""The contract of the store connector's scheduler half, on vLLM's real scheduler and block pool in a plain process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connector.runtime.failures import Failure
from connector.store.metadata import JobReport, LoadReport
from ledger import events as ev
from ledger.blocks import numbers
from ledger.errors import InvariantViolation, SettingsError
from ledger.state.apply import State
from tests.support.log_files import logged
from tools.plain_scheduler import BLOCK_SIZE, PlainScheduler, jobs_of

Make = Callable[..., "Recorded"]


class Recorded(PlainScheduler):
    """A plain scheduler that also keeps the events that its connector appends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.events: list[ev.Event] = []
        log = self.connector.ledger.log
        append = log.append

        def keep(kind: type[ev.Event], **fields: Any) -> ev.Event:
            self.events.append(append(kind, **fields))
            return self.events[-1]

        log.append = keep

    @property
    def state(self) -> State:
        return self.connector.ledger.state

    def of(self, kind: type[ev.Event]) -> list[Any]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def references(self, blocks: list[int]) -> list[int]:
        """Return how often each block is referenced in vLLM's pool."""
        return [self.pool.blocks[block].ref_cnt for block in blocks]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Recorded] = []

    def build(extra: dict[str, Any] | None = None, **options: Any) -> Recorded:
        made.append(Recorded("KVLedgerStoreConnector", {"max_pinned_fraction": 1.0, **(extra or {})}, **options))
        return made[-1]

    yield build
    for plain in made:
        plain.close()


def prompt(blocks: int, first: int = 3) -> list[int]:
    """Return tokens for `blocks` full blocks and one token more."""
    return [first + n % 400 for n in range(blocks * BLOCK_SIZE + 1)]


def done(job: int, rank: int = 0, outcome: str = "stored") -> JobReport:
    return JobReport(job, rank, outcome)


# --- store jobs -------------------------------------------------------------------------------------------------------


def test_a_save_is_registered_and_pinned_in_the_step_that_plans_it(make: Make) -> None:
    plain = make()
    plain.add("a", prompt(4))
    output = plain.step()
    assert jobs_of(output) == [0]
    (registered,), (pinned,) = plain.of(ev.JobRegistered), plain.of(ev.PinTouched)
    assert (registered.job, registered.request, registered.generation, registered.tokens) == (0, "a", 1, 64)
    blocks = numbers(pinned.blocks)
    assert len(blocks) == 5
    assert plain.references(blocks) == [2] * 5


def test_blocks_stay_pinned_until_every_rank_reports(make: Make) -> None:
    plain = make(world_size=3)
    plain.add("a", prompt(4))
    plain.step()
    blocks = numbers(plain.of(ev.PinTouched)[0].blocks)
    plain.step([done(0, 2)])
    plain.step([done(0, 0, "failed")])
    assert plain.references(blocks) == [2] * 5
    assert plain.connector.has_pending_push_work()
    plain.step([done(0, 1)])
    assert plain.references(blocks) == [1] * 5
    assert not plain.connector.has_pending_push_work()
    assert plain.of(ev.JobSettled)[0].failed_ranks == ((0, 0),)


def test_a_finished_request_frees_its_own_references_at_once_and_the_job_keeps_its_own(make: Make) -> None:
    plain = make()
    plain.add("a", prompt(4), max_tokens=1)
    plain.step()
    blocks = numbers(plain.of(ev.PinTouched)[0].blocks)
    assert "a" not in plain.scheduler.requests
    assert plain.references(blocks) == [1] * 5
    assert plain.of(ev.BlocksReleased)
    plain.step([done(0)])
    assert plain.references(blocks) == [0] * 5


def test_blocks_are_freed_tail_first_so_that_shared_prefixes_are_evicted_last(make: Make) -> None:
    plain = make()
    plain.add("a", prompt(4), max_tokens=1)
    plain.step()
    blocks = numbers(plain.of(ev.PinTouched)[0].blocks)
    plain.step([done(0)])
    free = [block.block_id for block in plain.pool.free_block_queue.get_all_free_blocks()]
    assert free[0] == blocks[4]  # no hash, reused first
    assert free[-4:] == list(reversed(blocks[:4]))


def preempted_with_its_job_open(make: Make) -> tuple[Recorded, int]:
    """Return a scheduler that has just preempted request "b", and the job of "b" that is still open."""
    plain = make(num_blocks=16)
    plain.add("a", prompt(4), max_tokens=60)
    plain.add("b", prompt(4, first=100), max_tokens=60)
    plain.step()
    (old,) = [event.job for event in plain.of(ev.JobRegistered) if event.request == "b"]
    for _ in range(100):
        plain.step([done(job) for job in list(plain.state.book.jobs) if job != old])
        if plain.of(ev.RequestPreempted):
            return plain, old
    pytest.fail("the pool was not small enough to preempt")


def resume(plain: Recorded, old: int) -> None:
    for _ in range(200):
        plain.step([done(job) for job in list(plain.state.book.jobs) if job != old])
        if plain.of(ev.RequestResumed):
            return
    pytest.fail("the preempted request did not run again")


def test_a_preempted_request_comes_back_as_a_new_generation_and_its_old_job_keeps_its_blocks(make: Make) -> None:
    plain, old = preempted_with_its_job_open(make)
    (preempted,) = plain.of(ev.RequestPreempted)
    assert (preempted.request, preempted.generation) == ("b", 1)
    held = numbers(plain.state.book.jobs[old].blocks)
    assert plain.references(held) == [1] * 5
    (released,) = [event for event in plain.of(ev.BlocksReleased) if event.request == "b"]
    assert numbers(released.blocks) == held
    resume(plain, old)
    (resumed,) = plain.of(ev.RequestResumed)
    assert (resumed.request, resumed.generation) == ("b", 2)
    assert min(plain.references(held)) >= 1


def test_a_late_report_of_an_old_generation_retires_only_its_own_job(make: Make) -> None:
    plain, old = preempted_with_its_job_open(make)
    resume(plain, old)
    new = [event.job for event in plain.of(ev.JobRegistered) if event.request == "b" and event.generation == 2]
    assert new
    plain.update(plain.schedule(), kv_connector_worker_meta=plain.reports([done(old)]))
    assert old not in plain.state.book.jobs
    assert set(new) <= set(plain.state.book.jobs)


@pytest.mark.parametrize(
    ("reports", "rule"),
    [
        ([done(0, 0), done(0, 0)], "rank_reported_twice"),
        ([done(0, 7)], "unexpected_rank"),
        ([done(99)], "unknown_job"),
    ],
)
def test_a_contradicting_report_ends_the_engine_and_frees_nothing(
    make: Make, reports: list[JobReport], rule: str
) -> None:
    plain = make(world_size=2)
    plain.add("a", prompt(4))
    plain.step()
    blocks = numbers(plain.of(ev.PinTouched)[0].blocks)
    with pytest.raises(InvariantViolation) as raised:
        plain.step(reports)
    assert raised.value.rule == rule
    assert "kvledger replay" in str(raised.value)
    assert plain.of(ev.InvariantViolated)[0].rule == rule
    assert min(plain.references(blocks)) >= 1


def test_a_report_for_a_settled_job_is_an_over_report(make: Make) -> None:
    plain = make()
    plain.add("a", prompt(4))
    plain.step()
    plain.step([done(0)])
    with pytest.raises(InvariantViolation) as raised:
        plain.step([done(0)])
    assert raised.value.rule == "job_already_settled"


def test_quarantine_keeps_the_blocks_serves_on_and_says_so_once(make: Make) -> None:
    plain = make({"on_invariant_violation": "quarantine"}, world_size=2)
    plain.add("a", prompt(4))
    plain.step()
    blocks = numbers(plain.of(ev.PinTouched)[0].blocks)
    with logged() as said:
        for _ in range(3):
            plain.step([done(0, 0)])
        plain.step([done(0, 1)])
    assert plain.references(blocks) == [2] * 5
    assert not plain.of(ev.BlocksFreed)
    assert not plain.connector.has_pending_push_work()  # nothing more will come of it
    assert sum("rank_reported_twice" in line for line in said.lines) == 1
    assert plain.state.book.jobs[0].quarantined


# --- the bound on what store jobs may hold ----------------------------------------------------------------------------


def test_beyond_the_bound_on_jobs_a_save_is_skipped_recorded_once_and_pins_nothing(make: Make) -> None:
    plain = make({"max_inflight_store_jobs": 1})
    plain.add("a", prompt(4))
    plain.add("b", prompt(4, first=100))
    output = plain.step()
    assert jobs_of(output) == [0]
    (skipped,) = plain.of(ev.JobSkipped)
    assert (skipped.request, skipped.reason, skipped.limit) == ("b", "max_inflight_store_jobs", 1)
    assert len(plain.of(ev.PinTouched)) == 1


def test_a_skipped_range_is_saved_by_a_later_job_of_the_same_request(make: Make) -> None:
    plain = make({"max_inflight_store_jobs": 1}, num_blocks=200)
    plain.add("a", prompt(4))
    long = [7 + n % 300 for n in range(1010)]  # shares no prefix with "a"
    plain.add("b", long)
    plain.step([done(0)])  # "a" whole, and a first part of "b", whose save is skipped
    assert [event.request for event in plain.of(ev.JobSkipped)] == ["b"]
    plain.step()  # the second part of "b"
    (saved,) = [event for event in plain.of(ev.JobRegistered) if event.request == "b"]
    assert saved.tokens > plain.of(ev.JobSkipped)[0].tokens


def test_beyond_the_bound_on_blocks_a_save_is_skipped(make: Make) -> None:
    plain = make({"max_pinned_fraction": 0.2}, num_blocks=41)
    plain.add("a", prompt(4))
    plain.add("b", prompt(4, first=100))
    plain.step()
    (skipped,) = plain.of(ev.JobSkipped)
    assert (skipped.reason, skipped.limit, skipped.planned_blocks) == ("max_pinned_fraction", 8, 5)
    assert plain.state.pinned_blocks() == 5


# --- loads ------------------------------------------------------------------------------------------------------------


def loading(make: Make, world_size: int = 1, **options: Any) -> tuple[Recorded, list[int]]:
    """Return a scheduler with one load of four blocks given to the workers, and these blocks."""
    plain = make(world_size=world_size, **options)
    plain.lookup.hits["a"] = 4 * BLOCK_SIZE
    plain.add("a", prompt(4))
    plain.step()
    (planned,) = plain.of(ev.LoadPlanned)
    return plain, numbers(planned.blocks)


def test_a_load_is_planned_registered_and_told_to_the_workers_by_its_id(make: Make) -> None:
    plain, blocks = loading(make)
    (registered,) = plain.of(ev.LoadRegistered)
    assert registered.load == 0
    assert len(blocks) == 4
    assert plain.state.book.requests["a"].state == "loading"


def test_a_load_settles_when_every_rank_has_answered_and_the_request_runs(make: Make) -> None:
    plain, _ = loading(make, world_size=2)
    plain.step(loads=[LoadReport(0, 0, "loaded")])
    assert not plain.of(ev.LoadSettled)
    plain.step(loads=[LoadReport(0, 1, "loaded")], finished_recving={"a"})
    assert plain.of(ev.LoadSettled)[0].outcome == "loaded"
    plain.step()
    assert plain.of(ev.RequestScheduled)[0].computed_tokens == 4 * BLOCK_SIZE
    assert not plain.of(ev.BlocksAllocated)


def test_a_failed_load_fails_once_settles_after_all_ranks_and_is_recomputed(make: Make) -> None:
    plain, blocks = loading(make, world_size=3)
    failed = ((0, ((blocks[2], blocks[2]),)),)
    bad = Failure("BLOCK_NOT_FOUND", "-704", "STORE_GET", blocks=failed, keys=1)
    plain.step(loads=[LoadReport(0, 1, "failed", bad), LoadReport(0, 0, "failed", bad)])
    assert len(plain.of(ev.LoadFailed)) == 1
    assert plain.of(ev.LoadFailed)[0].rank == 1
    assert not plain.of(ev.LoadSettled)
    plain.step(loads=[LoadReport(0, 2, "loaded")], finished_recving={"a"}, invalid_block_ids={blocks[2]})
    assert plain.of(ev.LoadSettled)[0].outcome == "failed"
    assert plain.of(ev.LoadRecovered)[0].action == "recomputed"
    plain.step()
    assert plain.of(ev.RequestScheduled)[0].computed_tokens < 4 * BLOCK_SIZE


def test_a_failed_load_ends_the_request_when_the_policy_says_fail(make: Make) -> None:
    plain, blocks = loading(make, kv_load_failure_policy="fail")
    report = LoadReport(0, 0, "failed", Failure("BLOCK_NOT_FOUND", "-704", "STORE_GET"))
    plain.step(loads=[report], finished_recving={"a"}, invalid_block_ids=set(blocks))
    assert plain.of(ev.RequestFinished)[0].reason == "error"
    assert plain.of(ev.LoadRecovered)[0].action == "failed"
    assert "a" not in plain.scheduler.requests


def test_a_late_or_second_answer_of_a_rank_is_recorded_and_changes_nothing(make: Make) -> None:
    plain, _ = loading(make)
    plain.step(loads=[LoadReport(0, 0, "loaded")], finished_recving={"a"})
    scheduled = plain.schedule()
    before = plain.state.digest()
    plain.update(
        scheduled,
        kv_connector_worker_meta=plain.reports([], [LoadReport(0, 0, "failed", Failure("UNKNOWN", "", "STORE_GET"))]),
    )
    assert plain.of(ev.ReportIgnored)
    assert not plain.of(ev.LoadFailed)
    assert plain.state.digest() == before


def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_settles(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    plain, blocks = loading(make)
    plain.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert not plain.of(ev.BlocksReleased)  # vLLM keeps them, so the log must not say that they were given up
    assert plain.of(ev.RequestAborted)[0].was == "loading"
    assert plain.references(blocks) == [1] * 4
    plain.step(loads=[LoadReport(0, 0, "loaded")], finished_recving={"a"})
    assert plain.references(blocks) == [0] * 4
    assert not plain.state.book.loads


# --- the rest of the contract -----------------------------------------------------------------------------------------


def test_an_abort_of_a_request_that_never_ran_leaves_no_job_and_no_pin(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    plain = make()
    plain.add("a", prompt(4))
    plain.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    plain.step()
    assert plain.of(ev.RequestAborted)[0].was == "queued"
    assert not plain.of(ev.JobRegistered)
    assert not plain.state.book.requests


def test_polls_of_the_store_are_recorded_only_when_the_answer_changes(make: Make) -> None:
    plain = make(num_blocks=6)
    plain.add("a", prompt(4), max_tokens=8)
    plain.add("b", prompt(4, first=100), max_tokens=8)  # waits for blocks, and is looked up in every step
    for _ in range(6):
        plain.step([done(job) for job in list(plain.state.book.jobs)])
    assert len([event for event in plain.of(ev.LookupAnswered) if event.request == "b"]) <= 1


def test_request_ids_are_hashed_when_the_setting_says_so(make: Make) -> None:
    plain = make({"hash_request_ids": True})
    plain.add("customer-7", prompt(4), max_tokens=1)
    plain.step()
    plain.step([done(0)])
    assert "customer-7" not in repr(plain.events)
    assert plain.of(ev.JobRegistered)[0].request == plain.of(ev.RequestFinished)[0].request


def test_the_fold_of_the_log_is_the_live_state_after_every_step(make: Make) -> None:
    plain = make(num_blocks=14, world_size=2)
    folded, seen = State(), 0
    for index in range(6):
        plain.add(f"r{index}", prompt(3, first=10 * index + 3), max_tokens=60)
    for _ in range(120):
        jobs = [done(number, rank) for number, job in plain.state.book.jobs.items() for rank in job.waiting]
        plain.step(jobs)
        for event in plain.events[seen:]:
            folded.apply(event)
        seen = len(plain.events)
        assert folded.digest() == plain.state.digest()
    assert plain.of(ev.RequestPreempted)


def test_upstreams_own_ledger_of_pins_stays_empty(make: Make) -> None:
    plain = make()
    plain.add("a", prompt(4))
    plain.step()
    assert plain.half._next_store_job_id == 1
    assert dict(plain.half._pinned_saves) == {}


def test_wrong_settings_are_listed_all_at_once() -> None:
    with pytest.raises(
        SettingsError, match=r"ledgr_path.*did you mean 'ledger_path'.*max_pinned_fraction must be at most 1"
    ):
        PlainScheduler(extra={"ledgr_path": "x", "max_pinned_fraction": 2.0})


def test_a_clean_shutdown_ends_the_log_with_log_closed_once(make: Make) -> None:
    plain = make()
    plain.connector.shutdown()
    plain.connector.shutdown()
    assert [type(event) for event in plain.events[-1:]] == [ev.LogClosed]
    assert plain.events[-1].reason == "shutdown"


def test_a_shutdown_during_an_exception_does_not_claim_a_clean_end(make: Make) -> None:
    plain = make()
    try:
        plain.schedule = plain.pool.no_such_thing
    except AttributeError:
        plain.connector.shutdown()
    closed = plain.of(ev.LogClosed)[0]
    assert (closed.reason, closed.exception) == ("exception", "AttributeError")


# --- hybrid models ----------------------------------------------------------------------------------------------------


def test_boundary_states_of_a_hybrid_model_are_pinned_with_their_group_and_freed_last(make: Make) -> None:
    plain = make(num_blocks=60, hybrid=True)
    plain.add("a", [3 + n for n in range(64)], max_tokens=1)
    plain.step()
    plain.step()
    (pinned,) = plain.of(ev.PinTouched)
    assert {group for group, _ in pinned.blocks} == {0, 1}
    assert len(set(numbers(pinned.blocks))) == len(numbers(pinned.blocks))
    assert plain.references(numbers(pinned.blocks)) == [1] * len(numbers(pinned.blocks))
    freed: list[int] = []
    free_blocks = plain.pool.free_blocks
    plain.pool.free_blocks = lambda blocks: free_blocks([freed.append(block.block_id) or block for block in blocks])
    plain.step([done(0)])
    assert freed == list(reversed(numbers(pinned.blocks)))
    assert plain.pool.get_num_free_blocks() == 59


def test_a_prompts_partial_tail_is_a_job_of_its_own_that_pins_the_state_and_the_attention_blocks(make: Make) -> None:
    plain = make(num_blocks=60, hybrid=True)
    plain.add("a", [3 + n for n in range(150)], max_tokens=8)
    plain.step()
    plain.step()
    prefix, tail = plain.of(ev.PinTouched)
    assert [group for group, _ in prefix.blocks] == [0]
    assert [group for group, _ in tail.blocks] == [0, 1]
    assert plain.references(numbers(tail.blocks))[0] == 3  # the request, the prefix job, and this job


def test_a_tail_that_is_handed_over_at_the_end_of_a_request_is_pinned_before_its_blocks_are_freed(make: Make) -> None:
    plain = make(num_blocks=60, hybrid=True)
    request = plain.add("a", [3 + n for n in range(150)], max_tokens=50)
    plain.step()
    plain.step()
    plain.step([done(0), done(1)])
    tables = plain.scheduler.kv_cache_manager.get_block_ids("a")
    state = next(block for block in tables[1] if block)
    before = len(plain.of(ev.JobRegistered))
    plain.connector.register_finished_partial_tail(request, tables, [(1, state, 144)])
    (job,) = plain.of(ev.JobRegistered)[before:]
    pinned = plain.of(ev.PinTouched)[-1]
    assert pinned.job == job.job
    assert state in numbers(pinned.blocks)
    assert plain.references([state]) == [2]
    output = plain.step()
    assert job.job in jobs_of(output)
    plain.step([done(job.job)])
    assert not plain.state.book.jobs


def test_a_tail_beyond_the_bound_is_skipped_and_not_handed_to_the_workers(make: Make) -> None:
    plain = make({"max_inflight_store_jobs": 1}, num_blocks=60, hybrid=True)
    request = plain.add("a", [3 + n for n in range(150)], max_tokens=50)
    plain.step()
    plain.step()
    tables = plain.scheduler.kv_cache_manager.get_block_ids("a")
    state = next(block for block in tables[1] if block)
    plain.connector.register_finished_partial_tail(request, tables, [(1, state, 144)])
    assert plain.references([state]) == [1]
    assert len(plain.of(ev.JobRegistered)) == 1
    assert jobs_of(plain.step()) == []


# --- roles and company ------------------------------------------------------------------------------------------------


def test_as_a_child_of_a_multi_connector_the_books_are_the_same(make: Make) -> None:
    plain = Recorded("MultiConnector", {"max_pinned_fraction": 1.0})
    plain.add("a", prompt(4), max_tokens=2)
    output = plain.schedule()
    metadata: Any = output.kv_connector_metadata
    jobs = [req_meta.store_job_id for req_meta in metadata.metadata[0].requests if req_meta.can_save]
    assert jobs == [0]
    blocks = numbers(plain.of(ev.PinTouched)[0].blocks)
    assert plain.references(blocks) == [3] * 5  # the request, our job, and the other child's job
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata

    reports = (plain.reports([done(0)]), MooncakeStoreWorkerMetadata(completed_saves={0: 1}))
    plain.update(output, kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(metadata=reports))
    assert plain.references(blocks) == [1] * 5
    assert not plain.connector.has_pending_push_work()
    plain.scheduler.connector.shutdown()
    plain.close()


def test_a_load_that_another_connector_was_chosen_for_is_not_planned(make: Make) -> None:
    plain = make()
    plain.lookup.hits["a"] = 4 * BLOCK_SIZE
    request = plain.add("a", prompt(4))
    plain.connector.get_num_new_matched_tokens(request, 0)
    plain.connector.update_state_after_alloc(request, plain.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0)
    assert plain.of(ev.LookupAnswered)
    assert not plain.of(ev.LoadPlanned)


def test_a_consumer_that_saves_decode_cache_registers_jobs_only_while_it_decodes(make: Make) -> None:
    plain = make({"save_decode_cache": True}, kv_role="kv_consumer", num_blocks=60)
    plain.add("a", prompt(2), max_tokens=40)
    assert jobs_of(plain.step()) == []
    for _ in range(30):
        plain.step([done(job) for job in list(plain.state.book.jobs)])
    assert plain.of(ev.JobRegistered)
    assert all(event.tokens >= 2 * BLOCK_SIZE for event in plain.of(ev.JobRegistered))


def test_a_capacity_only_instance_keeps_books_of_requests_and_of_nothing_else(make: Make) -> None:
    plain = make({"enable_lookup": False}, kv_role="kv_consumer")
    plain.add("a", prompt(4), max_tokens=2)
    for _ in range(4):
        plain.step()
    assert plain.of(ev.RequestFinished)
    assert not plain.of(ev.JobRegistered)
    assert not plain.of(ev.LookupAnswered)


def test_a_reset_of_the_prefix_cache_is_refused_while_jobs_hold_blocks_and_works_after(make: Make) -> None:
    plain = make()
    plain.add("a", prompt(4), max_tokens=1)
    plain.step()
    assert plain.scheduler.reset_prefix_cache() is False
    plain.step([done(0)])
    assert plain.scheduler.reset_prefix_cache() is True


def test_running_requests_that_a_reset_preempts_come_back_as_new_generations(make: Make) -> None:
    plain = make()
    plain.add("a", prompt(4), max_tokens=20)
    plain.step([done(0)])
    plain.step()
    plain.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(3):
        plain.step([done(job) for job in list(plain.state.book.jobs)])
    assert [event.generation for event in plain.of(ev.RequestPreempted)] == [1]
    assert [event.generation for event in plain.of(ev.RequestResumed)] == [2]


def test_a_reset_of_the_store_drops_planned_loads_and_answers_what_the_worker_says(make: Make) -> None:
    plain = make()
    plain.lookup.hits["a"] = 4 * BLOCK_SIZE
    request = plain.add("a", prompt(4))
    plain.connector.get_num_new_matched_tokens(request, 0)
    assert plain.half.load_specs
    plain.lookup.reset = lambda: True  # type: ignore[attr-defined]
    assert plain.connector.reset_cache() is True
    assert not plain.half.load_specs
