"""Sessions between emulated hosts (tests/support/hosts.py): every byte crosses a shaped network interface, by gloo or NIXL.

.venvs/trainer/bin/python -m pytest -q tests/functional/test_hosts.py                # a few seconds
.venvs/trainer/bin/python -m pytest -q -m slow tests/functional/test_hosts.py        # all faults of links and hosts
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time

import pytest

from examples.common import toy
from tests.functional.test_session_deaths import GRACE_S, failed, good
from tests.support import refit_job
from tests.support.host_world import BUCKET, BYTES, Copy, HostWorld, mains
from tests.support.hosts import Cluster, ended, missing
from tests.support.marks import BOTH
from tests.support.proc import PATIENCE, ROOT
from tests.support.refit_job import Job
from tests.support.world import ToyTaker, specs_of, until_true
from tests.support.world_processes import RDMA
from xfer.plan.fabric import Site
from xfer.plan.fabric_file import read_site
from xfer.plan.inventory import engine_inventory, trainer_inventory
from xfer.plan.planner import plan_replicas
from xfer.plan.predict import predict
from xfer.trace.catalog import Catalog
from xfer.transport import peer_rdma

NEEDED = sum(2 * a * b for a, b in (s for s in BYTES.values() if len(s) == 2)) + 2 * 12
"""Bytes that each replica of one worker needs."""


@pytest.fixture(scope="module", autouse=True)
def needs_hosts():
    if why := missing():
        pytest.skip(why)


def right(w, version, replicas=None):
    """All workers hold exactly these weights, and the controllers serve them."""
    for r in w.replicas:
        if replicas is None or r.index in replicas:
            assert r.controller.value("state")["serves"], f"replica {r.index}"
            held = [x.value("holds", versions=[version])["whole"] for x in r.workers]
            assert held == [[version]] * w.workers, f"replica {r.index}"


def measured(w, version, meanwhile=lambda: None, **options) -> tuple[dict, list[list[int]]]:
    """The report of a refit, and the bytes that came in over each NIC of each host. meanwhile: what is done after its begin."""
    before = [w.cluster.by_nic(h) for h in w.cluster.hosts]
    w.begin(version, **options)
    meanwhile()
    report = good(w.answers())
    return report, [[n - m for m, n in zip(b, w.cluster.by_nic(h))] for b, h in zip(before, w.cluster.hosts)]


NIXL = pytest.mark.skipif(bool(peer_rdma.missing()), reason=peer_rdma.missing())
NETWORKS = {"IPv4": {}, "IPv6": dict(ipv6=True), "rails": dict(ranks=2, rails=True), "NIXL": {}}
MARKS = {"IPv6": pytest.mark.slow, "rails": pytest.mark.slow, "NIXL": NIXL}


@pytest.mark.parametrize("network", [pytest.param(n, marks=MARKS.get(n, ())) for n in NETWORKS])
def test_a_session_between_hosts_brings_every_byte_in_once(tmp_path, network):
    how, ranks, rdma = NETWORKS[network], NETWORKS[network].get("ranks", 1), network == "NIXL"
    with Cluster(4 // ranks, mbit=200, **how) as c:
        if rdma:
            c.show_nics()
        with HostWorld(c, tmp_path, trainers=2, workers=1, rdma=rdma) as w:
            good(w.meet())
            for version in (1, 2):
                report, came = measured(w, version, verify=True)
                assert report["committed"] == [True, True]
                assert [[*r] for r in report["routes"]] == [["rdma" if rdma else "gloo"]] * 2, report
                right(w, version)
                assert all(sum(some) < 0.05 * NEEDED for some in came[: 2 // ranks]), came
                assert all(ranks * NEEDED <= sum(some) <= ranks * NEEDED * 1.02 for some in came[2 // ranks :]), came
            w.trainers[0].value("change")  # storages that move are offered anew
            good(w.refit(3, verify=True))
            right(w, 3)


WIDE = {"layers.0.w": (1024, 1024), "layers.1.w": (512, 1024), "router": (512 << 10,), "embed": (36, 8), "norm": (12,)}
WIDE_NEEDED = sum(2 * math.prod(shape) for shape in WIDE.values())


class WideWorld(HostWorld):
    """All workers of a replica need a quarter of its bytes, its vectors."""

    mains = mains(shapes=WIDE)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_all_workers_of_a_host_need_enters_it_once(tmp_path, replicas):
    """One of them receives it. Also where that one dies. Two replicas on the host are a relay ring besides."""
    how = dict(trainers=2 * replicas, workers=2, replicas=replicas, relay=True)
    with Cluster(2, 2 * replicas, mbit=100) as c, WideWorld(c, tmp_path, **how) as w:
        good(w.meet())

        def refit(version: int, most: float = 1.0, **options) -> tuple[float, dict]:
            report, (*_, here) = measured(w, version, **options)
            came = sum(here) / WIDE_NEEDED
            assert report["committed"] == [True] * replicas and came <= 1.02 * most, (came, report)
            right(w, version)
            return came, report

        for version in (1, 2):
            came, report = refit(version, verify=True)
            assert came >= 1 and all({"gloo", "relay"} == set(r) for r in report["routes"]), report
        refit(3, verify=True, stage=True)
        came, _ = refit(4, verify=True, delta="auto")
        assert refit(5, 0.3, verify=True, delta="auto")[0] < 0.3 and came >= 1
        w.fault("replica0", "worker:1:wave:kill")
        failed(w.refit(6, deadline_s=FAR), ("PeerLost", "EngineLost"), within=math.inf)
        w.restart(0)
        refit(7, verify=True)


class CopiesWorld(HostWorld):
    """Each trainer holds everything."""

    mains = mains(Copy)


def planned_bytes(site: Site) -> dict[str, int]:
    """By link of the fabric, the bytes of a refit in a CopiesWorld of one worker a replica, as `xfer plan` predicts them."""
    catalog = Catalog(specs_of(BYTES))
    held, taken = Copy(0, 1, BYTES).read(), ToyTaker(0, 1, BYTES).read(catalog)
    sources = [
        trainer_inventory(catalog, rank=r, host="", roots=held.roots, fragments=held.traced.fragments)
        for r in range(len(site.trainers))
    ]
    destination = engine_inventory(
        catalog, rank=0, host="", roots=taken.roots, fragments=taken.traced.fragments, fills=taken.traced.fills,
        footprint=taken.footprint, reads=taken.traced.reads,
    )  # fmt: skip
    p = predict(plan_replicas(catalog, sources, [destination], site, bucket_bytes=BUCKET), site)
    return dict(zip(p.links.names, p.link_bytes.tolist()))


def test_each_network_card_carries_the_bytes_that_a_plan_with_a_fabric_says(tmp_path):
    """A NIC for each rank; that of trainer 0 is half as fast as that of trainer 1, so by the fabric it sends a third of the bytes. Both
    together are slower than a worker's: a full buffer there would drop packets, which TCP sends again."""
    fabric = tmp_path / "fabric.toml"
    with Cluster(2, 2, mbit=400, apart=True) as c, CopiesWorld(c, tmp_path, trainers=2, workers=1) as w:
        c.slow(c.hosts[0], 0.25, nics=[0])
        c.slow(c.hosts[0], 0.5, nics=[1])
        fabric.write_text(c.fabric([0, 1], [[2], [3]]))
        good(w.meet(fabric=str(fabric)))
        carried = lambda: [*c.by_nic(c.hosts[0], "tx"), *c.by_nic(c.hosts[1])]  # noqa: E731
        planned = planned_bytes(read_site(fabric))
        ways = ("h0", 0, "out"), ("h0", 1, "out"), ("h1", 0, "in"), ("h1", 1, "in")
        planned = [planned[f"{h} NIC of GPU {g} (rail 0) {way}"] for h, g, way in ways]
        assert planned == pytest.approx([NEEDED * 2 / 3, NEEDED * 4 / 3, NEEDED, NEEDED], rel=0.02)
        for version in (1, 2):
            before = carried()
            assert good(w.refit(version))["committed"] == [True, True]
            right(w, version)
            came = [b - a for a, b in zip(before, carried())]
            assert all(n <= m <= 1.02 * n for n, m in zip(planned, came)), (planned, came)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("relay, times", [(True, 1), (False, 2)], ids=["in a relay ring", "each by itself"])
def test_real_engines_of_one_host_are_refitted_from_others(tmp_path, relay, times):
    """Bytes enter it so many times. The truth: what vLLM loaded of seed 1. On hosts of their own: test_host_engines.py."""
    with Cluster(3, mbit=400) as c:
        places = dict(zip(("trainer0", "trainer1", "engine0", "engine1"), (c.hosts[i] for i in (0, 1, 2, 2))))
        with Job(
            tmp_path, "qwen3", world=2, address=c.hosts[0].address, host_of=lambda n: places[n.partition("-")[0]]
        ) as job:
            engines = [job.engine(f"engine{i}", 1) for i in range(2)]
            for e in engines:
                e.start(str(job.model), "auto")
            for e in engines:
                e.started()
            truth = engines[0].observe()
            nbytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in toy.specs(job.config))
            refit_job.good(job.meet(engines, relay=relay))
            for e in engines:
                e.ready()
            for seed in (2, 1):
                before = c.bytes_in(c.hosts[2])
                report = refit_job.good(job.trainers.refit(seed, verify=True))
                came = c.bytes_in(c.hosts[2]) - before
                assert report["verified"] and report["serving"] == [True, True]
                assert nbytes * times <= came <= nbytes * times * 1.02, came / nbytes
                same = [e.observe().same(truth) for e in engines]
                assert same == [seed == 1] * 2


@pytest.mark.slow
def test_replicas_of_a_host_share_what_enters_it_whatever_happens_to_them_and_to_the_other_host(tmp_path):
    """Replicas 0 and 1 are on one host, 2 and 3 on another one. Each NIC receives half of the bytes."""
    how = dict(trainers=2, workers=1, replicas=4, relay=True)
    with Cluster(3, 2, mbit=25, apart=True) as c, HostWorld(c, tmp_path, **how) as w:
        good(w.meet())

        def refit(version: int, hosts: tuple[int, ...], *meanwhile, **options) -> dict:
            """A refit in which all bytes enter these hosts."""
            report, came = measured(w, version, *meanwhile, **options)
            for h in hosts:
                assert NEEDED <= sum(came[h]) <= NEEDED * 1.02 and max(came[h]) < 0.55 * NEEDED, (h, came)
            return report

        def whole(version: int) -> None:
            assert [set(r) for r in refit(version, (1, 2))["routes"]] == [{"gloo", "relay"}] * 4
            right(w, version)

        whole(1)
        whole(2)

        w.fault("replica1", "worker:0:wave:kill")  # before it has offered a part, which replica 0 would find gone
        began = time.monotonic()
        report = refit(3, (2,), deadline_s=60.0, min_replicas=1)
        assert time.monotonic() - began < 20.0 * PATIENCE, "long before the deadline"
        assert report["committed"] == [False, False, True, True], report
        typed, _, text = report["errors"][0].partition(": ")
        assert typed == "PeerLost" and "replica 0 takes its weights from replica 1, which failed" in text, report
        right(w, 3, [2, 3])
        w.restart(1)  # its first weights come from the other host
        until_true(lambda: w.replicas[1].controller.value("state")["version"] == 3)
        right(w, 3, [1])
        whole(4)

        def cut() -> None:
            """In the midst of a transfer: workers behind this link stand at their third wave."""
            held = [w.replicas[i].workers[0] for i in (2, 3)]
            until_true(lambda: all(p.is_stopped() for p in held))
            c.cut(c.hosts[2])
            for i, p in zip((2, 3), held):
                w.fault(f"replica{i}", "")
                p.signal(signal.SIGCONT)

        for i in (2, 3):
            w.fault(f"replica{i}", "worker:0:wave:stop@3")
        report = refit(5, (1,), cut, deadline_s=3.0 * PATIENCE, min_replicas=1)
        assert report["committed"] == [True, True, False, False] and all(report["errors"][2:]), report
        right(w, 5, [0, 1])
        c.mend(c.hosts[2])
        good(w.refit(6))  # with it comes what was on its way when the link was cut
        whole(7)


def test_hosts_end_with_the_process_that_made_them():
    script = (
        "import subprocess, sys, time; from tests.support.hosts import Cluster\n"
        "c = Cluster(2, mbit=100).__enter__(); subprocess.Popen(c.hosts[0].command('sleep', '1000'))\n"
        "print(*(h.keeper for h in c.hosts), flush=True); time.sleep(1000)"
    )
    p = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    keepers = [int(k) for k in p.stdout.readline().split()]
    assert len(keepers) == 2 and not any(map(ended, keepers))
    p.send_signal(signal.SIGKILL)
    p.wait(10)
    until_true(lambda: all(map(ended, keepers)), 10 * PATIENCE)


# ---- links and hosts that fail

RATE = 16.0
"""Mbit/s: the 2 MB of a replica come in about a second."""
SHORT = 4.0
"""Deadline of a refit that is to reach it, or that the slow link of a replica makes late."""
FAR = 30.0 * PATIENCE
LATEST = SHORT + GRACE_S
"""Seconds in which its calls end."""
LATE = ("DeadlineExceeded", "PeerLost")


@pytest.fixture
def world(tmp_path, request):
    """Two trainers on hosts 0 and 1, two replicas of one worker on hosts 2 and 3. Asked for with arguments of HostWorld."""
    how = dict(trainers=2, workers=1, deadline_s=FAR) | getattr(request, "param", {})
    with Cluster(4, mbit=RATE) as c:
        c.show_nics()
        with HostWorld(c, tmp_path, **how) as w:
            good(w.meet())
            good(w.refit(1))
            right(w, 1)
            yield w


by_nixl = pytest.mark.parametrize("world", [pytest.param(dict(rdma=True), id="NIXL", marks=NIXL)], indirect=True)
by_both = pytest.mark.parametrize(
    "world", [{}, pytest.param(dict(rdma=True), marks=NIXL)], ids=["gloo", "NIXL"], indirect=True
)


def begin(w, version: int, **options) -> None:
    """A refit of these weights begins, and some of its bytes have come."""
    came = [w.cluster.bytes_in(h) for h in w.cluster.hosts[2:]]
    w.begin(version, **options)
    until_true(lambda: all(w.cluster.bytes_in(h) > b + NEEDED / 8 for h, b in zip(w.cluster.hosts[2:], came)), 20)


def no_mix(w) -> None:
    """A replica that serves holds one whole version, and one that does not holds that or NaN."""
    for r in w.replicas:
        (worker,), state = r.workers, r.controller.value("state")
        until_true(lambda: worker.value("holds", versions=[])["idle"], FAR)  # noqa: B023
        held = worker.value("holds", versions=list(range(8)))
        assert held["whole"] or held["nan"] and not state["serves"], (r.index, state, held)


def only_the_first(w, *types: str, says: str = "replica 1") -> None:
    """The refit of version 2 that has begun commits on replica 0 and fails on replica 1, with such an error, in time."""
    answers = w.answers()
    report = good(answers)
    assert report["committed"] == [True, False] and all(a["seconds"] < LATEST for a in answers), answers
    assert report["errors"][1].startswith(types or "") and says in report["errors"][1], report
    right(w, 2, [0])


def goes_on(w, meet: bool = False) -> None:
    """The job's next refit is whole, if need be after a new meeting. None begins while NIXL may still write."""
    if meet:
        w.quiet()
        good(w.meet())
    done = lambda: all(a["kind"] == "done" for a in w.refit(3, deadline_s=FAR))  # noqa: E731
    if w.flags[RDMA]:
        until_true(done, FAR)
    else:
        assert done()
    right(w, 3)


@pytest.mark.slow
@by_both
def test_a_cut_link_fails_its_replica_in_time_and_the_other_goes_on(world):
    w, c = world, world.cluster
    begin(w, 2, deadline_s=SHORT, min_replicas=1)
    c.cut(c.hosts[3])
    only_the_first(w, *LATE, "EngineLost")
    c.mend(c.hosts[3])
    goes_on(w)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [0, 1])
def test_a_trainer_whose_link_is_cut_ends_the_refit_on_every_rank_in_time(world, trainer):
    """Trainer 0 has the rendezvous in its process."""
    w, c = world, world.cluster
    begin(w, 2, deadline_s=SHORT)
    c.cut(c.hosts[trainer])
    failed(w.answers(), LATE, within=LATEST)
    c.mend(c.hosts[trainer])
    no_mix(w)
    goes_on(w)


@pytest.mark.slow
@by_nixl
@pytest.mark.parametrize("dies", [True, False])
def test_a_trainer_that_dies_or_is_stopped_in_mid_read_is_one_typed_error_in_time(world, dies):
    """Until one that is stopped goes on, bytes may still arrive, and no refit is begun. Nothing of the old one arrives in the next."""
    w, victim = world, world.trainers[1]
    if dies:
        begin(w, 2, deadline_s=FAR)
        victim.signal(signal.SIGKILL)
        failed(w.answers([0]), ("PeerLost",), "trainer 1", within=20.0)
        assert victim.dead()
    else:
        w.fault("trainers", "trainer:1:moving:stop@1")
        w.begin(2, deadline_s=SHORT)
        until_true(victim.is_stopped, 20)
        failed(w.answers([0]), LATE, within=LATEST)
        victim.signal(signal.SIGCONT)
        w.answers([1])
    no_mix(w)
    goes_on(w, meet=dies)


@pytest.mark.slow
def test_a_slow_link_takes_longer_or_fails_its_replica_at_the_deadline(world):
    w, c = world, world.cluster
    c.slow(c.hosts[3], 0.1)
    begin(w, 2, deadline_s=SHORT, min_replicas=1)
    only_the_first(w, "DeadlineExceeded", says="")
    good(w.refit(3, deadline_s=FAR))
    right(w, 3)
    c.mend(c.hosts[3])
    took = good(w.refit(4, deadline_s=FAR))["transfer_s"]
    assert took < 4 * NEEDED * 8 / RATE / 1e6, took
    right(w, 4)


@pytest.mark.slow
def test_a_lossy_link_costs_time_and_no_bit(world):
    w, c = world, world.cluster
    for h in c.hosts:
        c.lose(h, 0.01)
    for version in (2, 3):
        good(w.refit(version, deadline_s=FAR, verify=True))
        right(w, version)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["enter", "drain", "plan", "link", "moving", "wave", "done"])
def test_a_trainers_host_that_vanishes(world, point):
    """Not a packet tells of it. The others raise, in time; with a new host the job goes on."""
    w = vanishes(world, 1, "trainers", f"trainer:1:{point}")
    failed(w.answers([0]), LATE, "trainer 1", within=LATEST)
    w.cluster.mend(w.cluster.hosts[1])
    no_mix(w)
    goes_on(w, meet=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", [dict(faster=5)], ids=[""], indirect=True)
@pytest.mark.parametrize("point", ["arm", "plan", "link", "moving", "wave", "done", "commit"])
def test_an_engines_host_that_vanishes(world, point):
    """The other replica commits. A new engine on that host is told that the place is taken, for a minute (here a fifth of it) at most."""
    w = vanishes(world, 3, "replica1", f"worker:0:{point}")
    only_the_first(w)
    w.cluster.mend(w.cluster.hosts[3])
    w.replicas[1].stop()
    w.quiet()
    w.replicas[1] = w._replica(1)

    def joins() -> bool:
        w.serve(w.replicas[1])
        said = w.replicas[1].controller.ask("ready")
        assert said["kind"] == "done" or "has a controller already" in said["text"], said
        time.sleep(0.2)
        return said["kind"] == "done"

    until_true(joins, 60 / 5 + 5 * PATIENCE)
    goes_on(w)


def vanishes(w, number: int, who: str, point: str):
    """Begins a refit in which host `number` vanishes when its rank comes to this point."""
    on_it = [w.trainers[1]] if who == "trainers" else [*w.replicas[1].workers, w.replicas[1].controller]
    if point.endswith(("plan", "link")):  # these are passed only when a layout changed
        w.trainers[0].value("change")
    w.fault(who, f"{point}:stop@1")
    w.begin(2, deadline_s=SHORT, min_replicas=1)
    until_true(on_it[0].is_stopped, 20)
    w.cluster.cut(w.cluster.hosts[number])
    for p in on_it:
        p.signal(signal.SIGKILL)
        assert p.dead()
    return w
