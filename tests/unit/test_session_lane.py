"""Lanes: the work of an epoch that was given up ends, however soon the next epoch follows."""

import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.support.proc import PATIENCE
from tests.support.world import until_true
from xfer.coordinator import messages as m
from xfer.direct.plane import DirectPlane
from xfer.errors import PeerLost
from xfer.participants.data_plane import PlanFacts, Stop
from xfer.participants.lane import Lane
from xfer.rendezvous.client import DoneCollector, Questions
from xfer.rendezvous.store import RendezvousStore


class RendezvousClient:
    """Keeps what a lane says; nobody answers its questions."""

    label = "trainer 0"

    def __init__(self):
        self.questions, self.said = Questions(lambda *_: None, self.label), []
        self.send = self.try_send = self.said.append

    def stirred(self) -> None:
        pass


class Waiting(DirectPlane):
    """Opens a link of epoch 1 by waiting for a value that nobody puts, of later ones at once."""

    def __init__(self, party: RendezvousClient):
        side = SimpleNamespace(role="trainer", index=0, device=torch.device("cpu"))
        super().__init__(party, side, 0, 0, None)
        self.waits = threading.Event()
        self.facts = PlanFacts("", (), 0, 0, 0, 0)

    def open(self, order: m.OpenLink, stop: Stop) -> m.LinkOpen:
        self._close_routes()
        if order.epoch == 1:
            self.waits.set()
            RendezvousStore(self.party.questions, "e1/", 60.0, stop.stopped).get("never")
        return m.LinkOpen(self.replica, order.epoch)


@pytest.fixture
def lane():
    party = RendezvousClient()
    made = Lane(party, "trainer", 1, torch.device("cpu"), 0, Waiting(party))
    yield made
    made.close()


@pytest.mark.parametrize(
    "stop",
    [lambda lane, why: lane.cancel(why, None), lambda lane, why: lane.give_up(2, why)],
    ids=["its rank broke the link", "its call raised before the go came"],
)
def test_a_lane_that_cannot_follow_a_go_says_so(lane, stop):
    """Other ranks once waited to the deadline."""
    lane.post(m.OpenLink(0, 2, True, 1))
    assert lane.wait_idle(10)
    stop(lane, PeerLost("stopped"))
    lane.post(m.Go(2, (0,), (2,), "1", False, 1.0))
    assert lane.wait_idle(10)
    assert [x for x in lane.party.said if isinstance(x, m.Failed)][0].error.message == "stopped"


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_wait_of_an_epoch_ends_when_the_next_one_begins(lane, cancelled):
    """The next epoch takes no cancelled one back, and a cancel that comes late concerns none."""
    lane.post(m.OpenLink(0, 1, True, 1))
    assert lane.plane.waits.wait(10)
    if cancelled:
        lane.cancel(PeerLost("given up"), 1)
    lane.post(m.OpenLink(0, 2, True, 1))  # before the waiting thread can have looked
    assert lane.wait_idle(10), "still waits for a value of epoch 1"
    assert lane.party.said == [m.LinkOpen(0, 2)]
    lane.cancel(PeerLost("late"), 1)
    lane.post(m.OpenLink(0, 2, False, 1))
    assert lane.wait_idle(10) and lane.party.said == [m.LinkOpen(0, 2)] * 2


def test_a_trainers_lane_that_is_stopped_keeps_its_routes_since_a_later_release_must_close_them(lane):
    routes = SimpleNamespace(stop=lambda: None, close=lambda: pytest.fail("closed"))
    lane.plane._routed = routes
    lane.cancel(PeerLost("trainer 1 is gone"), None)
    assert lane.wait_idle(10) and lane.plane._routed is routes
    lane.plane._routed = None


@pytest.mark.parametrize("message", [m.OpenLink(0, 2, True, 1), m.Go(1, (0,), (1,), "1", False, 1.0)])
def test_a_message_for_a_lane_that_has_ended_keeps_no_thread_waiting(lane, message):
    """The coordinator continues the refit until it hears that this process leaves."""
    lane.close()
    lane.post(message)
    assert lane.wait_idle(0) and lane.wait_idle(0, moved=True) and not lane.party.said


def test_the_error_that_stops_a_lane_keeps_nothing_that_its_work_held(lane):
    """A lane keeps that error until its next epoch. It once kept routes to weights that their trainer had released."""
    begun, held = threading.Event(), []

    def open(order: m.OpenLink, stop: Stop) -> None:
        weights = torch.ones(4)
        held.append(weakref.ref(weights))
        begun.set()
        until_true(stop.stopped)
        stop.check()

    lane.plane.open = open
    lane.post(m.OpenLink(0, 1, True, 1))
    assert begun.wait(10)
    lane.cancel(PeerLost("given up"), 1)
    assert lane.wait_idle(10) and held[0]() is None


def test_an_epoch_that_begins_while_its_lane_is_stopped_is_stopped_too(lane, monkeypatch):
    cancel = Lane.cancel

    def cancelled_just_before(self, error, epoch):
        cancel(self, error, epoch)
        self.post(m.OpenLink(0, 1, True, 1))

    monkeypatch.setattr(Lane, "cancel", cancelled_just_before)
    began = time.monotonic()
    lane.close()
    assert time.monotonic() - began < 4 * PATIENCE and not lane._thread.is_alive()


def test_cancelling_a_lane_does_not_wait_for_its_link(lane):
    """The caller may be the thread that reads for all lanes. Until the link has ended, the lane is not idle."""
    ended = threading.Event()
    lane.plane._link = SimpleNamespace(
        abort=lambda seconds=10.0: ended.wait(seconds), drained=lambda seconds=0.0: ended.wait(seconds), close=ended.set
    )
    began = time.monotonic()
    lane.cancel(PeerLost("stop"), None)
    assert time.monotonic() - began < 5 and not lane.wait_idle(0.1)
    ended.set()
    assert lane.wait_idle(10)


def test_a_lane_of_a_refit_that_is_over_is_not_reported_for_the_next():
    said = []
    collector = DoneCollector(said.append, 10.0)
    collector.begin(m.Go(7, (0, 1), (1, 1), "1", False, 1.0))
    late = threading.Thread(target=collector.done, args=(7, m.Moved(0)))
    late.start()
    time.sleep(0.05)
    collector.begin(m.Go(8, (0,), (2,), "2", False, 1.0))
    collector.done(7, m.Moved(1))
    collector.done(8, m.Moved(0))
    late.join(5)
    assert said == [m.Done(8, (0,))] and not late.is_alive()
