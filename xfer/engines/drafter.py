"""An engine with a drafter (speculative decoding) has two models. vLLM shows its workers' transfer engines the second one
when a draft update is opened, so the controller opens and finishes an empty one before it connects.

From then on ordinary refits bring both: one layout, one decision. Not here: what the second model's layout is
(vllm_layout.py), how calls are sent (handles.py).
"""

from __future__ import annotations

from xfer.engines.handles import Handle


def hand_over(handle: object, timeout: float) -> bool:
    """Whether the engine's workers have a drafter, which their transfer engines then know. A vLLM or a forwarder
    without such calls has none; a worker that has one all the same refuses by name when it joins."""
    if not isinstance(handle, Handle) or not handle.has_drafter(timeout):
        return False
    handle.start_update(timeout, "start_draft")
    handle.finish(None, timeout)
    return True
