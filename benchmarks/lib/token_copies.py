"""Copies between two GPUs beside a decoding engine, issued by a thread of whichever process asks for them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from tests.support import gpu_probe


@dataclass(frozen=True)
class Pace:
    """How a loop copies.

    Attributes:
        kernel: By a kernel on the issuing GPU's multiprocessors; else by a copy engine.
        piece: Bytes per copy. The loop waits for each copy before it issues the next one.
        pause_s: Seconds between two copies.
    """

    kernel: bool = False
    piece: int = 256 << 20
    pause_s: float = 0.0


def share(t: torch.Tensor) -> list:
    """Return a handle of a tensor's storage that `opened` takes in another process of this host. Plain data."""
    return [x.hex() if isinstance(x, bytes) else x for x in t.untyped_storage()._share_cuda_()]


def opened(handle: list, device: torch.device) -> torch.Tensor:
    """Map shared memory. The tensor says that it lies on `device`, the GPU that issues the copies, wherever it lies."""
    own = [bytes.fromhex(x) if isinstance(x, str) else x for x in handle[1:]]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *own)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class Copies:
    """Copies from one tensor to another until `end`."""

    def __init__(self, source: torch.Tensor, destination: torch.Tensor, pace: Pace):
        self._source, self._destination, self._pace = source, destination, pace
        self._nbytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        pace, device = self._pace, self._source.device
        size = min(len(self._source), len(self._destination)) // pace.piece * pace.piece
        with torch.cuda.device(device):
            stream, at = torch.cuda.Stream(device), 0
            with torch.cuda.stream(stream):
                while not self._over.is_set():
                    here, there = (t[at : at + pace.piece].view(torch.int64) for t in (self._source, self._destination))
                    torch.bitwise_not(here, out=there) if pace.kernel else there.copy_(here, non_blocking=True)
                    stream.synchronize()
                    self._nbytes += pace.piece
                    at = (at + pace.piece) % size
                    if pace.pause_s:
                        time.sleep(pace.pause_s)

    def end(self) -> float:
        """Stop. Returns the rate in GB/s."""
        self._over.set()
        self._thread.join(30)
        return self._nbytes / (time.monotonic() - self._began) / 1e9


class Copier:
    """A process's buffer that others may map, and its loop of copies."""

    def __init__(self, device: torch.device):
        self._device, self._loop = device, None
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def offer(self, nbytes: int) -> list:
        self._buffer = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        return share(self._buffer)

    def begin(self, handle: list, push: bool, **pace) -> None:
        """Copy between the own buffer and another process's. push: into the other one; else out of it."""
        mine, theirs = self._buffer, opened(handle, self._device)
        self._loop = Copies(*((mine, theirs) if push else (theirs, mine)), Pace(**pace))

    def end(self) -> float:
        return self._loop.end()


class Probe(gpu_probe.Probe):
    """Mixed into vLLM's worker."""

    def xfer_offer(self, nbytes: int) -> list:
        self._copier = Copier(self.device)
        return self._copier.offer(nbytes)

    def xfer_copy(self, handle: list, pace: dict) -> None:
        self._copier.begin(handle, **pace)

    def xfer_copied(self) -> float:
        return self._copier.end()
