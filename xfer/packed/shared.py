"""Colocated trainers and engines: the two buffers that trainer 0 packs into are mapped by the workers of the same host.

On CPUs the buffers are anonymous shared memory (memfd), opened through the sender's process; a worker maps a message
copy-on-write for as long as its loader reads it, so a loader that writes to what it is given harms nobody else. On GPUs
they are ordinary device memory, opened once by CUDA IPC; a worker copies a message to a buffer of its own and then lets go
of it. Either way the sender exports two buffers once, whatever the number of tensors, and nothing is pickled.

    sender   says "k is there" to all workers and waits for "k is done" from each, while message k + 1 is packed
    worker   maps or copies message k, loads it, says "k is done"

The words go over the same link as buckets do elsewhere (lane.py). The CUDA half has been written and has not been run.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time

import msgspec
import torch

from xfer.errors import ProtocolError, Unsupported, XferError
from xfer.packed.buffer import Buffers, wire_sum
from xfer.packed.wire import Message
from xfer.transport.group import Link

MAX_OFFER = 1 << 16
_ACK = 7
"""Tag of a worker's "done"."""
_NAME = "xfer-"


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shared buffer on a CPU: file descriptor `fd` of process `pid`, whose memory is called `name`."""

    pid: int
    fd: int
    name: str
    nbytes: int


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Buffers in the order of their use. `cuda`: an offer of transport/peer.py instead, with `device` the sender's GPU."""

    slots: tuple[Slot, ...] = ()
    cuda: bytes = b""
    device: str = ""


_offers = msgspec.msgpack.Decoder(Offer)


class SharedBuffers(Buffers):
    """Buffers that others can map; see Buffers. They do not move while a gather runs: `reserve` before it."""

    def __init__(self, count: int, device: torch.device):
        super().__init__(count, device)
        self._slots_: list[Slot] = []
        self._files: list[int] = []
        self._offer = b""

    def reserve(self, longest: int) -> None:
        if self._offer and all(s.numel() >= longest for s in self._slots):
            return
        self.free()
        made = [self._make(max(longest, 1)) for _ in self._slots]
        self._slots = made
        if self.device.type == "cuda":
            from xfer.transport.peer import Export

            self._export = Export(0, made, self.device)
            device = str(torch.cuda.get_device_properties(self.device).uuid)
            self._offer = msgspec.msgpack.encode(Offer(cuda=self._export.to_bytes(), device=device))
        else:
            self._offer = msgspec.msgpack.encode(Offer(tuple(self._slots_)))

    @property
    def offer(self) -> bytes:
        return self._offer

    def take(self, number: int, nbytes: int, longest: int = 0) -> torch.Tensor:
        return self._slots[number % len(self._slots)][:nbytes]

    def free(self) -> None:
        """The memory goes when the last worker has let go of it too."""
        super().free()
        for fd in self._files:
            os.close(fd)
        self._slots_, self._files, self._offer = [], [], b""

    def _make(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        name = _NAME + secrets.token_hex(8)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._files.append(fd)
        os.ftruncate(fd, nbytes)
        self._slots_.append(Slot(os.getpid(), fd, name, nbytes))
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def announce(link: Link, number: int, until: float, device: torch.device) -> None:
    """Sender: message `number` lies in its buffer, written to the end."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    link.broadcast(torch.tensor([number], dtype=torch.int64, device=device), 0, until)


def wait_done(link: Link, number: int, workers: int, until: float, device: torch.device) -> None:
    """Sender: until every worker has done with message `number`."""
    for worker in range(1, workers + 1):
        word = torch.zeros(1, dtype=torch.int64, device=device)
        link.recv(word, worker, _ACK, until)
        if int(word) != number:
            raise ProtocolError(f"{link.labels[worker]} says that it has done with bucket {int(word)}, not {number}")


class SharedArrivals:
    """A worker's half, with the face of lane._Arrivals."""

    def __init__(self, link: Link, messages, offer: bytes, until: float, device: torch.device, verify: bool):
        self.seconds, self.total = 0.0, 0
        self._link, self._messages, self._until, self._device, self._verify = link, messages, until, device, verify
        self._number = -1
        try:
            self._offer = _offers.decode(offer)
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"an offer of shared buffers: {e}") from None
        self._files: list[int] = []
        self._mapping = None
        self._mapped: mmap.mmap | None = None
        try:
            self._open()
        except XferError:
            self.close()
            raise

    def _open(self) -> None:
        longest = max((x.nbytes for x in self._messages), default=0)
        if (self._device.type == "cuda") != bool(self._offer.cuda):
            raise Unsupported("colocated trainers and engines must both be on CPUs or both on GPUs")
        if self._offer.cuda:
            from xfer.transport.peer import Mapping

            self._mapping = Mapping(0, self._device)
            self._mapping.open(self._offer.cuda, 0, (0, 1))
            self._roots = self._mapping.roots.get(0, {})
            if set(self._roots) != {0, 1} or any(r.numel() < longest for r in self._roots.values()):
                raise Unsupported(
                    "the trainers' buffers cannot be mapped by this worker, so it is not colocated with them",
                    [*self._mapping._why.values(), "connect() without colocated=True broadcasts the buckets"],
                )
            self._own = Buffers(1, self._device)
            return
        for slot in self._offer.slots:
            if slot.nbytes < longest:
                raise ProtocolError(f"a shared buffer of {slot.nbytes} bytes, the longest message has {longest}")
            self._files.append(_opened(slot))
        if not self._files:
            raise ProtocolError("an offer without buffers")

    def take(self) -> torch.Tensor:
        self._number += 1
        number = self._number
        message: Message = self._messages[number]
        began = time.perf_counter()
        word = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        self._link.broadcast(word, 0, self._until)
        if int(word) != number:
            raise ProtocolError(f"the sender announces bucket {int(word)}, not {number}")
        if self._mapping is not None:
            data = self._own.take(number, message.nbytes, max(x.nbytes for x in self._messages))
            data.copy_(self._roots[number % 2][: message.nbytes])
            torch.cuda.current_stream(self._device).synchronize()
            self._done()
        else:
            data = self._map(self._files[number % len(self._files)], message.nbytes)
        self.seconds += time.perf_counter() - began
        if self._verify:
            self.total = (self.total + wire_sum(data, number)) % (1 << 64)
        return data

    def _map(self, fd: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        # Private: what a loader writes to its argument stays here. A new mapping each time: a page that was written to
        # would show its old bytes under the next message.
        self._mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(self._mapped, dtype=torch.uint8)

    def free(self) -> None:
        if self._mapping is None:
            self._mapped = None  # unmapped with the last tensor over it
            self._done()

    def _done(self) -> None:
        self._link.send(torch.tensor([self._number], dtype=torch.int64, device=self._device), 0, _ACK, self._until)

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)
        self._files, self._mapped = [], None
        if self._mapping is not None:
            torch.cuda.synchronize(self._device)
            self._mapping.close()
            self._mapping = None


def _opened(slot: Slot) -> int:
    """A descriptor for the sender's buffer. Unsupported where it cannot be opened: another host, user or pid namespace."""
    path = f"/proc/{int(slot.pid)}/fd/{int(slot.fd)}"
    fd = -1
    try:
        at = os.readlink(path)
        if at != f"/memfd:{slot.name} (deleted)" or not slot.name.startswith(_NAME):
            raise OSError(f"it is {at}")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size < slot.nbytes:
            raise OSError("it is shorter than was said")
        return fd
    except OSError as e:
        if fd >= 0:
            os.close(fd)
        raise Unsupported(
            "the trainers' shared memory cannot be opened by this worker, so it is not colocated with them",
            [f"{path}: {e}", "connect() without colocated=True broadcasts the buckets"],
        ) from None
