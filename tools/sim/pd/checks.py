"""What must hold after every step of a P/D run, and at its end.

The checks keep their own account: what the workers were told to move, what the network copied, how the topologies of
two engines fit. They read the books to compare them with it.

    ownership   a push reads or writes a block that is not held for its transfer
    wrong_kv    a step attends to KV that is not its prefix's
    book        the book's open transfers differ from what vLLM waits for, or from what is held
    peers       a rank names other peers than the topologies say
    rule        an event breaks a rule of the design
    fold        the log folds to another state than the live one
    stopped     the engine would stop stepping while a transfer is open
    violation   the books cried, and no report was broken
    late        a recv settles later than the books said that it would at the latest
    unsettled   faults have stopped, and something does not settle, or something is left in a worker
    crash       an exception that no rule asks for

This file knows vLLM's scheduler and the plugin's events.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from vllm.v1.request import RequestStatus

from ledger import events as ev
from ledger.blocks import expand
from ledger.state.apply import State
from tools.sim.check import Checks as CommonChecks
from tools.sim.clock import Clock
from tools.sim.pd.engine import Engine

DRAIN_LIMIT = 1 << 30

SLACK_NS = 2_000_000_000
"""From the watchdog's word to the book: two steps, which take half a second each when nothing else goes on."""


class Account:
    """What is held for a transfer on one side: blocks, each with how often it had been given away when that began."""

    def __init__(self, epochs: dict[tuple[int, int], int]) -> None:
        self.epochs = epochs


class Checks(CommonChecks):
    """All checks of one run; see also the class that it extends."""

    def __init__(self, clock: Clock, only: frozenset[str] | None = None) -> None:
        super().__init__(only)
        self.clock = clock
        self.watches: list[EngineWatch] = []
        self._failing = ""

    def fail_in(self, engine: "EngineWatch", kind: str, detail: str) -> None:
        """Note that a check of one engine failed."""
        self._failing = engine.lines[-1].decode() if engine.lines else ""
        self.fail(kind, f"{engine.engine.name}: {detail}")
        self._failing = ""

    def last_event(self) -> str:
        """Return the last event of the engine whose check fails; empty if it is no engine's."""
        return self._failing

    def touched(self, engine: int, rank: int, group: int, block: int, writes: bool, transfers: Sequence[str]) -> None:
        """A push reads or writes a block."""
        self.watches[engine].touched(rank, group, block, writes, transfers)

    def wrong(self, engine: int, detail: str) -> None:
        """A step attended to wrong KV."""
        self.fail("wrong_kv", f"{self.watches[engine].engine.name}: {detail}")


class EngineWatch:
    """The checks of one engine.

    Attributes:
        lines: the log, as JSON.
    """

    def __init__(self, engine: Engine, checks: Checks, digest: Any) -> None:
        self.engine = engine
        self.lines: list[bytes] = []
        self.kinds: dict[str, int] = {}
        self._checks = checks
        self._digest = digest
        self._shadow = State()
        self._epochs = [0] * engine.side.blocks
        self._accounts: dict[str, list[Account]] = {}
        self._failed: dict[tuple[str, str], None] = {}
        self._prefill_of: dict[tuple[str, str], str] = {}
        self._due_ns: dict[tuple[str, str], int] = {}
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(ev.AnyEvent).decode
        self._judges: dict[type, Callable[[Any], None]] = {
            ev.RecvRegistered: self._recv_registered,
            ev.PeersNamed: self._peers_named,
            ev.PeerSettled: self._peer_settled,
            ev.RecvFailed: self._recv_failed,
            ev.RecvRecovered: self._recv_recovered,
            ev.RecvSettled: self._recv_settled,
            ev.Checkpoint: self._checkpoint,
            ev.InvariantViolated: self._violated,
        }
        self._count_gifts()

    def _fail(self, kind: str, detail: str) -> None:
        self._checks.fail_in(self, kind, detail)

    def _count_gifts(self) -> None:
        pool, epochs = self.engine.pool, self._epochs
        give = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> list[Any]:
            blocks = give(num_blocks)
            for block in blocks:
                epochs[block.block_id] += 1
            return blocks

        pool.get_new_blocks = get_new_blocks

    # --- the account --------------------------------------------------------------------------------------------------

    def scheduled(self, metadata: Any) -> None:
        """Take what a step tells the workers into the account."""
        for pulls in metadata.reqs_to_recv.values():
            for meta in pulls.values():
                self._hold(meta.transfer_id, meta.local_block_ids)
                self._checks.count("pulls" if any(meta.local_block_ids) else "pulls without blocks")
        for transfer, blocks in metadata.reqs_to_send.values():
            if any(blocks):
                self._hold(transfer, blocks)
                self._checks.count("sends")

    def _hold(self, transfer: str, blocks: Sequence[Sequence[int]]) -> None:
        epochs = {(group, block): self._epochs[block] for group, ids in enumerate(blocks) for block in ids if block}
        self._accounts.setdefault(transfer, []).append(Account(epochs))

    def touched(self, rank: int, group: int, block: int, writes: bool, transfers: Sequence[str]) -> None:
        """A push reads a block of this engine, or writes it: it must be held for the push's transfer."""
        known = [account for transfer in transfers for account in self._accounts.get(transfer, ())]
        named = [account.epochs[group, block] for account in known if (group, block) in account.epochs]
        does = "written" if writes else "read"
        what = f"block {block} of group {group} is {does} on rank {rank} for {', '.join(transfers)}"
        if not named:
            self._fail("ownership", f"{what}, and is not named by it")
        elif self._epochs[block] not in named:
            self._fail("ownership", f"{what}, and was given to somebody else meanwhile")
        elif self.engine.pool.blocks[block].ref_cnt == 0:
            self._fail("ownership", f"{what}, and is free")

    # --- after a step -------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take what is new in the log, fold it as a replay would, and hold it to the rules."""
        log = self.engine.ledger.log
        for event in log.drain(DRAIN_LIMIT):
            line = self._encode(event)
            self._digest.update(line)
            self.lines.append(line)
            if event.seq != len(self.lines):
                self._fail("rule", f"event {len(self.lines)} has the place {event.seq}")
            read = self._decode(line)
            kind = ev.kind_of(read)
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            judge = self._judges.get(read.__class__)
            if judge is not None:
                judge(read)
            if not read.evidence:
                self._shadow.apply(read)

    def after_step(self) -> None:
        """Compare the book with vLLM and with the log."""
        self.take()
        engine = self.engine
        state = engine.ledger.state
        if self._shadow.encode() != state.encode():
            self._fail("fold", "the log folds to another state than the live one")
        book, requests = state.book, engine.scheduler.requests
        waiting = {name for name, request in requests.items() if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS}
        loading = {name for name, recv in book.recvs.items() if recv.blocks}
        # vLLM takes a request out of its wait in the next schedule, a step after the book has settled it.
        told = engine.scheduler.finished_recving_kv_req_ids
        if waiting - loading - told:
            self._fail(
                "book", f"requests {sorted(waiting - loading - told)} wait for KV, and the book has no recv open"
            )
        for what, opened in (("recv", book.recvs), ("send", book.sends)):
            for name, transfer in opened.items():
                self._is_held(what, name, transfer)
        if (book.recvs or book.sends) and not engine.scheduler.has_requests():
            self._fail("stopped", "the engine would stop stepping while a transfer is open")
        for loop in engine.loops:
            if loop.errors:
                self._fail("crash", loop.errors[0])

    def _is_held(self, what: str, name: str, transfer: Any) -> None:
        blocks = self.engine.pool.blocks
        known = self._accounts.get(transfer.transfer, ())
        for group, block in expand(transfer.blocks):
            if blocks[block].ref_cnt == 0:
                self._fail("book", f"the {what} of {name} is open, and its block {block} is free")
                return
            if not any(account.epochs.get((group, block)) == self._epochs[block] for account in known):
                if what == "send" and transfer.phase == "ready" and not known:
                    return  # it is ready, and the workers hear of it with the next step
                self._fail("book", f"the {what} of {name} is open, and its block {block} is somebody else's")
                return

    # --- rules ------------------------------------------------------------------------------------------------------

    def _recv_registered(self, event: ev.RecvRegistered) -> None:
        self._failed.pop((event.request, event.transfer), None)
        self._prefill_of[event.request, event.transfer] = event.prefill
        self._due_ns[event.request, event.transfer] = event.mono_ns + event.timeout_ns + SLACK_NS

    def _peer_settled(self, event: ev.PeerSettled) -> None:
        """A peer that is asked for several requests has its time again with each that it settles."""
        recv = self.engine.ledger.state.book.recvs
        for name, other in recv.items():
            if other.transfer != event.transfer:
                due = self._due_ns[name, other.transfer]
                self._due_ns[name, other.transfer] = max(due, event.mono_ns + other.timeout_ns + SLACK_NS)

    def _peers_named(self, event: ev.PeersNamed) -> None:
        prefill = self._prefill_of.get((event.request, event.transfer), "")
        here, there = self.engine.side, self.engine.shape.prefills[int(prefill[1:])]
        stage, tp_rank = divmod(event.rank, here.tp)
        if here.tp >= there.tp:
            ranks = [tp_rank * there.tp // here.tp]
        else:
            ranks = [tp_rank * (there.tp // here.tp) + each for each in range(there.tp // here.tp)]
        stages = [stage] if here.pp == there.pp else range(there.pp)
        due = {f"tp{rank} pp{each}" for rank in ranks for each in stages}
        if set(event.peers) != due:
            self._fail("peers", f"rank {event.rank} expects {sorted(event.peers)} to write, and {sorted(due)} will")
        if len(due) > 1:
            self._checks.count("recvs of several peers")
        if here.pp != there.pp:
            self._checks.count(f"recvs of {there.pp} stages by {here.pp}")
        if here.tp != there.tp:
            self._checks.count(f"recvs of {there.tp} ranks by {here.tp}")

    def _recv_failed(self, event: ev.RecvFailed) -> None:
        if (event.request, event.transfer) in self._failed:
            self._fail("rule", f"{event.transfer} fails twice")
        self._failed[event.request, event.transfer] = None
        self._checks.count(f"failures: {event.code} at {event.stage}")
        recv = self.engine.ledger.state.book.recvs.get(event.request)
        if recv is not None and recv.waiting:
            self._checks.count("failures while others still write")

    def _recv_recovered(self, event: ev.RecvRecovered) -> None:
        self._checks.count(f"recovered: {event.action}")
        other = {"fail": "recomputed", "recompute": "failed"}[self.engine.shape.policy]
        if event.action == other:
            self._fail("rule", f"{event.transfer} was {event.action} under the policy {self.engine.shape.policy}")

    def _recv_settled(self, event: ev.RecvSettled) -> None:
        self._checks.count(f"recvs {event.outcome}")
        if event.mono_ns > self._due_ns[event.request, event.transfer]:
            self._fail("late", f"{event.transfer} settles after the time at which the watchdog was to settle it")
        if ((event.request, event.transfer) in self._failed) != (event.outcome == "failed"):
            self._fail("rule", f"{event.transfer} settles as {event.outcome}, against what was recorded before")

    def _checkpoint(self, event: ev.Checkpoint) -> None:
        if event.digest != self._shadow.digest():
            self._fail("rule", f"the checkpoint at event {event.seq} differs from what the log folds to")

    def _violated(self, event: ev.InvariantViolated) -> None:
        self._fail("violation", f"{event.rule}: {event.detail}")

    # --- at the end -------------------------------------------------------------------------------------------------

    def is_settled(self) -> bool:
        """Return whether nothing is open."""
        book = self.engine.ledger.state.book
        scheduler = self.engine.scheduler
        open_in_book = scheduler.requests or book.recvs or book.sends or scheduler.has_requests()
        return not open_in_book and not any(_left_in(worker) for worker in self.engine.workers)

    def at_the_end(self) -> None:
        """Check that everything settled, and that nothing is left anywhere."""
        engine, book = self.engine, self.engine.ledger.state.book
        waiting = {name: request.status.name for name, request in engine.scheduler.requests.items()}
        if waiting:
            self._fail("unsettled", f"requests do not end: {waiting}")
        if book.recvs or book.sends or book.requests:
            self._fail("unsettled", f"open: {sorted(book.recvs)}, {sorted(book.sends)}, {sorted(book.requests)}")
        free, total = engine.pool.get_num_free_blocks(), engine.side.blocks - 1
        if free != total:
            self._fail("unsettled", f"{free} of {total} blocks are free")
        for rank, worker in enumerate(engine.workers):
            left = _left_in(worker)
            if left:
                self._fail("unsettled", f"rank {rank} keeps {left}")


def _left_in(worker: Any) -> dict[str, Any]:
    """Return what a worker still keeps of transfers."""
    kept = ("_pulls", "_running", "reqs_need_send", "_pushes", "_asked", "_over")
    return {what: found for what in kept if (found := getattr(worker, what))}
