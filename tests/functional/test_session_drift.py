"""Trainers that hold different bytes of one tensor, and training that reaches no engine: what connect and refits say.

The engine and the trainers are small stand-ins (tests/support/world.py). The same with a real vLLM: test_refit_errors.py.
"""

import logging

import pytest
import torch

from tests.support.world import SHAPES, ToySource, World, good, until_true
from xfer import errors as e
from xfer.direct import holders

WIDE = SHAPES | {"bias": (50_000,)}
ASIDE = 77
"""An element of `bias` that a sample does not look at."""


def failed(results, kind, *texts: str) -> None:
    for r in results:
        assert isinstance(r, kind), repr(r)
        for text in texts:
            assert text in str(r), str(r)


def refused(world: World, kind, *texts: str) -> None:
    """Trainers cannot connect, and the engine's workers are told the same."""
    with pytest.raises(kind) as caught:
        world.connect()
    failed([caught.value, *(s.error for s in world.engines[0].sessions)], kind, *texts)


def test_trainers_that_differ_are_told_before_anything_moves_until_a_first_version_is_committed(monkeypatch):
    """They may differ when they connect: checkpoints may be loaded after that."""
    with World(trainers=3, shapes=WIDE) as w:
        for _ in range(2):
            w.sources[1].params["norm"][3] += 1
            w.sources[1].params["bias"] += 1
            kind = "2 tensors, such as bias, norm: one content on trainers 0, 2, another on trainer 1"
            failed(w.refit(verify=False), e.VerificationError, kind, "nothing was moved")
            assert not w.engines[0].paused and w.controllers[0].error is None
        good(w.refit(1, verify=False))
        monkeypatch.setattr(holders, "sample", lambda *_: pytest.fail("sampled again"))
        good(w.refit(2, verify=False))


def test_what_drop_names_may_differ():
    shapes = {n: s for n, s in WIDE.items() if n != "bias"}
    sources = [ToySource(i, 2, WIDE) for i in range(2)]
    sources[1].params["bias"] += 1
    with World(trainers=2, shapes=shapes, sources=sources, drop=("bias",)) as w:
        assert good(w.refit()).verified


def test_one_element_that_drifts_is_found_by_verify_only_and_workers_of_one_engine_disagree_until_then():
    with World(trainers=2, workers=2, shapes=WIDE) as w:
        assert good(w.refit(1)).verified
        w.sources[1].params["bias"] += 1  # as a whole, so that it does not matter who sends which part
        good(w.refit(verify=False))
        one, other = (t.live["bias"] for t in w.engines[0].takers)
        assert not torch.equal(one, other), "the engine's workers took it from different trainers"
        w.sources[1].params["bias"] -= 1
        w.sources[0].set(1), w.sources[1].set(1)
        w.sources[1].params["bias"][ASIDE] += 1
        failed(w.refit(), e.VerificationError, "bias: one content on trainer 0, another on trainer 1", "replica 0")
        assert w.engines[0].paused
        assert good(w.refit(2)).verified
        assert [t.wrong(2) for t in w.engines[0].takers] == [[], []]


def test_the_bits_are_compared_and_not_the_numbers():
    with World(trainers=2) as w:
        for s in w.sources:
            s.params["norm"].view(torch.int16)[0] = 0x7FC1  # one NaN
        assert good(w.refit()).verified
        w.sources[1].params["norm"].view(torch.int16)[0] = 0x7FC2  # another
        failed(w.refit(), e.VerificationError, "norm: one content on trainer 0")


class Overlapping(ToySource):
    """Rank 0 holds all rows, the others the second half of them."""

    def rows(self, n: int) -> tuple[int, int]:
        return (n // 2, n) if self.rank else (0, n)


def test_boxes_that_overlap_are_compared_where_they_do():
    with World(trainers=2, sources=[Overlapping(i, 2) for i in range(2)]) as w:
        assert good(w.refit(1)).verified
        w.sources[0].params["layers.1.w"][3] += 1  # trainer 0 alone has this row
        assert good(w.refit()).verified
        w.sources[0].params["layers.1.w"][13, 2] += 1
        failed(w.refit(), e.VerificationError, "layers.1.w: one content on trainer 0, another on trainer 1")


def test_replicas_of_one_layout_cost_one_reading(monkeypatch):
    told = []
    monkeypatch.setattr(
        holders.SharedSums, "told", lambda s, v, tell=holders.SharedSums.told: told.append(0) or tell(s, v)
    )
    with World(trainers=2, replicas=3) as w:
        for v in (1, 2):
            assert good(w.refit(v)).committed == 3
    assert len(told) == 2 * 2, "each trainer once per refit"


def test_a_refit_that_is_not_verified_reads_nothing_for_that(monkeypatch):
    monkeypatch.setattr(holders.SharedSums, "told", lambda *_: pytest.fail("read"))
    with World(trainers=2) as w:
        good(w.refit(1, verify=False))


# ---- training that reaches no engine


class Adapted(ToySource):
    """`trains`: its tensors that require grad. `adapters`: more tensors, whole on every rank, which no engine has."""

    trains: frozenset[str] = frozenset()

    def __init__(self, rank: int, world: int, trains=(), adapters=("lora_A", "lora_B")):
        super().__init__(rank, world, SHAPES | {n: (40,) for n in adapters})
        self.trains = frozenset(trains)

    def read(self):
        layout = super().read()
        return type(layout)(layout.traced, layout.roots, layout.tensors, self.trains)


def adapted(**more) -> World:
    trains = more.pop("trains")
    return World(
        trainers=2, shapes=dict(SHAPES), sources=[Adapted(i, 2, trains) for i in range(2)], drop=("lora_*",), **more
    )


def test_nothing_that_trains_is_sent():
    kind = "2 tensors require grad, such as lora_A, lora_B: drop= names all of them; merge adapters"
    refused(adapted(trains=("lora_A", "lora_B")), e.CoverageError, kind)


def test_what_one_rank_sends_of_what_trains_is_enough():
    w = adapted(trains=("lora_A",))
    w.sources[1].trains = frozenset({"lora_A", "norm"})
    with w:
        assert good(w.refit()).committed


def steps(w: World, names, times: int, caplog) -> list[int]:
    """Training steps of these tensors with a refit after each; how many warnings there were by then."""
    out = []
    for _ in range(times):
        for s in w.sources:
            for n in names:
                s.params[n] += 1
        good(w.refit(verify=False))
        out.append(sum("training goes on" in r.message for r in caplog.records))
    return out


def test_two_refits_in_a_row_that_send_nothing_new_while_training_goes_on_are_told_once(caplog):
    caplog.set_level(logging.WARNING, "xfer")
    with adapted(trains=("lora_A", "lora_B", "norm")) as w:
        assert steps(w, ("lora_A", "lora_B"), 1, caplog) == [0]
        assert steps(w, (), 3, caplog) == [0] * 3, "no step, nothing to say"
        for s in w.sources:  # storages that move do not look like training
            s.params["norm"] = s.params["norm"].clone()
        assert steps(w, ("lora_A",), 4, caplog) == [0, 1, 1, 1]
        (text,) = [r.message for r in caplog.records if "training goes on" in r.message]
        assert "lora_A" in text and "norm" not in text


def test_training_that_arrives_is_never_doubted(caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "xfer")
    with adapted(trains=("lora_A", "norm")) as w:
        assert steps(w, ("lora_A",), 2, caplog) == [0, 0]
        assert steps(w, ("lora_A", "norm"), 1, caplog) == [0]
        monkeypatch.setattr("xfer.direct.unsent.Sums", lambda *_: pytest.fail("read again"))
        assert steps(w, ("lora_A",), 3, caplog) == [0] * 3, "what is sent has changed once: nobody looks any more"


def test_what_one_rank_sends_that_changes_is_enough(caplog):
    """Pipeline stages: on one of them only adapters train."""
    caplog.set_level(logging.WARNING, "xfer")
    w = adapted(trains=("lora_A",))
    w.sources[1].trains = frozenset({"norm"})
    with w:
        assert steps(w, ("lora_A", "norm"), 4, caplog) == [0] * 4
        until_true(lambda: w.controllers[0].version == 4)
