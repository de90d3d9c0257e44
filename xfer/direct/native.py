"""One trainer rank's matrices that it keeps in block FP8 itself: engines that serve that form get its bytes and scales as they are.

Nothing is computed and nothing is copied. Engines ask for derived tensors (trace/derived.py), and a rank offers the storages of its own
parameters as parts of them. quantized.py makes the derived tensors of matrices that are held in bf16 or fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from xfer.errors import Unsupported
from xfer.kernels.block_fp8 import ScaleRule
from xfer.trace.catalog import Catalog
from xfer.trace.derived import BLOCK, VALUES
from xfer.trace.fragment import Fragment
from xfer.trace.traced import TrainerLayout

NATIVE = "native"
"""Stands for these scales among the names of rules."""


class Native:
    """The parts of derived tensors that one trainer rank offers out of its own parameters.

    Args:
        catalog: The session's checkpoint tensors.
        layout: This rank's weights.
        who: This rank, for errors.

    Attributes:
        fragments: Parts of derived tensors.
        rest: The layout's fragments of all other tensors.
        rules: (NATIVE,) if engines take any of these matrices, else ().

    Raises:
        Unsupported: An engine needs scales that are powers of two, and the trainer's are not.
    """

    def __init__(self, catalog: Catalog, layout: TrainerLayout, who: str):
        held = _by_tensor(layout.traced.fragments, {f.tensor for f in layout.scales})
        scales = _by_tensor(layout.scales, held)
        self.rest = tuple(f for f in layout.traced.fragments if f.tensor not in held)
        self.fragments: tuple[Fragment, ...] = tuple(
            replace(f, tensor=spec.name)
            for spec in catalog.specs
            if spec.of in held
            for f in (held if spec.dtype == VALUES else scales)[spec.of]
        )
        asked = {spec.rule: spec.of for spec in catalog.specs if spec.of in held}
        if ScaleRule.POW2.value in asked and not layout.pow2:
            raise Unsupported(
                f"{who}: an engine quantizes weights again unless their scales are powers of two, and the trainer's are not",
                [
                    f"{asked[ScaleRule.POW2.value]} and others: start vLLM with VLLM_USE_DEEP_GEMM_E8M0=0, or train without "
                    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
                ],
            )
        self.rules = (NATIVE,) if asked else ()
        self._who, self._count, self._pow2 = who, len({s.of for s in catalog.specs} & held.keys()), layout.pow2

    def explain(self) -> str:
        """Two lines for a person to read; empty if no engine takes any of these matrices."""
        if not self.rules:
            return ""
        scales = "powers of two" if self._pow2 else "any float32 numbers"
        return (
            f"{self._who} keeps {self._count} matrices in FP8 itself (e4m3, a scale per {BLOCK}x{BLOCK} block, {scales}) and sends them "
            "out of its parameters, rule native.\nEngines then hold, bit for bit, the bytes and scales that this trainer multiplies with."
        )


def _by_tensor(fragments: Iterable[Fragment], names: Iterable[str]) -> dict[str, list[Fragment]]:
    out: dict[str, list[Fragment]] = {name: [] for name in names}
    for f in fragments:
        if f.tensor in out:
            out[f.tensor].append(f)
    return out
