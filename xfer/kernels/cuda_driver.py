"""The few calls of CUDA's driver that torch does not offer: identity of allocations, IPC handles, mappings, words that
streams write and wait for, graphs, copies of many runs.

Through ctypes, loaded at the first call, so importing this touches no device. Not here: what is shared with whom
(transport/peer.py), which runs are copied (long_runs.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

HANDLE_BYTES = 64
_BUFFER_ID, _LEGACY_IPC, _MAPPED = 7, 10, 13  # CU_POINTER_ATTRIBUTE_…
_INVALID_VALUE = 1  # CUDA_ERROR_…
_LAZY_PEER_ACCESS = 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class DriverError(RuntimeError):
    """A driver call that failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int):
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        super().__init__(f"{call}: {(name.value or b'?').decode()} ({code})")
        self.code = code


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation that an address lies in. `identity` is never given twice in a process, unlike an address."""

    base: int
    nbytes: int
    identity: int
    exportable: bool


def allocation(pointer: int) -> Allocation:
    """DriverError when the address is no device memory of this process."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    identity, legacy = ctypes.c_uint64(), ctypes.c_int()
    _call("cuPointerGetAttribute", ctypes.byref(identity), _BUFFER_ID, ctypes.c_uint64(pointer))
    _call("cuPointerGetAttribute", ctypes.byref(legacy), _LEGACY_IPC, ctypes.c_uint64(pointer))
    return Allocation(base.value, size.value, identity.value, bool(legacy.value))


def identity(pointer: int) -> int:
    """`Allocation.identity` of the allocation that an address lies in. DriverError as `allocation`."""
    found = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(found), _BUFFER_ID, ctypes.c_uint64(pointer))
    return found.value


def mapped(pointer: int) -> bool:
    """Whether there is memory behind the address. Virtual memory keeps its addresses while what lay there is given
    back, as vLLM's sleep mode does; touching it then is an illegal access."""
    found = ctypes.c_uint64()
    try:
        _call("cuPointerGetAttribute", ctypes.byref(found), _MAPPED, ctypes.c_uint64(pointer))
    except DriverError as e:
        if e.code != _INVALID_VALUE:
            raise
        return False
    return bool(found.value)


def unmapped(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """A question that may be asked again and again: which of these tensors, by number, have no memory behind them.

    The question costs one call of the driver per allocation of virtual memory, because memory is paused by whole allocations. It costs
    nothing for host memory and for what cudaMalloc returns, which cannot be taken away under a tensor. It keeps addresses only.
    """
    inside: dict[int, list[int]] = {}  # an address in each allocation -> the tensors that lie in that allocation
    address_in: dict[int, int] = {}
    for i, t in enumerate(tensors):
        if not t.is_cuda or not t.numel():
            continue
        address = t.data_ptr()
        try:
            found = allocation(address)
        except DriverError:  # it may be paused already
            inside.setdefault(address, []).append(i)
            continue
        if not found.exportable:
            inside.setdefault(address_in.setdefault(found.base, address), []).append(i)
    return lambda: sorted(i for address, some in inside.items() if not mapped(address) for i in some)


def export(pointer: int) -> bytes:
    """An IPC handle of the whole allocation that the address lies in."""
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
    return bytes(handle.bytes)


def open_handle(handle: bytes, device: torch.device) -> int:
    """Maps another process's allocation; its address here. Opened in the context of `device`, the *reader's* own:
    kernels refuse a pointer that was opened on the owner's.
    """
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    pointer = ctypes.c_uint64()
    with torch.cuda.device(device):
        _current(device)
        value = _IpcHandle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), value, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return pointer.value


def close_handle(pointer: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        _current(device)
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


class Graph:
    """The work that `work` launches on `stream`, recorded once and launched as one. It may not wait for the host, allocate or
    use another stream. Recording does not run it, and other threads may use the device meanwhile. DriverError if it cannot
    be recorded; the stream is unchanged then. The caller keeps the memory that the work uses.
    """

    def __init__(self, stream: torch.cuda.Stream, work: Callable[[], object]):
        self._exec = ctypes.c_void_p()
        recorded, on = ctypes.c_void_p(), ctypes.c_void_p(stream.cuda_stream)
        _call("cuStreamBeginCapture_v2", on, ctypes.c_int(_RELAXED))  # the garbage collector may free memory meanwhile
        try:
            work()
        finally:
            code = _driver().cuStreamEndCapture(on, ctypes.byref(recorded))
        if code:
            raise DriverError("cuStreamEndCapture", code)
        try:
            _call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), recorded, ctypes.c_ulonglong(0))
        finally:
            _call("cuGraphDestroy", recorded)

    def launch(self, stream: torch.cuda.Stream) -> None:
        _call("cuGraphLaunch", self._exec, ctypes.c_void_p(stream.cuda_stream))

    def __del__(self) -> None:
        if self._exec:  # CUDA lets a graph that still runs end first
            _driver().cuGraphExecDestroy(self._exec)


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (end + name, kind)
        for end in ("src", "dst")
        for name, kind in (
            ("X", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("Type", ctypes.c_int), ("Host", ctypes.c_void_p),
            ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p), ("Pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("rows", ctypes.c_size_t)]  # fmt: skip


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes, without hints about locations."""

    _fields_ = [("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


class CopyBatch:
    """Copies between device memory, own or mapped, in any order: `launch` gives all to a stream, in few calls.

    runs: (to, from, bytes). boxes: (to, from, pitch there, pitch here, bytes of a row, rows). Addresses and bytes; pitches up to
    2 GiB. The caller keeps the memory. An engine does not pause between the runs of a batch, as it does between copies of a
    stream (benchmarks/RESULTS.md). A driver before CUDA 12.8 has no batches and takes runs one by one.
    """

    BATCH = 256
    """Runs of a batch. An engine begins when the driver has read a whole batch, 0.5 us a run, and pauses 4 us between two (H200)."""

    def __init__(self, runs: Sequence[tuple[int, int, int]], boxes: Sequence[tuple[int, int, int, int, int, int]] = ()):
        n = self._count = len(runs)
        self._to, self._from = ((ctypes.c_uint64 * n)(*(r[k] for r in runs)) for k in (0, 1))
        self._bytes = (ctypes.c_size_t * n)(*(r[2] for r in runs))
        self._boxes = [
            _Memcpy2D(
                srcType=_UNIFIED, srcDevice=source, srcPitch=source_pitch,
                dstType=_UNIFIED, dstDevice=to, dstPitch=pitch, width=width, rows=rows,
            )
            for to, source, pitch, source_pitch, width, rows in boxes
        ]  # fmt: skip
        self._how, self._first = _Attributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Launch the copies on a stream. Raises DriverError if the driver refuses one. Blocks the host while the stream's queue is full."""
        on = ctypes.c_void_p(stream.cuda_stream)
        for box in self._boxes:
            _call("cuMemcpy2DAsync_v2", ctypes.byref(box), on)
        if not self._count:
            return
        if (batch := _batch_call()) is None:
            for to, source, n in zip(self._to, self._from, self._bytes):
                _call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(n), on)
            return
        how = (ctypes.byref(self._how), ctypes.byref(self._first), ctypes.c_size_t(1))
        failed = () if batch.endswith("_v2") else (ctypes.byref(ctypes.c_size_t()),)
        for at in range(0, self._count, self.BATCH):
            some = (ctypes.byref(x, at * ctypes.sizeof(x._type_)) for x in (self._to, self._from, self._bytes))
            _call(batch, *some, ctypes.c_size_t(min(self.BATCH, self._count - at)), *how, *failed, on)


def tensor_at(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A flat uint8 tensor over memory that torch does not own."""
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def _current(device: torch.device) -> None:
    """Makes sure that this thread has the device's primary context: a fresh thread has none until torch does work."""
    torch.cuda.current_stream(device).query()
    torch.cuda.set_device(device)


@cache
def _driver() -> ctypes.CDLL:
    lib = ctypes.CDLL("libcuda.so.1")
    lib.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
    return lib


@cache
def _batch_call() -> str | None:
    return next((n for n in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync") if hasattr(_driver(), n)), None)


def _call(name: str, *args) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        raise DriverError(name, code)
