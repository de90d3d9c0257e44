"""Colocated trainers and engines: workers read the buffers of whole tensors on their host instead of receiving messages.

Every GPU on which a trainer rank holds whole tensors has one exporter. The key is the GPU's UUID, because device numbers differ
between processes. A worker reads the two buffers of the exporter on its own GPU, or trainer 0's if there is none. All CPUs of a
host count as one place, and trainer 0 exports there. Each exporter exchanges words with the workers that chose it:

    exporter  offers its buffers, announces message k and waits until each worker has done with it, while message k + 1 is packed
    worker    maps or copies message k, loads it, reports that it has done with it

Buffers are offered and opened as storages are on the direct route (transport/peer.py, and peer_host.py for CPUs). A worker on the
exporter's GPU loads straight from the mapped buffers. Any other worker copies a message first, so a loader that writes to its
argument changes nothing for others.

Words travel over a link of CPU memory, because NCCL refuses ranks that share a GPU. Only benchmarks/packed_gpu.py and
tests/functional/test_gpu_refit.py run the CUDA half. plane.py opens the link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from xfer.errors import ProtocolError, Unsupported
from xfer.packed.buffer import Buffers, wire_sum
from xfer.packed.wire import PackedMessage
from xfer.plan.checksum import added
from xfer.transport import peer, peer_host
from xfer.transport.group import Link

_MAX_OFFER = 1 << 16
_THERE, _DONE, _OFFER = 6, 7, 9
"""Tags of an exporter's announcement of a message, a worker's report and an exporter's offer."""


def place_of(device: torch.device) -> str:
    """Return the key of a device: the GPU's UUID, which is the same in all processes of a host, or "cpu"."""
    return peer.uuid_of(device) if device.type == "cuda" else "cpu"


def exporters_of(places: Sequence[str]) -> list[int]:
    """Return the trainer ranks that export: the first rank of each place, trainer 0 first. `places`: of all trainer ranks."""
    return sorted({place: rank for rank, place in reversed(list(enumerate(places)))}.values())


def nearest(place: str, exporters: Sequence[str]) -> int:
    """Return the index of the exporter that a worker at `place` reads: the one at the same place, else 0. `exporters`: places."""
    return exporters.index(place) if place in exporters else 0


class SharedBuffers(Buffers):
    """Buffers that other processes of this host can read.

    Attributes:
        offer: How to open them, an offer of transport/peer.py; empty while there is no buffer.
    """

    def __init__(self, count: int, device: torch.device):
        super().__init__(count, device)
        self._export: peer.Export | peer_host.Export | None = None

    def _reserve(self, count: int, nbytes: int) -> None:
        if self.offer and all(s.numel() >= nbytes for s in self._slots):
            return
        self.free()
        self._slots = [torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device) for _ in self._slots]
        self._export = _transport(self.device).Export(0, self._slots, self.device)
        self.offer = self._export.to_bytes()

    def free(self) -> None:
        """Free the buffers. A GPU's memory is released when the last worker has unmapped it."""
        self._export, self.offer = None, b""  # an export keeps the buffers alive
        super().free()


def _transport(device: torch.device):
    return peer if device.type == "cuda" else peer_host


def send_offer(link: Link, offer: bytes, workers: Sequence[int], until: float) -> None:
    """Exporter: tell `workers` (ranks on the link) how to open its buffers."""
    data = torch.frombuffer(bytearray(offer), dtype=torch.uint8)
    for worker in workers:
        link.send(torch.tensor([data.numel()]), worker, _OFFER, until)
        link.send(data, worker, _OFFER, until)


def announce(link: Link, number: int, workers: Sequence[int], until: float, device: torch.device) -> None:
    """Exporter: tell `workers` (ranks on the link) that message `number` is complete in its buffer."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    word = torch.tensor([number], dtype=torch.int64)
    for worker in workers:
        link.send(word, worker, _THERE, until)


def wait_done(link: Link, number: int, workers: Sequence[int], until: float) -> None:
    """Exporter: wait until each of its workers has done with message `number`."""
    for worker in workers:
        word = torch.zeros(1, dtype=torch.int64)
        link.recv(word, worker, _DONE, until)
        if int(word) != number:
            raise ProtocolError(f"{link.labels[worker]} reports that it has done with bucket {int(word)}, not {number}")


class SharedArrivals:
    """The worker's side. It has the methods of broadcast.Arrivals.

    Args:
        link: Link of the replica. The exporter's offer arrives over it first.
        messages: The messages that will arrive.
        until: Deadline, a time.monotonic() value.
        device: The worker's device.
        verify: Sum the messages.
        exporter: Rank of the exporter on the link.

    Attributes:
        total: Sum of all messages, if `verify`.
        seconds: Seconds of waiting for messages and copying them.

    Raises:
        Unsupported: This worker cannot open the exporter's buffers.
    """

    def __init__(
        self, link: Link, messages: Sequence[PackedMessage], until: float, device: torch.device, verify: bool,
        *, exporter: int,
    ):  # fmt: skip
        self.seconds, self.total = 0.0, 0
        self._link, self._messages, self._until, self._device, self._verify = link, messages, until, device, verify
        self._exporter, self._number = exporter, -1
        self._mapping = _transport(device).Mapping(0, device)
        try:
            self._mapping.open(self._offered(), 0, (0, 1))
            self._buffers = self._mapping.roots.get(0, {})
            if set(self._buffers) != {0, 1}:
                raise Unsupported(
                    "the trainers' buffers cannot be mapped by this worker, so it is not colocated with them",
                    [self._mapping.why(0), "Packed() without colocated=True broadcasts the buckets"],
                )
            self._near = 0 in self._mapping.here
            self._own = Buffers(0 if self._near else 1, device)
            self._own.begin(messages)
        except Exception:
            self.close()
            raise

    def _offered(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._link.recv(length, self._exporter, _OFFER, self._until)
        if not 0 < int(length) <= _MAX_OFFER:
            raise ProtocolError(f"an offer of shared buffers has {int(length)} bytes; 1 to {_MAX_OFFER} are allowed")
        data = torch.zeros(int(length), dtype=torch.uint8)
        self._link.recv(data, self._exporter, _OFFER, self._until)
        return bytes(data.numpy())

    def take(self) -> torch.Tensor:
        self._number += 1
        number, nbytes = self._number, self._messages[self._number].nbytes
        began = time.perf_counter()
        word = torch.full((1,), -1, dtype=torch.int64)
        self._link.recv(word, self._exporter, _THERE, self._until)
        if int(word) != number:
            raise ProtocolError(f"the exporter announces bucket {int(word)}, not {number}")
        if self._near:
            data = self._buffers[number % 2][:nbytes]
        else:
            data = self._own.take(number, nbytes)
            self._mapping.read_into(0, number % 2, data)
            self._done()
        self.seconds += time.perf_counter() - began
        if self._verify:
            self.total = added(self.total, wire_sum(data, number))
        return data

    def free(self) -> None:
        """Release the message of `take`, after this thread's stream has done its present work."""
        if self._near:
            self._done()

    def _done(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._link.send(torch.tensor([self._number], dtype=torch.int64), self._exporter, _DONE, self._until)

    def close(self) -> bool:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._mapping.close()
        return True
