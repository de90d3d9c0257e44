"""Colocated trainers and engines: workers map the buffers of whole tensors on their host instead of receiving them.

Every GPU on which a trainer rank holds whole tensors has one exporter. The key is the GPU's UUID, because device numbers differ
between processes. A worker maps the two buffers of the exporter on its own GPU, or trainer 0's if there is none. All CPUs of a
host count as one place, and trainer 0 exports there. Each exporter exchanges messages with the workers that chose it:

    exporter  announces message k to its workers and waits until each has done with it, while message k + 1 is packed
    worker    maps or copies message k, loads it, reports that it has done with it

On CPUs buffers are anonymous shared memory (memfd), opened through the exporter's process. A worker maps a message copy-on-write
while its loader reads it, so a loader that writes to its argument changes nothing for others. On GPUs buffers are ordinary device
memory, opened by CUDA IPC: a worker on the same GPU loads straight from them, a worker on another GPU copies a message first. In
both cases two buffers are exported, whatever the number of tensors, and nothing is pickled.

Announcements travel over a link of CPU memory, because NCCL refuses ranks that share a GPU. Only benchmarks/packed_gpu.py and
tests/functional/test_gpu_refit.py run the CUDA half. plane.py opens the link.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Sequence

import msgspec
import torch

from xfer.errors import ProtocolError, Unsupported
from xfer.packed.buffer import Buffers, wire_sum
from xfer.packed.wire import PackedMessage, longest_of
from xfer.plan.checksum import added
from xfer.transport import peer
from xfer.transport.group import Link

_MAX_OFFER = 1 << 16
_THERE, _DONE, _OFFER = 6, 7, 9
"""Tags of an exporter's announcement of a message, a worker's report and an exporter's offer."""
_NAME = "xfer-"


def place_of(device: torch.device) -> str:
    """Return the key of a device: the GPU's UUID, which is the same in all processes of a host, or "cpu"."""
    return peer.uuid_of(device) if device.type == "cuda" else "cpu"


def exporters_of(places: Sequence[str]) -> list[int]:
    """Return the trainer ranks that export: the first rank of each place, trainer 0 first. `places`: of all trainer ranks."""
    return sorted({place: rank for rank, place in reversed(list(enumerate(places)))}.values())


def nearest(place: str, exporters: Sequence[str]) -> int:
    """Return the index of the exporter that a worker at `place` maps: the one at the same place, else 0. `exporters`: places."""
    return exporters.index(place) if place in exporters else 0


class SharedBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shared buffer on a CPU: file descriptor `fd` of process `pid`, with memory named `name`."""

    pid: int
    fd: int
    name: str
    nbytes: int


class BufferOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to map an exporter's buffers.

    Attributes:
        slots: On CPUs: the buffers, in the order of their use.
        cuda: On GPUs: an offer of transport/peer.py.
        place: Place of the exporter.
    """

    slots: tuple[SharedBuffer, ...] = ()
    cuda: bytes = b""
    place: str = ""


_offers = msgspec.msgpack.Decoder(BufferOffer)


class SharedBuffers(Buffers):
    """Buffers that other processes can map.

    Attributes:
        place: Key of the exporter's device.
        offer: Encoded `BufferOffer`; empty while there is no buffer.
    """

    def __init__(self, count: int, device: torch.device):
        super().__init__(count, device)
        self.place, self.offer = place_of(device), b""
        self._shared: list[SharedBuffer] = []
        self._files: list[int] = []
        self._export: peer.Export | None = None

    def _reserve(self, count: int, nbytes: int) -> None:
        if self.offer and all(s.numel() >= nbytes for s in self._slots):
            return
        self.free()
        made = [self._make(max(nbytes, 1)) for _ in self._slots]
        self._slots = made
        if self.device.type == "cuda":
            self._export = export = peer.Export(0, made, self.device)
            self.offer = msgspec.msgpack.encode(BufferOffer(cuda=export.to_bytes(), place=self.place))
        else:
            self.offer = msgspec.msgpack.encode(BufferOffer(tuple(self._shared), place=self.place))

    def free(self) -> None:
        """Free the buffers. The memory is released when the last worker has unmapped it."""
        self._export = None  # it keeps the buffers alive
        super().free()
        for fd in self._files:
            os.close(fd)
        self._shared, self._files, self.offer = [], [], b""

    def _make(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        name = _NAME + secrets.token_hex(8)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._files.append(fd)
        os.ftruncate(fd, nbytes)
        self._shared.append(SharedBuffer(os.getpid(), fd, name, nbytes))
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def send_offer(link: Link, offer: bytes, workers: Sequence[int], until: float) -> None:
    """Exporter: tell `workers` (ranks on the link) how to map its buffers."""
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
    """A worker's half. It has the methods of broadcast.Arrivals.

    Args:
        link: Link of the replica. The exporter's offer arrives over it first.
        messages: The messages that will arrive.
        until: Deadline, a time.monotonic() value.
        device: The worker's device.
        verify: Sum the messages.
        exporter: Rank of the exporter on the link.
        place: The worker's place.
    """

    def __init__(
        self, link: Link, messages: Sequence[PackedMessage], until: float, device: torch.device, verify: bool,
        *, exporter: int, place: str,
    ):  # fmt: skip
        self.seconds, self.total = 0.0, 0
        self._link, self._messages, self._until, self._device, self._verify = link, messages, until, device, verify
        self._exporter, self._number = exporter, -1
        self._offer = self._offered()
        self._near = self._offer.place == place
        self._files: list[int] = []
        self._mapping: peer.Mapping | None = None
        self._mapped: mmap.mmap | None = None
        try:
            self._open()
        except Exception:
            self.close()
            raise

    def _offered(self) -> BufferOffer:
        length = torch.zeros(1, dtype=torch.int64)
        self._link.recv(length, self._exporter, _OFFER, self._until)
        if not 0 < int(length) <= _MAX_OFFER:
            raise ProtocolError(f"an offer of shared buffers has {int(length)} bytes; 1 to {_MAX_OFFER} are allowed")
        data = torch.zeros(int(length), dtype=torch.uint8)
        self._link.recv(data, self._exporter, _OFFER, self._until)
        try:
            return _offers.decode(bytes(data.numpy()))
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"an offer of shared buffers cannot be read: {e}") from None

    def _open(self) -> None:
        longest = longest_of(self._messages)
        if (self._device.type == "cuda") != bool(self._offer.cuda):
            raise Unsupported("colocated trainers and engines must both be on CPUs or both on GPUs")
        if self._offer.cuda:
            self._mapping = mapping = peer.Mapping(0, self._device)
            mapping.open(self._offer.cuda, 0, (0, 1))
            self._roots = mapping.roots.get(0, {})
            if set(self._roots) != {0, 1} or any(r.numel() < longest for r in self._roots.values()):
                raise Unsupported(
                    "the trainers' buffers cannot be mapped by this worker, so it is not colocated with them",
                    [*mapping._why.values(), "Packed() without colocated=True broadcasts the buckets"],
                )
            self._own = Buffers(0 if self._near else 1, self._device)
            self._own.begin(self._messages)
            return
        for slot in self._offer.slots:
            if slot.nbytes < longest:
                raise ProtocolError(f"a shared buffer has {slot.nbytes} bytes, but the longest message has {longest}")
            self._files.append(_opened(slot))
        if not self._files:
            raise ProtocolError("an offer of shared buffers is empty")

    def take(self) -> torch.Tensor:
        self._number += 1
        number = self._number
        message: PackedMessage = self._messages[number]
        began = time.perf_counter()
        word = torch.full((1,), -1, dtype=torch.int64)
        self._link.recv(word, self._exporter, _THERE, self._until)
        if int(word) != number:
            raise ProtocolError(f"the exporter announces bucket {int(word)}, not {number}")
        if self._mapping is None:
            data = self._map(self._files[number % len(self._files)], message.nbytes)
        elif self._near:
            data = self._roots[number % 2][: message.nbytes]
        else:
            data = self._own.take(number, message.nbytes)
            data.copy_(self._roots[number % 2][: message.nbytes])
            torch.cuda.current_stream(self._device).synchronize()
            self._done()
        self.seconds += time.perf_counter() - began
        if self._verify:
            self.total = added(self.total, wire_sum(data, number))
        return data

    def _map(self, fd: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        # The mapping is private: a loader's writes to its argument stay here. It is new each time: a page that was written to
        # would keep its old bytes under the next message.
        self._mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(self._mapped, dtype=torch.uint8)

    def free(self) -> None:
        """Release the message of `take`, after this thread's stream has done its present work."""
        if self._mapping is None:
            self._mapped = None  # unmapped with the last tensor over it
            self._done()
        elif self._near:
            torch.cuda.current_stream(self._device).synchronize()
            self._done()

    def _done(self) -> None:
        self._link.send(torch.tensor([self._number], dtype=torch.int64), self._exporter, _DONE, self._until)

    def close(self) -> bool:
        for fd in self._files:
            os.close(fd)
        self._files, self._mapped = [], None
        if self._mapping is not None:
            torch.cuda.synchronize(self._device)
            self._mapping.close()
            self._mapping = None
        return True


def _opened(slot: SharedBuffer) -> int:
    """Open the exporter's buffer and return a descriptor. Unsupported if it cannot be opened: another host, user or pid namespace."""
    path = f"/proc/{int(slot.pid)}/fd/{int(slot.fd)}"
    fd = -1
    try:
        at = os.readlink(path)
        if at != f"/memfd:{slot.name} (deleted)" or not slot.name.startswith(_NAME):
            raise OSError(f"it refers to {at}")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size < slot.nbytes:
            raise OSError("it is shorter than announced")
        return fd
    except OSError as e:
        if fd >= 0:
            os.close(fd)
        raise Unsupported(
            "the trainers' shared memory cannot be opened by this worker, so it is not colocated with them",
            [f"{path}: {e}", "Packed() without colocated=True broadcasts the buckets"],
        ) from None
