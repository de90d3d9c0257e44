"""What examples do about two faults of torch's gloo groups: tensors that threads still hold at exit, and a corrupted heap."""

import ctypes
import hashlib
import subprocess
import sys
import threading

import pytest

from examples.common import gloo_end
from tests.support.world import until_true

PR_SET_NAME = 15

HELD = """
import sys, weakref
import torch, torch.distributed as dist
from examples.common import gloo_end

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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
print("held after the collective:", held)
"""
# As Megatron's distributed optimizer gathers. With two threads a group the process is dead within seconds.
GATHERS = """
import os, sys, time
import torch, torch.distributed as dist
from examples.common.gloo_threads import few_threads

few_threads()
few_threads()
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
print("threads of two groups:", sum("gloo_runloop" in n for n in names), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads in /proc")
@pytest.mark.parametrize(
    "code, says", [(HELD, "held after"), (GATHERS, "threads of two groups: 2")], ids=["held tensors", "gathers"]
)
def test_a_process_that_used_gloo_groups_ends_well(code, says):
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and says in ended.stdout, (ended.returncode, ended.stdout, ended.stderr)


def test_an_end_waits_until_threads_of_gloo_have_slept_twice_in_a_row(monkeypatch):
    looks = iter([True, False, True, False, False])
    monkeypatch.setattr(gloo_end, "_some_runs", lambda: next(looks))
    monkeypatch.setattr(gloo_end, "WAIT_S", 60.0)  # the number of looks decides, not the speed of the machine
    gloo_end.settle()
    assert not [*looks]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads in /proc")
def test_a_thread_of_gloo_that_computes_is_seen_to_run():
    """One of that name stands for it. It computes without the interpreter's lock, as gloo does."""
    end = threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"gloo_runloop")
        while not end.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until_true(gloo_end._some_runs)
    finally:
        end.set()
        thread.join()
    until_true(lambda: not gloo_end._some_runs())
