"""Triton compiles every kernel for Hopper. Its interpreter, in which other tests run kernels, checks neither types nor what
the assembler takes. Compiling needs no GPU."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.row_worlds import row
from tests.unit.test_kernels_quantize import random_box
from xfer.kernels import checksum, marks
from xfer.kernels.block_fp8 import ScaleRule

pytest.importorskip("triton")
LAUNCHED = {
    name
    for path in Path(marks.__file__).parent.glob("*.py")
    for name in re.findall(r"^\s+(_\w+)\[\(", path.read_text(), re.M)
}
"""Names of all kernels that host code launches."""


@pytest.fixture
def compiled(monkeypatch) -> set[str]:
    """Names of the kernels that were compiled, in place of their launches."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from xfer.kernels import marks_triton

    no_device = Mock(
        **{"get_current_target.return_value": GPUTarget("cuda", 90, 32), "get_current_device.return_value": 0}
    )
    if not isinstance(marks_triton._compare, JITFunction):
        pytest.skip("Triton's interpreter compiles nothing")
    run, names = JITFunction.run, set()

    def compile_only(self, *args, grid, warmup, **more):
        assert run(self, *args, grid=grid, warmup=True, **more).asm["cubin"]
        names.add(self.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", no_device)
    return names


def test_every_kernel_compiles(compiled):
    from xfer.kernels import written_triton
    from xfer.kernels.checksum_triton import TritonSums
    from xfer.kernels.marks_triton import MarkKernels
    from xfer.kernels.quantize_triton import TritonQuantizer
    from xfer.kernels.triton_impl import TritonRows

    n = 1 << 16
    a, b, c = (torch.zeros(n, dtype=torch.uint8) for _ in "abc")
    places = marks.places([n])
    bits = torch.zeros(int(places[-1]), dtype=torch.uint8)
    addresses = torch.from_numpy(bits.data_ptr() + places[:-1])
    kernels = MarkKernels([a], [b], bits, places, marks.rest_of((), [n]), ())
    kernels.compare()
    kernels.update()
    for dtype, length in product((torch.bfloat16, torch.float16), (n // 2, n // 2 - 1)):
        span, value = marks.ByteRange(0, 0, 2 * length), torch.zeros(length)
        write = marks.SpanWrite(0, a.view(dtype)[:length], value)
        written_triton.MarkedWrites([write], [span], places).run(bits, torch.zeros(1, 2, dtype=torch.int32))

    copy, cast = row((n // 2,)), row((n // 4,), src_dtype="float32", dst_dtype="bfloat16")
    rows = TritonRows(np.concatenate([copy, cast]), [b], "local", [a], programs=2, bits=addresses, live=[c])
    rows.move()
    rows.move_marked()
    sums = TritonSums(copy, np.zeros(1, np.int64), 1, [b], "dst", [checksum.placed(copy[0], "dst", [(n // 2,)])])
    sums.launch()
    TritonRows(copy, [b], "local", [a], programs=2, summed=sums)

    rng = np.random.default_rng(1)
    for rule in ScaleRule:
        for hardware in (False, True):
            TritonQuantizer([random_box(rng)[1] for _ in range(4)], rule, hardware).run()
    assert compiled == LAUNCHED
