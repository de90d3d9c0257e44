"""torch's gloo groups with two threads corrupt the heap of a process that gathers as Megatron's distributed optimizer does."""

import subprocess
import sys

import pytest

GATHERS = """
import os, sys, time
import torch, torch.distributed as dist
from examples.common.gloo_threads import one_thread_each

one_thread_each()
one_thread_each()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group()
a, b, s = torch.ones(8), torch.empty(8), torch.ones(8)
until, works = time.monotonic() + 4, []
while time.monotonic() < until:
    for k in range(100):
        with dist._coalescing_manager(async_ops=True) as gathered:
            dist.all_gather_into_tensor(b, a)
        works += [gathered, dist.all_reduce(s, async_op=True)]
    while works:
        works.pop().wait()
names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
print("threads", sum("gloo_runloop" in n for n in names), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_two_kinds_of_collectives_in_flight_do_not_kill_the_process():
    """With two threads it is dead within seconds."""
    ended = subprocess.run([sys.executable, "-c", GATHERS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    assert "threads 2" in ended.stdout  # two groups
