"""Work in the background that an ending program waits for, whichever of its threads ends last."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..errors import Invalid

Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


def runs_atexit() -> bool:
    """Whether this is the main thread after its program: it runs what was registered with atexit."""
    main = threading.main_thread()
    return threading.current_thread() is main and not main.is_alive()


def interpreter_ends() -> bool:
    """Whether Python does not wait for what this thread begins: the program has ended.

    It waits for threads that are no daemons, which go on after the main thread has returned.
    """
    return runs_atexit() or (threading.current_thread().daemon and not threading.main_thread().is_alive())


def expect_open(url: str, step: int, is_closed: bool) -> None:
    """Refuses a save of a checkpointer that is closed, or of a program that ends.

    Raises:
        Invalid: Says which of them.
    """
    reason = "this checkpointer is closed"
    if not is_closed:
        if not interpreter_ends():
            return
        reason = "the interpreter ends, and runs what was registered with atexit: save before the program ends"
    raise Invalid(f"{url}: step {step} cannot be saved: {reason}")


class Background:
    """One thread for work, in order. It lives while there is work, and Python waits for it.

    An executor of the standard library takes no more work once the main thread has returned, though others go on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Work] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Has ``work`` called with the arguments after all that was submitted before."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, work, arguments))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="shardfast-commit", daemon=False)
                try:
                    thread.start()
                except BaseException:
                    self._waiting.pop()
                    raise
                self._thread = thread
        return future

    def wait(self) -> None:
        """Waits until all work is done."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                next_one = [self._waiting.popleft()]
            _do(*next_one.pop())


def _do(future: Future[Any], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = work(*arguments)
    except BaseException as error:
        future.set_exception(error)
        del future, work, arguments  # the error refers to this frame, and the future to the error
    else:
        future.set_result(result)
