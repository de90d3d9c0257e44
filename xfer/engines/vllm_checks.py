"""Whether the ranks of a vLLM worker's forward agree."""

from __future__ import annotations

from xfer.engines.checks import agreed


def all_agree(verdict: bool, about: str) -> bool:
    """Return whether all ranks of this rank's forward pass True. Collective over its tensor- and data-parallel groups.

    Raises:
        XferError: `about` differs between ranks. All of them raise it.
    """
    from vllm.distributed.parallel_state import get_dp_group, get_tp_group

    return agreed(verdict, about, [g.cpu_group for g in (get_tp_group(), get_dp_group()) if g.world_size > 1])
