"""Who may use an in-process engine now: its owner's thread, or a refit. No engine is known here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets in either one user thread, which may enter again and again, or the controller, which no thread owns.

    A controller that waits goes before users that are not in yet: one who generates in a loop must not starve refits.
    One that stops waiting leaves no trace.
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
        """Waits while the controller, or another thread, is in; not for a controller that lets users by."""
        me = threading.get_ident()
        mine = self._take(me)
        try:
            yield
        finally:
            if mine:
                self._drop(me)

    def close(self, timeout: float | None = None) -> bool:
        """Waits until the user is out, then keeps users out until `open`. Re-entrant for the controller. False: the
        user did not leave in `timeout` seconds, and the gate is as it was."""
        return self._take(self._CONTROLLER, timeout)

    def open(self) -> None:
        self._drop(self._CONTROLLER)

    def let_by(self) -> None:
        """Users no longer wait for the controller, which may be in for good: what they came for is lost, and they are to
        be told."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def keep_out(self) -> None:
        """The opposite; `close` does it, too."""
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
                self._changed.notify_all()  # users waited for us
            return mine

    def _drop(self, who: int) -> None:
        with self._changed:
            if self._holder != who:
                raise RuntimeError("the gate is not held by who opens it")
            self._depth -= 1
            if self._depth == 0:
                self._holder = None
                self._changed.notify_all()
