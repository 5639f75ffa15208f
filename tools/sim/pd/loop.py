"""An asyncio event loop in virtual time: what it runs is due on the run's clock, among everything else.

It has what the two sides of a P/D worker use of a loop, and nothing else. This file knows the clock.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tools.sim.clock import Clock

Connect = Callable[[str, int], Coroutine[Any, Any, None]]
"""Returns if somebody listens at a host and port, and raises what a socket raises if not."""


class _Task(asyncio.Task[Any]):
    """A task with a number for its hash: sets of tasks, as `asyncio.wait` returns, are walked alike everywhere."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **about: Any) -> None:
        self._number = number
        super().__init__(coro, **about)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of one side of one worker.

    Args:
        clock: the run's time.
        connect: how a plain connection comes about.

    Attributes:
        dead: the process that the loop is in has been killed; nothing of it runs any more.
        errors: what asyncio reports: exceptions that nobody took.
    """

    def __init__(self, clock: Clock, connect: Connect) -> None:
        self.dead = False
        self.errors: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._made = 0
        self._clock = clock
        self._connect = connect

    # --- what asyncio asks of a loop --------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        """Return False: debugging would cost and change nothing."""
        return False

    def is_running(self) -> bool:
        """Return whether the process is alive."""
        return not self.dead

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def time(self) -> float:
        """Return virtual time, in seconds."""
        return self._clock.now_ns / 1e9

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """Run something now, after what is due before it."""
        handle = asyncio.Handle(callback, args, self, context)
        self._clock.at(self._clock.now_ns, lambda: self._run(handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run something now: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run something after `delay` seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run something at a time."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.at(max(self._clock.now_ns, round(when * 1e9)), lambda: self._run(handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: a cancelled handle does not run."""

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Return a task that runs a coroutine."""
        self._made += 1
        task = _Task(self._made, coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a function that blocks as a call of the clock, which may wait in virtual time."""
        future = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the future
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self._clock.start(call)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect, as far as a probe needs it: the transport can only be closed."""
        await self._connect(str(host), int(port))
        protocol = protocol_factory()
        return _Closable(), protocol

    def abandon(self) -> None:
        """Cancel every task; the clock then has to go on a little, so that each may end."""
        self.dead = False
        for task in list(self._tasks):
            task.cancel()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what asyncio reports."""
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {type(error).__name__}: {error}")

    # --- running ----------------------------------------------------------------------------------------------------

    def _run(self, handle: asyncio.Handle) -> None:
        if self.dead or handle.cancelled():
            return
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)


class _Closable(asyncio.Transport):
    """A connection on which nothing is said."""

    def close(self) -> None:
        """Nothing to close."""

    def is_closing(self) -> bool:
        """Return False."""
        return False
