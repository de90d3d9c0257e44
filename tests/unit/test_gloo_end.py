"""Ends of processes that used torch's gloo groups: its threads hold no tensor any more when the interpreter goes."""

import subprocess
import sys

import pytest

STARVED = """
import os, sys, weakref
import torch, torch.distributed as dist
from examples.common import gloo_end

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for thread in os.listdir("/proc/self/task"):
    if "runloop" in open(f"/proc/self/task/{thread}/comm").read():
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
held = 0
for _ in range(200):
    t = torch.ones(1)
    dist.all_reduce(t)
    seen = weakref.ref(t)
    del t
    held += seen() is not None
    gloo_end.settle()
    if seen() is not None:
        sys.exit("a thread of gloo still holds a tensor")
print(held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the states of threads from /proc")
def test_gloos_threads_have_let_go_of_tensors_when_a_process_ends():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        ended = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=120)
    finally:
        for p in busy:
            p.kill()
            p.wait()
    assert ended.returncode == 0, ended.stderr
    print("held after the collective:", ended.stdout)
