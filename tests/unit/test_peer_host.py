"""Pulls between processes of one host: the same bytes as a plain loop over elements, and typed errors."""

from __future__ import annotations

import subprocess
import sys
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from tests.support.row_worlds import apply_rows, apply_world, change, random_rows, random_world, row
from tests.support.threads import soon
from xfer.errors import DeadlineExceeded, LayoutError, PeerLost, ProtocolError, RebindError
from xfer.kernels.marks import ChangeMarks
from xfer.plan.program import Op, Program, row_wire_bytes
from xfer.transport import peer, peer_host, peer_rdma
from xfer.transport.group import Aborted

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")


def pull_programs(kind, seed, shortest, runs, batch):
    """Rows of the rank's own storages, too. The rest are conversions, scattered rows and fills, and both ends agree on them."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 4))
    programs, storages = random_world(rng, size, 2, 12)
    live = [[torch.from_numpy(s.copy()) for s in some] for some in storages]
    with patch.multiple(peer_host, RUNS=runs, BATCH_BYTES=batch), patch.object(kind, "SHORTEST", shortest):
        exports = [kind.Export(k, live[k], CPU) for k in range(size)]
        mappings = [kind.Mapping(k, CPU) for k in range(size)]
        for mapping in mappings:
            for other in range(size):
                if other == mapping.rank:
                    mapping.own(live[other], range(len(live[other])))
                else:
                    mapping.open(exports[other].to_bytes(), other, range(len(live[other])))
        taken = peer.taken_roots([m.to_bytes() for m in mappings])
        cut = [peer.split(p, taken, kind.takes) for p in programs]
        for k, (rows, rest) in enumerate(cut):
            assert (rows["op"] == Op.COPY).all() and (rows["dst"] == k).all()
            others = (rest.rows["src"] != rest.rows["dst"]) | (kind is peer_host)
            assert not kind.takes(rest.rows[others & (rest.rows["op"] != Op.FILL)]).any()
            pull = kind.Pull(rows, mappings[k], live[k])
            for _ in range(2):
                pull.begin()
                stats = pull.finish(soon())
            assert stats.bytes_in == sum(n for _, n in stats.by_sender)
    pulled = [Program(k, 2, rows) for k, (rows, _) in enumerate(cut)]
    for got, want in zip(live, apply_world(pulled, storages)):
        assert all(np.array_equal(g.numpy(), w) for g, w in zip(got, want))


def pull_what_is_marked(kind, seed, share, shortest, runs, late):
    """It reads nothing if nothing has changed, and everything if the marks are of another refit than the destination holds."""
    rng = np.random.default_rng(seed)
    rows, src, dst = random_rows(rng)
    with patch.multiple(peer_host, RUNS=runs, PAYS=1.0), patch.object(kind, "SHORTEST", shortest):
        rows = rows[kind.takes(rows)]
        rows["dst"] = 1
        now, live = [torch.from_numpy(s.copy()) for s in src], [torch.from_numpy(d.copy()) for d in dst]
        marks, copies = ChangeMarks([len(s) for s in src], CPU), [t.clone() for t in now]
        export, mapping = kind.Export(0, now, CPU, marks.tensor), kind.Mapping(1, CPU)
        mapping.open(export.to_bytes(), 0, range(len(now)))
        pull = kind.Pull(rows, mapping, live)

        def pulled(base: int) -> int:
            pull.choose(base, soon())
            pull.begin()
            return pull.finish(soon()).bytes_in

        whole = int(row_wire_bytes(rows).sum())
        assert pulled(0) == whole
        change(rng, rows, [t.numpy() for t in now], share)
        marks.compare(now, copies, 4)
        came = pulled(4 + late)
        assert came == whole if late else came <= whole and (share > 0 or not came)
        want = apply_rows(rows, [t.numpy() for t in now], [t.copy() for t in dst])
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(live, want))
        assert pull.by_marks == (len(rows) > 0 and not late)
        later = [torch.from_numpy(d) for d in apply_rows(rows, src, [t.copy() for t in dst])]
        pull = kind.Pull(rows, mapping, [torch.full_like(t, 77) for t in later], live=later)
        if pulled(4 + late) and not late:
            pull.apply()
        assert late or all(np.array_equal(a.numpy(), b) for a, b in zip(later, want))


SEEDS, RUNS = st.integers(0, 2**32 - 1), st.sampled_from([3, 1024])


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(SEEDS, st.sampled_from([1, 8, 512]), RUNS, st.sampled_from([16, 8 << 20]))
def test_random_programs_are_pulled_bit_for_bit(seed, shortest, runs, batch):
    pull_programs(peer_host, seed, shortest, runs, batch)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(SEEDS, st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([1, 512]), RUNS, st.sampled_from([0, 1]))
def test_a_pull_of_what_is_marked_leaves_what_a_pull_of_everything_leaves(seed, share, shortest, runs, late):
    pull_what_is_marked(peer_host, seed, share, shortest, runs, late)


@pytest.mark.skipif(bool(peer_rdma.missing()), reason=peer_rdma.missing())
@pytest.mark.parametrize("seed", range(6))
def test_nixl_pulls_the_same_bytes(seed):
    """Few programs: an agent takes 0.2 s to start."""
    pull_programs(peer_rdma, seed, (1, 8, 512)[seed % 3], (3, 1024)[seed % 2], (16, 8 << 20)[seed % 2])
    pull_what_is_marked(peer_rdma, seed, (0.0, 0.02, 0.3)[seed % 3], (1, 512)[seed % 2], (3, 1024)[seed % 2], seed // 5)


CHILD = """
import os, sys, time, torch
from xfer.transport import peer_host
t = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
export = peer_host.Export(0, [t], torch.device("cpu"))
sys.stdout.buffer.write(export.to_bytes())
sys.stdout.flush()
os.close(1)
time.sleep(60)
"""


@pytest.fixture
def child():
    p = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    yield p, p.stdout.read()
    p.kill()
    p.wait()


def test_another_process_is_read_and_its_death_is_typed(child):
    process, offer = child
    mapping, roots = peer_host.Mapping(1, CPU), [torch.zeros(4 << 20, dtype=torch.uint8)]
    mapping.open(offer, 0, [0])
    rows = row((1024, 512), src_dtype="int32", src_strides=(4096, 4), src=0, dst=1)  # the first half of 1,024 columns
    pull = peer_host.Pull(rows, mapping, roots)
    pull.begin()
    assert pull.finish(soon()).bytes_in == 2 << 20
    want = torch.arange(1 << 20, dtype=torch.int32).view(1024, 1024)[:, :512]
    assert torch.equal(roots[0].view(torch.int32)[: 512 * 1024].view(1024, 512), want)
    pull.begin()
    pull.stop()
    with pytest.raises(Aborted):
        pull.finish(soon())
    with pytest.raises(DeadlineExceeded):
        pull.begin()
        pull.finish(time.monotonic() - 1)
    process.kill()
    process.wait()
    with pytest.raises(PeerLost, match="rank 0 .pid"):
        pull.begin()
        pull.finish(soon())
    late = peer_host.Mapping(1, CPU)
    late.open(offer, 0, [0])
    assert "cannot be read" in late._why[0] and not late.roots[0]


def test_what_is_not_offered_and_rows_that_end_outside_the_destinations_storage_are_refused():
    """As the kernels of the other routes do: the system would write over what lies behind it."""
    export = peer_host.Export(0, [torch.zeros(4 << 20, dtype=torch.uint8)], CPU)
    mapping, memory = peer_host.Mapping(1, CPU), torch.full((4096,), 7, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="storage 1 is asked for"):
        mapping.open(export.to_bytes(), 0, [1])
    with pytest.raises(RebindError, match="not mapped"):
        peer_host.Pull(row((8,), src=0, dst=1), peer_host.Mapping(1, CPU), [memory])
    mapping.open(export.to_bytes(), 0, [0])
    for at in (3072 - 1000, -512):
        late = row((1024,), src_dtype="uint8", src=0, dst=1, dst_offset=at)
        with pytest.raises(LayoutError, match="tensor 0 dst rank 1"):
            pull = peer_host.Pull(late, mapping, [memory[512 : 512 + 3072]])
            pull.begin()
            pull.finish(soon())
    assert (memory == 7).all()
