"""Colocated trainers and engines: buffers of whole tensors that the workers of the same host map instead of receiving them.

Every GPU on which a trainer rank holds whole tensors has one exporter, keyed by the GPU's UUID, since numbers of devices mean
something else in each process: a worker maps the two buffers of the exporter on its own GPU, and trainer 0's where there is
none. On CPUs nothing is told apart, and trainer 0 exports. Each exporter speaks with the workers that chose it:

    exporter  says "k is there" to its workers and waits for "k is done" from each, while message k + 1 is packed
    worker    maps or copies message k, loads it, says "k is done"

On CPUs buffers are anonymous shared memory (memfd), opened through the exporter's process; a worker maps a message
copy-on-write for as long as its loader reads it, so a loader that writes to what it is given harms nobody else. On GPUs they
are ordinary device memory, opened by CUDA IPC: on its own GPU a worker loads straight from there, from another GPU it copies a
message first. Either way two buffers are exported, whatever the number of tensors, and nothing is pickled.

The words travel over a link of CPU memory, since NCCL refuses ranks that share a GPU. The CUDA half is run on GPUs only, by
benchmarks/packed_gpu.py and tests/functional/test_gpu_refit.py. Not here: who opens the link and when (lane.py).
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
from xfer.packed.wire import PackedMessage
from xfer.plan.checksum import added
from xfer.transport import peer
from xfer.transport.group import Link

MAX_OFFER = 1 << 16
_THERE, _DONE = 6, 7
"""Tags of an exporter's "there" and a worker's "done"."""
_NAME = "xfer-"


def place_of(device: torch.device) -> str:
    """What a buffer is keyed by: the GPU's UUID, which all processes of a host see alike. All of a CPU is one place."""
    return peer.uuid_of(device) if device.type == "cuda" else "cpu"


def exporters_of(places: Sequence[str], everywhere: bool) -> list[int]:
    """Trainer ranks that export, trainer 0 first: the first of each place; trainer 0 alone where the others have no whole
    tensors (`everywhere` False). `places`: of all trainer ranks."""
    return sorted({place: rank for rank, place in reversed(list(enumerate(places)))}.values()) if everywhere else [0]


def nearest(place: str, exporters: Sequence[str]) -> int:
    """Which of the exporters (their places) a worker maps: the one on its own GPU, else trainer 0's."""
    return exporters.index(place) if place in exporters else 0


class SharedBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shared buffer on a CPU: file descriptor `fd` of process `pid`, whose memory is called `name`."""

    pid: int
    fd: int
    name: str
    nbytes: int


class BufferOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Buffers in the order of their use. `cuda`: an offer of transport/peer.py instead. `place`: of the exporter."""

    slots: tuple[SharedBuffer, ...] = ()
    cuda: bytes = b""
    place: str = ""


_offers = msgspec.msgpack.Decoder(BufferOffer)


class SharedBuffers(Buffers):
    """Buffers that others can map; see Buffers. They do not move while a gather runs: `reserve` before it."""

    def __init__(self, count: int, device: torch.device, place: str = ""):
        super().__init__(count, device)
        self.place = place or place_of(device)
        self._shared: list[SharedBuffer] = []
        self._files: list[int] = []
        self._offer = b""
        self._export: peer.Export | None = None

    def reserve(self, longest: int) -> None:
        if self._offer and all(s.numel() >= longest for s in self._slots):
            return
        self.free()
        made = [self._make(max(longest, 1)) for _ in self._slots]
        self._slots = made
        if self.device.type == "cuda":
            self._export = export = peer.Export(0, made, self.device)
            self._offer = msgspec.msgpack.encode(BufferOffer(cuda=export.to_bytes(), place=self.place))
        else:
            self._offer = msgspec.msgpack.encode(BufferOffer(tuple(self._shared), place=self.place))

    @property
    def offer(self) -> bytes:
        return self._offer

    def take(self, number: int, nbytes: int, longest: int = 0) -> torch.Tensor:
        return self._slots[number % len(self._slots)][:nbytes]

    def free(self) -> None:
        """The memory goes when the last worker has let go of it too."""
        self._export = None  # it holds the buffers
        super().free()
        for fd in self._files:
            os.close(fd)
        self._shared, self._files, self._offer = [], [], b""

    def _make(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        name = _NAME + secrets.token_hex(8)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._files.append(fd)
        os.ftruncate(fd, nbytes)
        self._shared.append(SharedBuffer(os.getpid(), fd, name, nbytes))
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def announce(link: Link, number: int, workers: Sequence[int], until: float, device: torch.device) -> None:
    """Exporter: message `number` lies in its buffer, written to the end. `workers`: their ranks on the link."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    word = torch.tensor([number], dtype=torch.int64)
    for worker in workers:
        link.send(word, worker, _THERE, until)


def wait_done(link: Link, number: int, workers: Sequence[int], until: float) -> None:
    """Exporter: until each of its workers has done with message `number`."""
    for worker in workers:
        word = torch.zeros(1, dtype=torch.int64)
        link.recv(word, worker, _DONE, until)
        if int(word) != number:
            raise ProtocolError(f"{link.labels[worker]} says that it has done with bucket {int(word)}, not {number}")


class SharedArrivals:
    """A worker's half, with the face of arrivals.Arrivals. `exporter`: its rank on the link; `place`: the worker's."""

    def __init__(
        self, link: Link, messages: Sequence[PackedMessage], offer: bytes, until: float, device: torch.device, verify: bool,
        *, exporter: int = 0, place: str = "",
    ):  # fmt: skip
        self.seconds, self.total = 0.0, 0
        self._link, self._messages, self._until, self._device, self._verify = link, messages, until, device, verify
        self._exporter, self._number = exporter, -1
        try:
            self._offer = _offers.decode(offer)
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"an offer of shared buffers: {e}") from None
        self._near = self._offer.place == (place or place_of(device))
        self._files: list[int] = []
        self._mapping: peer.Mapping | None = None
        self._mapped: mmap.mmap | None = None
        try:
            self._open()
        except Exception:
            self.close()
            raise

    def _open(self) -> None:
        longest = max((x.nbytes for x in self._messages), default=0)
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
            if not self._near:
                self._own.take(0, longest)
            return
        for slot in self._offer.slots:
            if slot.nbytes < longest:
                raise ProtocolError(f"a shared buffer of {slot.nbytes} bytes, the longest message has {longest}")
            self._files.append(_opened(slot))
        if not self._files:
            raise ProtocolError("an offer without buffers")

    @property
    def extra_bytes(self) -> int:
        """Of this worker's own, beside what it maps."""
        return self._own.nbytes if self._mapping is not None else 0

    def take(self) -> torch.Tensor:
        self._number += 1
        number = self._number
        message: PackedMessage = self._messages[number]
        began = time.perf_counter()
        word = torch.full((1,), -1, dtype=torch.int64)
        self._link.recv(word, self._exporter, _THERE, self._until)
        if int(word) != number:
            raise ProtocolError(f"the sender announces bucket {int(word)}, not {number}")
        if self._mapping is None:
            data = self._map(self._files[number % len(self._files)], message.nbytes)
        elif self._near:
            data = self._roots[number % 2][: message.nbytes]
        else:
            data = self._own.take(number, message.nbytes, max(x.nbytes for x in self._messages))
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
        # Private: what a loader writes to its argument stays here. A new mapping each time: a page that was written to
        # would show its old bytes under the next message.
        self._mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(self._mapped, dtype=torch.uint8)

    def free(self) -> None:
        """What `take` gave is not needed any more, once this thread's stream has done what it was given."""
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
            [f"{path}: {e}", "Packed() without colocated=True broadcasts the buckets"],
        ) from None
