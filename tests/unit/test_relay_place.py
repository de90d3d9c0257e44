"""Places in relay chains and rings, and the gate there: each part is read once those that bring it have it, and then reported."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plan_worlds import quick, worlds
from tests.support.row_worlds import apply_row
from tests.support.trace_maps import places
from xfer.errors import DeadlineExceeded
from xfer.plan import relay
from xfer.plan.program import DTYPES, ITEMSIZE, Op, in_turn, row_wire_bytes
from xfer.plan.relay import shares
from xfer.transport import peer, relay_place
from xfer.transport.group import Aborted
from xfer.transport.relay_place import Relay, RelayPlace, Steps
from xfer.transport.steps import arrivals


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [("news of an earlier refit", DeadlineExceeded, "part 1 did not come"), ("news of a later refit", Aborted, "at a later refit"),
     ("the pull is cancelled", Aborted, None), ("the gate is opened", Aborted, None)],
)  # fmt: skip
def test_a_wait_for_a_part_that_does_not_come_ends(what, error, text):
    """A later refit overwrites what is wanted here."""
    over, steps = threading.Event(), Steps(True, lambda run, part: None, 9)
    steps.begin(5, time.monotonic() + (0.05 if "earlier" in what else 10.0), over.is_set, True)
    happens = {
        "news of an earlier refit": lambda: steps.there(4, 9),
        "news of a later refit": lambda: steps.there(6, 0),
    }
    happens |= {"the pull is cancelled": over.set, "the gate is opened": steps.open}
    if "earlier" in what:  # before the deadline, however busy the machine is
        happens[what]()
    else:
        threading.Timer(0.02, happens[what]).start()
    with pytest.raises(error, match=text):
        steps.before(0, None)


class Later:
    """An event of a device: over when the test says so."""

    def __init__(self):
        self.over = False

    def record(self, stream):
        self.over = False

    def query(self):
        return self.over


@pytest.mark.parametrize("tells", [True, False])
def test_parts_on_a_device_are_said_when_they_are_there_in_order_if_somebody_listens(monkeypatch, tells):
    """A gate beside it is told of every part all the same. The first of a chain does not wait."""
    monkeypatch.setattr("torch.cuda.Event", Later)
    said, told = [], []
    steps = Steps(False, lambda run, part: said.append((run, part)), 9)
    steps.beside = SimpleNamespace(after=lambda wave, stream: told.append(wave))
    steps.begin(3, 0.0, lambda: False, tells)
    for part in range(4):
        steps.before(part, None)
        steps.after(part, object())
    events = steps._pulled.events
    for over, want in (((), []), ((1,), []), ((0,), [(3, 1)]), ((2, 3), [(3, 1), (3, 3)]), ((), [(3, 1), (3, 3)])):
        for part in over if tells else ():
            events[part].over = True
        steps.poll()
        assert said == (want if tells else []), "a part is not said before the one before it"
    steps.after(4, object())
    steps.open()
    for event in events.values():  # the kernels of the last one left because they were told to
        event.over = True
    steps.poll()
    assert said == ([(3, 1), (3, 3)] if tells else []) and told == [*range(5)]


class Offered:
    """Stands for `Export` and `Mapping` of ranks that may read each other."""

    def __init__(self, rank=0, *_):
        self.rank = rank
        self.roots: dict[int, dict[int, None]] = {}

    def to_bytes(self) -> bytes:
        return b""

    def open(self, data: bytes, rank: int, wanted) -> None:
        self.roots[rank] = dict.fromkeys(wanted)

    def close(self) -> None:
        pass


class Replica:
    """One worker of a replica. `fellows`: all of them. `todo`: what comes to it, in two queues: (wave, rows) by pull and by link."""

    def __init__(self, world, plan, number: int, worker: int, taken, step_bytes: int, fellows: list[Replica]):
        side, rank, self.said, self.others = world.workers[worker], len(world.trainers) + worker, -1, {}
        self.number = number
        self.program, self.taken, self.step_bytes = plan.program(rank), taken, step_bytes
        self.fellows, self.trainers, self.here = fellows, len(world.trainers), set()
        self.storage = [side.storage[r.name].copy() for r in world.destinations()[worker].roots]
        self.offer = Offered(len(plan.ranks) + number)
        self.hand = self.open((b"",)).hand()

    def open(self, hands) -> RelayPlace:
        """Replicas begin with different sources, and still know each other's rows."""
        pulled, rest = peer.split(self.program, self.taken)
        pulled = pulled.copy()
        pulled["turn"] = (pulled["src"] + self.number) % self.trainers
        told = Relay(hands, lambda run, part: setattr(self, "said", part), self.offer)
        kind, roots = SimpleNamespace(Export=Offered, Mapping=Offered), [torch.from_numpy(s) for s in self.storage]
        place = RelayPlace(kind, rest, pulled, self.step_bytes, told, roots, torch.device("cpu"))
        sources = {*pulled["src"].tolist()}
        assert place.follows or in_turn(place.rows, sources) == in_turn(pulled, sources)
        return place

    def begin(self, sources: list[Replica]) -> None:
        """sources: by share, the replica that brings it."""
        self.place = self.open(tuple(b"" if r is self else r.hand for r in sources))
        self.others = {r.offer.rank: r for r in sources if r is not self}
        assert not self.place.why and self.place.follows == bool(self.others)
        self.place.steps.begin(1, 0.0, lambda: False, True)  # its waits are over at once
        fills = self.program.fills()
        rest = peer.split(self.program, self.taken)[1]
        takes = dict.fromkeys(rest.rows["dst"].tolist(), self.place.share)
        mine = shares(rest, takes)  # as both ends of the link cut it
        came = [self.place.rows, arrivals(mine, self.step_bytes)]
        self.todo = [[(w, rows[rows["wave"] == w]) for w in np.unique(rows["wave"])] for rows in came]
        self.rows = np.concatenate([fills, *came])
        self.apply(fills, [])

    def can(self, queue: int) -> bool:
        todo = self.todo[queue]
        if queue or not todo:
            return bool(todo) and all(place(r, "src") in f.here for r in todo[0][1] if (f := self.fellow(r)))
        self.place.steps.there(1, min((r.said for r in self.others.values()), default=-1))
        try:
            self.place.steps.before(todo[0][0], None)
        except DeadlineExceeded:
            return False
        return True

    def fellow(self, row_) -> Replica | None:
        """The worker of this replica that hands this row on."""
        return self.fellows[row_["src"] - self.trainers] if row_["src"] >= self.trainers else None

    def take(self, queue: int, trainers) -> None:
        wave, rows = self.todo[queue].pop(0)
        self.apply(rows, trainers)
        if queue:
            self.here |= {place(r, "dst") for r in rows}
        (self.place.steps.after, self.place.steps.arrived)[queue](wave, None)

    def apply(self, rows, trainers) -> None:
        for r in rows:
            fill = r["op"] == Op.FILL
            other = self.others.get(int(r["src"])) or self.fellow(r)
            apply_row(r, other.storage if other else [] if fill else trainers[r["src"]], self.storage[r["dst_root"]])


def place(row_, end: str) -> tuple:
    return int(row_[f"{end}_root"]), int(row_[f"{end}_offset"]), row_["extent"].tobytes()


@given(
    st.booleans().flatmap(worlds),
    st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=5),
    st.sampled_from([8, 64, 1 << 20]),
    st.data(),
)
@quick
def test_each_byte_enters_a_host_once_and_each_byte_of_a_destination_is_written_once(world, hosts, step_bytes, data):
    """Replicas of one layout on several hosts hand bytes on, in any order that the news of parts allows. In a ring some receive a share
    each; the others are late, and read all shares. Workers of a replica hand on to each other what they take of its bytes."""
    plan, trainers = world.plan(), len(world.trainers)
    names = [[r.name for r in i.roots] for i in world.sources()]
    held = [[s.storage[n] for n in some] for s, some in zip(world.trainers, names)]
    ring = data.draw(st.booleans())
    roots = st.just(frozenset()) if ring else st.frozensets(st.integers(0, 2), max_size=3)
    late = {i for i, _ in enumerate(hosts) if ring and data.draw(st.integers(0, 3)) == 3}
    small = dict(PART_BYTES=data.draw(st.sampled_from([16, 64])), _WAIT_S=0.0)
    with patch.multiple(relay_place, **small), patch.object(relay, "GRAIN", 2):
        taken = {r: {s: data.draw(roots) for s in range(trainers)} for r in plan.ranks[trainers:]}
        replicas: list[list[Replica]] = [[] for _ in hosts]
        for i, fellows in enumerate(replicas):
            fellows += [Replica(world, plan, i, w, taken, step_bytes, fellows) for w in range(plan.workers)]
        for i, fellows in enumerate(replicas):
            here = [j for j, host in enumerate(hosts) if host == hosts[i]]
            owners = [j for j in here if j not in late] or here
            for w, r in enumerate(fellows):
                r.begin([replicas[j][w] for j in (owners if ring else [max((j for j in here if j < i), default=i)])])
        every = [(r, w, host) for some, host in zip(replicas, hosts) for w, r in enumerate(some)]
        while choice := [(r, q) for r, _, _ in every for q in (0, 1) if r.can(q)]:
            replica, queue = data.draw(st.sampled_from(choice))
            replica.take(queue, held)
        entered, want = dict.fromkeys(hosts, 0), [world.expected(side) for side in world.workers]
        for r, w, host in every:
            assert not any(r.todo), "news of its parts never came"
            from_trainers = r.rows[(r.rows["op"] != Op.FILL) & (r.rows["src"] < trainers)]
            entered[host] += row_wire_bytes(from_trainers).sum()
            written = [np.zeros(len(s), int) for s in r.storage]
            for row_ in r.rows:
                item = ITEMSIZE[DTYPES[row_["dst_dtype"]]]
                at = places(row_["dst_offset"], row_["extent"], row_["dst_strides"], item)
                np.add.at(written[row_["dst_root"]], at.reshape(-1), 1)
            for root, got, count in zip(world.destinations()[w].roots, r.storage, written):
                kept = np.zeros(len(got), int)
                for k in world.workers[w].kept:
                    kept[k.start : k.stop] |= k.root == root.name
                assert np.array_equal(got, want[w][root.name]) and np.array_equal(count, 1 - kept)
        assert set(entered.values()) == {plan.summary.nbytes}
