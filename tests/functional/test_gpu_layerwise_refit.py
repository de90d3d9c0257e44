"""Layer-wise optimizers on one GPU: refits from two owners beside the gather, and checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.common import toy
from tests.support import layerwise_model as lm
from tests.support.gpu_job import Job, config, gpus, megatron
from xfer.layerwise import LayerWiseOptimizer, ParamGroup, checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < 1, reason="needs a GPU")]

HOLD_S = 6.0
"""For so long a gather's copies are held up: a step and a verified refit of a toy take a fraction of it."""


@pytest.mark.skipif(not megatron(), reason="needs Megatron-Core and Bridge: name their site in XFER_SITE_TRAINER")
def test_an_engine_follows_the_owners_while_the_gather_goes_on(tmp_path):
    """What it holds is what Bridge exports after the gather, byte for byte. One gather is held up on the device, behind the step: a
    refit that waited for the device before *ready* would wait for it."""
    pytest.importorskip("vllm")
    with Job(tmp_path, config("qwen3")) as job:
        toy.write_checkpoint("qwen3", job.folder, seed=1, **job.config)
        engine = job.engine("engine", [0], eager=True)
        # Streams that share a queue of the device would wait for what is held up.
        env = dict(TORCHDYNAMO_DISABLE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8", CUDA_DEVICE_MAX_CONNECTIONS="32")
        job.start_trainers([0, 0], module="layerwise_megatron", **env)
        layout = dict(options=dict(bucket_bytes=200_000))
        job.good("build", "built", timeout=240, folder=str(job.folder), layout=layout)
        engine.started()
        job.meet([engine])
        for number, hold_s in enumerate((0.0, 0.0, HOLD_S, 0.0)):
            stepped = job.good("step", "stepped", hold_s=hold_s)
            refitted = job.good("refit", "refitted", verify=True)
            assert all(r["verified"] and r["sent"] > 0 and "in flight" in r["before"] for r in refitted), refitted
            if hold_s:
                assert all(s["coming"] > 0 for s in stepped), "nothing was held up: this proves nothing"
                assert all(r["coming"] > 0 for r in refitted), f"the refit has waited for the gather: {refitted}"
            out = tmp_path / f"export{number}"
            job.good("export", "exported", timeout=240, folder=str(out))
            assert engine.wrong(folder=str(out)) == [[]]


def learn(net: nn.Module, optimizer: LayerWiseOptimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(number)).cuda()
        optimizer.zero_grad()
        losses.append((net(x) - x[:, :8]).square().mean())
        losses[-1].backward()
        optimizer.step()
    return [x.item() for x in losses]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_checkpoint_goes_on_bit_for_bit_also_with_kernels_that_read_their_count_of_steps_on_the_device(how, tmp_path):
    nets = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).cuda() for _ in range(2)]
    one, other = (LayerWiseOptimizer(n, [ParamGroup(n.parameters(), torch.optim.Adam, how)]) for n in nets)
    learn(nets[0], one, range(3))
    checkpoint.save(one, tmp_path)
    learn(nets[1], other, range(90, 91))
    checkpoint.load(other, tmp_path)
    assert learn(nets[1], other, range(3, 6)) == learn(nets[0], one, range(3, 6))
    assert lm.digest(nets[0]) == lm.digest(nets[1])
    states = [other.inner[x.group].state[x.target] for x in other.owned]
    assert {s["step"].device.type for s in states} == {"cuda" if how else "cpu"}
