"""Plain tiles moved by Hopper's bulk copy engine: from global memory (mapped or own) to shared memory and on, without a
register in between.

CUDA source, compiled by NVRTC when first asked for; only for tables whose unit is 16 bytes, on devices of compute
capability 9.0 and later with cuda-bindings installed. It reads the same tables as triton_impl's kernel and leaves the
same bytes. Not here: tables (tiles.py), conversions and odd alignments (triton_impl.py), who chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from xfer.errors import XferError


@dataclass(frozen=True, slots=True)
class Shape:
    """stage: bytes of a stage in shared memory; stages: how many; ahead: loads in flight, the others are being stored;
    per_sm: blocks (of one warp) a multiprocessor."""

    stage: int = 16 << 10
    stages: int = 6
    ahead: int = 4
    per_sm: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.ahead < self.stages or self.stage % 128:
            raise ValueError(f"{self}: 0 < ahead < stages, and whole cache lines in a stage")


SOURCE = r"""
typedef long long i64; typedef unsigned u32; typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

struct Piece { char* dst; i64 step; int rows, width; };  // what a stage holds: rows of `width` bytes, dense; `step` apart where they go

extern "C" __global__ void __launch_bounds__(32) move_tiles(
    const i64* src_bases, const i64* dst_bases, const i64* tiles, int count, int* counter, const int* abort) {
  extern __shared__ __align__(128) char stages[];
  __shared__ __align__(8) u64 full[STAGES];
  __shared__ Piece pieces[STAGES];
  const int lane = threadIdx.x;
  if (lane == 0) {
    for (int s = 0; s < STAGES; s++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_at(&full[s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  const char* src = nullptr; char* dst = nullptr;
  i64 src_step = 0, dst_step = 0;
  int width = 0, rows = 0, row = 0, column = 0;  // of this tile, in bytes and rows; what comes next of it
  bool more = true;
  int loaded = 0, stored = 0;
  while (true) {
    while (more && loaded - stored < AHEAD) {
      if (row >= rows) {  // the next tile
        int i = 0;
        if (lane == 0) i = *(volatile const int*)abort ? count : atomicAdd(counter, 1);
        i = __shfl_sync(~0u, i, 0);
        if (i >= count) { more = false; break; }
        const i64* t = tiles + (i64)i * 8;
        const i64 roots = t[0], shape = t[3];
        src = (const char*)(src_bases[roots & 0xFFFFFFFF] + t[1]);
        dst = (char*)(dst_bases[roots >> 32] + t[2]);
        width = (int)(shape & 0xFFFFFFFF) * 16; rows = (int)(shape >> 32);
        src_step = t[4] * 16; dst_step = t[5] * 16;
        row = column = 0;
      }
      const int s = loaded % STAGES;
      const bool part = width > STAGE;
      const int n = part ? min(STAGE, width - column) : width, k = part ? 1 : min(rows - row, STAGE / width);
      // Stores are committed in order by every lane; all but the last STAGES - AHEAD have been read out then.
      asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(STAGES - AHEAD) : "memory");
      __syncwarp();
      if (lane == 0) {
        pieces[s] = Piece{dst + row * dst_step + column, dst_step, k, n};
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_at(&full[s])), "r"(k * n) : "memory");
      }
      __syncwarp();
      for (int r = lane; r < k; r += 32)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            :: "r"(shared_at(stages + s * STAGE + r * n)), "l"(src + (row + r) * src_step + column), "r"(n),
               "r"(shared_at(&full[s])) : "memory");
      loaded++;
      column += n;
      if (column >= width) { column = 0; row += k; }
    }
    if (stored == loaded) break;
    const int s = stored % STAGES;
    u32 done = 0;
    while (!done)
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done) : "r"(shared_at(&full[s])), "r"((stored / STAGES) & 1) : "memory");
    const Piece p = pieces[s];
    for (int r = lane; r < p.rows; r += 32)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
          :: "l"(p.dst + r * p.step), "r"(shared_at(stages + s * STAGE + r * p.width)), "r"(p.width) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    stored++;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


@cache
def compiled(shape: Shape, arch: str = "sm_90") -> bytes:
    """The cubin. Needs no device."""
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={arch}", "-std=c++17"]
    options += [f"-DSTAGE={shape.stage}", f"-DSTAGES={shape.stages}", f"-DAHEAD={shape.ahead}"]
    program = _ok(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"bulk.cu", 0, [], []))
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _ok(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise XferError(f"NVRTC does not compile the bulk copy kernel: {log.decode().strip()}")
    out = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
    _ok(nvrtc.nvrtcGetCUBIN(program, out))
    return out


@cache
def _function(shape: Shape, device: int):
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    module = _ok(driver.cuModuleLoadData(compiled(shape, f"sm_{major}{minor}")))
    function = _ok(driver.cuModuleGetFunction(module, b"move_tiles"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _ok(driver.cuFuncSetAttribute(function, attribute, shape.stage * shape.stages))
    return function


def launch(
    shape: Shape,
    src_bases: torch.Tensor,
    dst_bases: torch.Tensor,
    tiles: torch.Tensor,
    count: int,
    counter: torch.Tensor,
    abort: torch.Tensor,
) -> None:
    """On the current device's current stream. Tensors as for triton_impl's kernel; tiles of 16-byte units."""
    import ctypes

    from cuda.bindings import driver

    device = tiles.device.index
    function = _function(shape, device)
    programs = max(1, min(count, shape.per_sm * torch.cuda.get_device_properties(device).multi_processor_count))
    values = (src_bases.data_ptr(), dst_bases.data_ptr(), tiles.data_ptr(), count, counter.data_ptr(), abort.data_ptr())
    types = (ctypes.c_void_p,) * 3 + (ctypes.c_int,) + (ctypes.c_void_p,) * 2
    stream = torch.cuda.current_stream(device).cuda_stream
    _ok(
        driver.cuLaunchKernel(
            function, programs, 1, 1, 32, 1, 1, shape.stage * shape.stages, stream, (values, types), 0
        )
    )


def _ok(answer):
    """The value of a call of cuda-bindings, (code, value...). XferError where the code is not 0."""
    code, *value = answer
    if int(code) != 0:
        raise XferError(f"{type(code).__name__} {code.name}")
    return value[0] if value else None
