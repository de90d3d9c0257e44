"""Runs a module on a machine that lacks a GPU or TransformerEngine, with stand-ins for them. With both, it only runs the module.

torchrun --nproc-per-node 4 -m examples.grpo.stand_ins examples.grpo.train ...
"""

from __future__ import annotations

import runpy
import sys


def install() -> None:
    """Before Megatron is imported anywhere."""
    from examples.common import megatron_cpu

    megatron_cpu.install()
    megatron_cpu.import_bridge()
    if not megatron_cpu.has_transformer_engine():
        from examples.common import te_twin

        te_twin.install()


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
