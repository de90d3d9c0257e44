"""Device memory that can be paused: its addresses stay, and the memory behind them is given back, as torch_memory_saver and vLLM's
sleeping pool do it. By the driver's own calls, so that a test needs neither of them."""

from __future__ import annotations

import ctypes

import torch

from xfer.kernels.cuda_driver import _call, tensor_at


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of a device, for which no handle is asked."""

    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Pausable:
    """`tensor`: flat uint8 of at least `nbytes`. Whoever reads it while it is paused gets an illegal access."""

    def __init__(self, nbytes: int, device: torch.device):
        torch.zeros(1, device=device)  # the driver wants a context
        self._where = _Location(1, device.index)
        self._made = _Properties(type=1, location=self._where)
        unit, self._at, self._handle = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._made), 0)
        self._size = ctypes.c_size_t(-(-nbytes // unit.value) * unit.value)
        zero = ctypes.c_size_t(0)
        _call(
            "cuMemAddressReserve", ctypes.byref(self._at), self._size, zero, ctypes.c_uint64(0), ctypes.c_ulonglong(0)
        )
        self.resume()
        self.tensor = tensor_at(self._at.value, self._size.value, device)

    def pause(self) -> None:
        torch.cuda.synchronize()
        _call("cuMemUnmap", self._at, self._size)
        _call("cuMemRelease", self._handle)

    def resume(self) -> None:
        """Other memory, which holds anything, at the old addresses."""
        none, access = ctypes.c_ulonglong(0), _Access(self._where, 3)
        _call("cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._made), none)
        _call("cuMemMap", self._at, self._size, ctypes.c_size_t(0), self._handle, none)
        _call("cuMemSetAccess", self._at, self._size, ctypes.byref(access), ctypes.c_size_t(1))
