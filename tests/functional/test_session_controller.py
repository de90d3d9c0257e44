"""What a controller finds when it comes to an engine, and what it leaves when a refit comes to nothing.

The engine is a small stand-in (tests/support/world.py); where the in-process `LLM` is meant, its real handle and gate
stand before it.
"""

import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.world import ToyEngine, World
from xfer.engines.handles import OfflineLLM
from xfer.errors import DeadlineExceeded, EngineLost, XferError


class ToyLLM:
    """A ToyEngine behind the methods of vLLM's `LLM`."""

    def __init__(self, toy: ToyEngine):
        self.toy = toy
        parallel = SimpleNamespace(world_size=len(toy.takers))
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=parallel), reset_encoder_cache=lambda: None
        )
        self.init_weight_transfer_engine = lambda d: toy.init(d["init_info"], 0)
        self.start_weight_update = lambda: toy.start_update(0)
        self.update_weights = lambda d: toy.update(d["update_info"], 0)
        self.finish_weight_update = lambda: toy.finish(None, 0)
        self.update_weight_version = lambda text: toy.set_version(text, 0)
        self.reset_prefix_cache = lambda **_: True
        self.reset_mm_cache = lambda: None


def failing(world: World) -> Exception:
    """One refit that ends before a byte moves, after the engine was armed for it."""
    world.sources[0].fail = RuntimeError("stopped by the test")
    world.sessions[0].prepare()
    until = time.monotonic() + 5
    while world.engines[0].log.count("update") < world.controllers[0].refits + 1 and time.monotonic() < until:
        time.sleep(0.01)
    out = world.refit(9)[0]
    world.sources[0].fail = None
    assert isinstance(out, Exception)
    until = time.monotonic() + 5
    while world.engines[0].log[-1] == "update" and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
    return out


def test_an_owner_who_stays_in_serving_costs_that_refit_only():
    world = World(trainers=1)
    toy = ToyEngine(2)
    world.engines = [toy]
    serve = world.serve
    world.serve = lambda _, r: serve(OfflineLLM(ToyLLM(toy)), r)
    with world:
        assert world.refit(1)[0].committed == 1
        inside, leave = threading.Event(), threading.Event()

        def owner():
            with world.controllers[0].serving():
                inside.set()
                leave.wait(30)

        thread = threading.Thread(target=owner, daemon=True)
        thread.start()
        inside.wait(5)
        late = world.refit(2, deadline_s=1.0)[0]
        assert isinstance(late, XferError) and ("serving()" in str(late) or "pausing" in str(late)), late
        leave.set()
        thread.join(5)
        assert world.refit(3)[0].committed == 1
        with world.controllers[0].serving():
            assert not any(t.wrong(3) for t in toy.takers)


def test_a_session_that_an_earlier_controller_left_open_is_known():
    world = World(trainers=1)
    toy = ToyEngine(2)
    toy.open = True  # as vLLM's workers are after a controller that died between start and finish
    world.engines = [toy]
    with world:
        world.controllers[0].wait_ready(10)
        assert "session was open" in toy.log
        assert world.refit(1)[0].committed == 1


@pytest.mark.parametrize(("found", "left"), [("checkpoint-900", "checkpoint-900"), ("xfer:mixed", "xfer:unknown")])
def test_a_refit_that_came_to_nothing_leaves_the_label_that_it_found(found, left):
    world = World(trainers=1)
    toy = ToyEngine(2)
    toy.label = found
    world.engines = [toy]
    with world:
        failing(world)
        assert (toy.label, toy.paused) == (left, False)
        assert world.refit(1, version="a")[0].committed == 1
        failing(world)
        assert (toy.label, toy.paused) == ("a", False)


def test_an_engine_that_was_started_without_weights_serves_after_its_first_commit():
    world = World(trainers=1)
    toy = ToyEngine(2)
    for taker in toy.takers:
        taker.began_with = "nothing"
    world.engines = [toy]
    with world:
        controller = world.controllers[0]
        controller.wait_ready(5)
        assert toy.paused
        with pytest.raises(EngineLost, match="no weights"), controller.serving():
            pass
        with pytest.raises(DeadlineExceeded):
            controller.wait_version(timeout_s=0.1)
        failing(world)
        assert toy.paused, "a refit that wrote nothing must not let random weights serve"
        with pytest.raises(EngineLost, match="no weights"), controller.serving():
            pass
        assert world.refit(1)[0].committed == 1
        assert controller.wait_version(timeout_s=5) == "1" and not toy.paused
        with controller.serving():
            assert not any(t.wrong(1) for t in toy.takers)


def test_verification_sees_constants_that_were_not_written(monkeypatch):
    """Padding comes from no tensor of the checkpoint, so checksums of tensors do not count it."""
    with World(trainers=1) as world:
        assert world.refit(1, verify=True)[0].verified
        for taker in world.engines[0].takers:
            taker.live["embed"][-1] = 5.0
        monkeypatch.setattr("xfer.kernels.torch_impl.TorchRows.fill", lambda self: None)
        assert "constants" in str(world.refit(2, verify=True)[0])
        monkeypatch.undo()
        assert world.refit(3, verify=True)[0].committed == 1
