"""Labels of versions keep the type that the caller gave, and each names one set of weights. Reports are one line each."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from typer.testing import CliRunner

import xfer
from tests.support.connect import flat_connect
from tests.support.world import TOKEN, World, good
from xfer.cli import app
from xfer.errors import EngineLost, RefitFailed, XferError


class Job(World):
    """A world over xfer's public calls, with engines of one worker."""

    def __init__(self, trainers: int = 2, replicas: int = 1):
        super().__init__(trainers, 1, replicas)

    def serve(self, engine, replica: int) -> xfer.Controller:
        return xfer.serve(engine, replica=replica, **self.where)

    def _connect_one(self, i: int) -> None:
        self.sessions[i] = flat_connect(trainer=self.sources[i], replicas=self.replicas, **self.where)

    @property
    def where(self) -> dict:
        return dict(rendezvous=self.rendezvous, token=TOKEN, deadline_s=self.deadline_s)

    def refit(self, version=None, **more) -> list:
        """Return what each rank got or raised."""
        return self.on_all(lambda i: xfer.nccl_xfer_refit(self.sessions[i], version=version, **more))

    def refit_early(self, version) -> xfer.RefitReport:
        """Return the report of a call that returns when the sources are free. The commit comes later, also on a busy machine."""
        returned = threading.Event()
        self.engines[0].takers[0].installs_after(returned)
        report = good(self.refit(version, wait="sources"))
        returned.set()
        assert report.pending
        return report

    def close(self) -> None:
        self.on_all(lambda i: self.sessions[i].close())
        super().close()


def refused(results: list, *texts: str) -> None:
    for r in results:
        assert type(r) is XferError and all(t in str(r) for t in texts), r


@pytest.mark.parametrize("labels", [[-3, 0, 1, np.int64(7), "step-5"], ["1"], [None]], ids=repr)
def test_a_label_comes_back_in_the_type_that_it_was_given(labels):
    with Job() as j:
        for given in labels:
            want = 1 if given is None else int(given) if isinstance(given, np.integer) else given
            with ThreadPoolExecutor(1) as pool:
                waited = pool.submit(j.controllers[0].wait_version, given, 20.0)
                report = good(j.refit(given))
            versions = [report.version, report.outcomes[0].version, j.sessions[1].version, j.controllers[0].version]
            seen = [*versions, waited.result()]
            assert seen == [want] * 5 and {type(v) for v in seen} == {type(want)}, seen
            assert j.engines[0].label == str(want), "vLLM keeps labels as text"
            assert j.controllers[0].wait_version(str(want), 1.0) == want
            told = CliRunner().invoke(app, ["status", j.rendezvous], env={"COLUMNS": "200", "XFER_TOKEN": TOKEN})
            assert f"replica 0: ready version {want}" in told.output, told.output


def test_a_label_that_is_not_new_is_refused_on_all_ranks_and_moves_nothing():
    with Job() as j:
        for label, wrong in ((5, (5, 4, np.int64(0), "5")), ("a", ("a", 5, 3)), (7, (7, "7", 6)), (None, (8, "8", 1))):
            last = good(j.refit(label)).version
            told, log = j.engines[0].label, list(j.engines[0].log)
            for again in wrong:
                refused(j.refit(again), f"version={again!r}".replace("np.int64(0)", "0"), repr(last))
            assert j.engines[0].label == told and j.engines[0].log == log, "the engine was paused for it"
        assert last == 8, "numbers that the coordinator chooses go on above those that were given"
        assert [good(j.refit(v)).version for v in ("b", "a", 9)] == ["b", "a", 9]


def test_a_call_that_raised_may_be_made_again_under_its_label_and_one_that_returned_has_used_it_up():
    """Either no replica committed it, or one did and gets the same weights again. A call may also return before the commit."""
    with Job(replicas=2) as j:
        good(j.refit(1))
        j.sources[1].fail = RuntimeError("boom")
        refused(j.refit(2), "boom")
        j.sources[1].fail = None
        j.engines[1].fail["start"] = RuntimeError("not now")
        for r in j.refit(2):
            assert isinstance(r, RefitFailed | XferError) and "not now" in str(r), r
        assert [c.version for c in j.controllers] == [2, 1] and j.sessions[0].version == 2
        report = good(j.refit(2))
        assert report.committed == 2 and [c.version for c in j.controllers] == [2, 2]
        refused(j.refit(2), "2")
        j.engines[1].fail["start"] = RuntimeError("not now")
        report = good(j.refit(3, min_replicas=1))
        assert report.committed == 1 and isinstance(report.outcomes[1].error, XferError)
        refused(j.refit(3), "3")
        j.refit_early(4)
        refused(j.refit(4), "4")
        assert good(j.refit(5)).before.version == 4


def test_reports_and_sessions_are_one_readable_line_each():
    with Job(replicas=2) as j:
        session, controller = j.sessions[1], j.controllers[1]
        controller.wait_ready(20.0)
        lines = [f"<Session of trainer 1 of 2, 2 replicas, at {j.rendezvous}: no refit yet>"]
        lines += [f"<Controller of replica 1 at {j.rendezvous}: no refit yet>"]
        assert [repr(session), repr(controller)] == lines and session.version is controller.version is None
        j.engines[0].fail["start"] = RuntimeError("no")
        nothing = good(j.refit(min_replicas=1)).outcomes[0]
        assert nothing.version is None and "serves nothing" in str(nothing)
        report = good(j.refit("step 1", verify=True))
        assert repr(report).startswith("<RefitReport of trainer 0: version 'step 1' committed by 2 of 2 replicas: ")
        assert " GB/s by gloo; outage " in repr(report) and "verified" in str(report)
        assert "gloo: " in report.routes() and "GB/s" in report.routes()
        assert "replica 1 committed, serves version 'step 1': " in repr(report.outcomes[1])
        assert repr(session).endswith(": version 'step 1'>") and str(controller).endswith(": serves version 'step 1'>")
        j.engines[1].fail["start"] = EngineLost("a text\nof two lines", [f"violation {i}" for i in range(9)])
        failed = good(j.refit(2, min_replicas=0))
        assert "replica 1 did not commit, serves version 'step 1': EngineLost: a text of" in str(failed)
        early = j.refit_early(3)
        assert "version 3 is under way" in repr(early)
        assert all("\n" not in x and len(x) < 250 for x in (repr(report), str(report), repr(early)))
        assert "\n" not in str(failed)
        good(j.refit(4))
    assert repr(session).endswith(": closed>") and repr(controller).endswith(": closed>")
    assert list(report.flatten()).count("xfer/gb_per_s") == 1 and not [k for k in report.flatten() if "gbps" in k]
