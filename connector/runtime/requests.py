"""What vLLM does to requests, as events: queued, scheduled, preempted, resumed, ended, or given blocks in use.

A scheduler half passes vLLM's hooks on to `RequestObserver`, which records what is new in them. It may know vLLM's
requests and scheduler output; of jobs, loads and transfers it knows only which blocks they name.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from connector.runtime.runtime import LedgerRuntime
from ledger import events as ev
from ledger.blocks import NULL_BLOCK, Blocks, by_group, expand, from_ranges

GroupIds = tuple[int, list[int]]
"""A KV-cache group and block numbers in it."""


class RequestObserver:
    """Records what vLLM does to requests.

    Args:
        ledger: where it is recorded.
        block_sizes: tokens in a block, by KV-cache group.
    """

    def __init__(self, ledger: LedgerRuntime, block_sizes: Sequence[int]) -> None:
        self._ledger = ledger
        self._book = ledger.state.book
        self._name = ledger.name
        self._block_sizes = tuple(block_sizes)

    def queued(self, request: Request) -> None:
        """Record that a request waits."""
        self._ledger.record(
            ev.RequestQueued,
            request=self._name(request.request_id),
            generation=generation_of(request),
            prompt_tokens=request.num_prompt_tokens,
        )

    def ended(self, request: Request) -> None:
        """Record that a request ended or was aborted."""
        name = self._name(request.request_id)
        generation = generation_of(request)
        if request.status == RequestStatus.FINISHED_ABORTED:
            record = self._book.requests.get(name)
            was = record.state if record is not None else "unknown"
            self._ledger.record(ev.RequestAborted, request=name, generation=generation, was=was)
        else:
            reason = request.status.name.removeprefix("FINISHED_").lower()
            self._ledger.record(ev.RequestFinished, request=name, generation=generation, reason=reason)

    def released(self, request: Request, groups: Iterable[GroupIds]) -> None:
        """Record those blocks that a request gave up while open work names them.

        One that ends while it loads gives up nothing yet: vLLM keeps its blocks until the load is over, and then no
        open work names them.
        """
        book = self._book
        if self._name(request.request_id) in book.loading:
            return
        if book.jobs or book.loads or book.sends or book.recvs:
            named = self._named(groups)
            self._note(ev.BlocksReleased, self._name(request.request_id), generation_of(request), named)

    def seen(self, request: Request) -> None:
        """Record a preemption that vLLM has not reported yet: it reports them only at the end of the step."""
        name = self._name(request.request_id)
        record = self._book.requests.get(name)
        if record is not None and record.generation < generation_of(request):
            self._preempted(name, generation_of(request) - 1)

    def step(self, scheduler_output: SchedulerOutput) -> None:
        """Record what vLLM did to requests in this step, and who got blocks that open work names."""
        book = self._book
        cached = scheduler_output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        open_work = book.jobs or book.loads or book.sends or book.recvs
        if not (open_work or scheduler_output.scheduled_new_reqs or scheduler_output.preempted_req_ids or resumed):
            return
        name_of = self._name
        requests = book.requests
        for request_id in sorted(scheduler_output.preempted_req_ids or ()):
            record = requests.get(name_of(request_id))
            if record is not None and record.state == "running":
                self._preempted(name_of(request_id), record.generation)
        scheduled_tokens = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._running(name_of(new.req_id), new.num_computed_tokens, scheduled_tokens[new.req_id], new.block_ids)
        if not resumed and not open_work:
            return
        for request_id, computed_tokens, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if request_id in resumed:
                self._running(name_of(request_id), computed_tokens, scheduled_tokens[request_id], block_ids or ())
            elif block_ids and open_work:
                name = name_of(request_id)
                record = requests.get(name)
                self.allocated(name, record.generation if record else 1, enumerate(block_ids))

    def allocated(self, name: str, generation: int, groups: Iterable[GroupIds]) -> None:
        """Record those blocks of a new allocation that open work names, but for the request's own work."""
        book = self._book
        if not (book.jobs or book.loads or book.sends or book.recvs):
            return
        named = self._named(groups)
        if not named:
            return
        own: set[tuple[int, int]] = set()
        for mine in (book.loads.get(book.loading.get(name, -1)), book.sends.get(name), book.recvs.get(name)):
            if mine is not None:
                own.update(expand(mine.blocks))
        if own:
            named = [(group, [block for block in ids if (group, block) not in own]) for group, ids in named]
        self._note(ev.BlocksAllocated, name, generation, named)

    def _preempted(self, name: str, generation: int) -> None:
        """Record a preemption, and which blocks it gave up that the request's own jobs name."""
        held: dict[int, dict[int, None]] = {}
        for job in self._book.jobs.values():
            if job.request == name and job.generation == generation:
                for group, ranges in job.blocks:
                    held.setdefault(group, {}).update(dict.fromkeys(from_ranges(ranges)))
        self._ledger.record(ev.RequestPreempted, request=name, generation=generation)
        self._note(ev.BlocksReleased, name, generation, [(group, list(ids)) for group, ids in held.items()])

    def _running(self, name: str, computed_tokens: int, scheduled_tokens: int, block_ids: Sequence[list[int]]) -> None:
        record = self._book.requests.get(name)
        generation = record.generation if record is not None else 1
        fresh = ((group, ids[computed_tokens // self._block_sizes[group] :]) for group, ids in enumerate(block_ids))
        self.allocated(name, generation, fresh)
        self._ledger.record(
            ev.RequestScheduled if generation == 1 else ev.RequestResumed,
            request=name,
            generation=generation,
            computed_tokens=computed_tokens,
            scheduled_tokens=scheduled_tokens,
        )

    def _named(self, groups: Iterable[GroupIds]) -> list[GroupIds]:
        named = self._ledger.state.named
        return [(group, found) for group, ids in groups if (found := named(group, ids))]

    def _note(
        self, kind: type[ev.BlocksAllocated | ev.BlocksReleased], name: str, generation: int, groups: list[GroupIds]
    ) -> None:
        blocks = by_group(groups)
        if blocks:
            self._ledger.record(kind, request=name, generation=generation, blocks=blocks)


def generation_of(request: Request) -> int:
    """Return which generation of its id a request is: 1 at first, one more with each preemption."""
    return request.num_preemptions + 1


def without_null(ids: list[int]) -> list[int]:
    """Return block numbers without vLLM's placeholder block."""
    return [block for block in ids if block != NULL_BLOCK] if NULL_BLOCK in ids else ids


def blocks_of_groups(groups: Iterable[GroupIds]) -> Blocks:
    """Return `groups` as `Blocks`, without vLLM's placeholder block."""
    return by_group((group, without_null(ids)) for group, ids in groups)
