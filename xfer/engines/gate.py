"""A lock for an in-process engine, which either a thread of its owner or a refit holds. It calls no engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A re-entrant lock, held by one user thread, or by the controller from any thread.

    A waiting controller goes before waiting users, so that a user who generates in a loop does not starve refits. A
    controller whose wait times out changes nothing.
    """

    _CONTROLLER = -1

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth = 0
        self._controllers_waiting = 0
        self._lost = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the gate as a user. Wait while another thread or the controller holds it, except after `let_by`."""
        me = threading.get_ident()
        mine = self._take(me)
        try:
            yield
        finally:
            if mine:
                self._drop(me)

    def close(self, timeout: float | None = None) -> bool:
        """Hold the gate as the controller, until `open`. Re-entrant.

        Args:
            timeout: Seconds to wait for the user; None: no limit.

        Returns:
            Whether the controller holds the gate. If not, the user did not leave in time and the gate is unchanged.
        """
        return self._take(self._CONTROLLER, timeout)

    def open(self) -> None:
        self._drop(self._CONTROLLER)

    def let_by(self) -> None:
        """Let users pass while the controller holds the gate. The engine is lost then, and users must find out instead of waiting."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def keep_out(self) -> None:
        """Undo `let_by`. `close` does that too."""
        self._lost = False

    def _take(self, who: int, timeout: float | None = None) -> bool:
        controller = who == self._CONTROLLER
        with self._changed:
            self._controllers_waiting += controller

            def free() -> bool:
                return self._holder == who or (
                    self._holder is None and (controller or self._lost or not self._controllers_waiting)
                )

            def by() -> bool:
                return self._lost and not controller and self._holder == self._CONTROLLER

            self._changed.wait_for(lambda: free() or by(), timeout)
            self._controllers_waiting -= controller
            mine = free()
            if mine and controller:
                self._lost = False
            if mine:
                self._holder, self._depth = who, self._depth + 1
            else:
                self._changed.notify_all()  # users waited for this controller
            return mine

    def _drop(self, who: int) -> None:
        with self._changed:
            if self._holder != who:
                raise RuntimeError("the gate was opened by a caller that does not hold it")
            self._depth -= 1
            if self._depth == 0:
                self._holder = None
                self._changed.notify_all()
