"""One rank of awex 0.9.0 for benchmarks.cpu: its own plan and point-to-point transfer of the given shapes and cuts.

    python -m benchmarks.lib.cpu_awex RANK PORT LAYOUT.json     # ranks 0 to infer - 1 receive, the others train, as in awex

It imports nothing of xfer, so that it can run in an environment of its own. In awex's favour its metadata is made here
instead of collected, Megatron's fused tensors need no conversion, and its loggers are silent.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
import zlib
from math import prod

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

MARK = "@bench "


def emit(**said) -> None:
    sys.stdout.write(MARK + json.dumps(said) + "\n")
    sys.stdout.flush()


def metas(layout: dict, side: str) -> list:
    """awex's description of one side: a replica is a set of shards that make up a whole tensor."""
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
    from awex.sharding.param_sharding import ShardingType

    out = []
    for t in layout["tensors"]:
        shape, parts = tuple(t["shape"]), t[side]
        shards = [
            ParameterShardMeta(
                tp_rank=r, attn_tp_rank=r, pp_rank=0, ep_rank=0, ep_tp_rank=0, global_rank=r, world_size=len(parts),
                engine_rank=0, name=t["name"], shape=tuple(p["shape"]), numel=prod(p["shape"]), dtype=torch.bfloat16,
                global_offset=tuple(p["offset"]), sharding_dim=p["dim"] or 0,
                sharding_type=ShardingType.NO_SHARDING if p["dim"] is None else ShardingType.TP_SHARDING,
                num_shards=1 if p["dim"] is None else len(parts),
            )
            for r, p in enumerate(parts)
        ]  # fmt: skip
        whole = parts[0]["dim"] is None
        replicas = [ParameterReplicaMeta([s]) for s in shards] if whole else [ParameterReplicaMeta(shards)]
        out.append(ParameterMeta(t["name"], prod(shape), shape, torch.bfloat16, shards, replicas))
    return out


def tensors(layout: dict, side: str, rank: int) -> dict[str, torch.Tensor]:
    """This rank's tensors by name. On the infer side tensors of a fused parameter are views of it."""
    out: dict[str, torch.Tensor] = {}
    parts = {t["name"]: t[side][rank]["shape"] for t in layout["tensors"]}
    for names in layout["fused"] if side == "infer" else ():
        rows = [parts[n][0] for n in names]
        fused = torch.zeros(sum(rows), parts[names[0]][1], dtype=torch.bfloat16)
        out |= dict(zip(names, fused.split(rows)))
    for name, shape in parts.items():
        out.setdefault(name, torch.zeros(shape, dtype=torch.bfloat16))
    return out


def values(name: str, part: dict) -> torch.Tensor:
    """int16 [part's shape]: values that depend on the tensor's name and the position."""
    axes = [torch.arange(o, o + n, dtype=torch.int32) for o, n in zip(part["offset"], part["shape"])]
    x = axes[0] * 31 if len(axes) == 1 else axes[0][:, None] * 31 + axes[1][None, :] * 7
    return (x + zlib.crc32(name.encode()) % 1009).to(torch.int16)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rank", type=int)
    p.add_argument("port")
    p.add_argument("layout", help="JSON of benchmarks.cpu")
    told = p.parse_args()
    rank, port = told.rank, told.port
    with open(told.layout) as f:
        layout = json.load(f)
    infer, train = layout["infer_world"], layout["train_world"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=infer + train)
    from awex.transfer.nccl_comm import batch_send_recv, nccl_build_recv_ops, nccl_build_send_ops
    from awex.transfer.transfer_plan import TransferPlanBuilder

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("awex"):
            logging.getLogger(name).setLevel(logging.ERROR)
    trains = rank >= infer
    side, own = ("train", rank - infer) if trains else ("infer", rank)
    mine = tensors(layout, side, own)
    if trains:
        for t in layout["tensors"]:
            mine[t["name"]].view(torch.int16).copy_(values(t["name"], t[side][own]))
    taken, given = metas(layout, "infer"), metas(layout, "train")
    dist.barrier()
    t0 = time.perf_counter()
    plan = TransferPlanBuilder(infer, train, 1).build_local_transfer_plan(taken, given, rank)
    planned = time.perf_counter() - t0
    emit(said="up", plan_s=planned, pieces=sum(len(ops) for ops in plan.operations.values()))

    def refit() -> None:
        """Send or receive as awex's writer and reader do in every step."""
        group = dist.group.WORLD
        if trains:
            ops, _, _ = nccl_build_send_ops(mine, plan, group, -1, True)
            batch_send_recv(send_ops=ops, recv_ops=[], blocking=True, use_group=True)
        else:
            ops, apart, _ = nccl_build_recv_ops(mine, plan, group, True)
            batch_send_recv(send_ops=[], recv_ops=ops, blocking=True, use_group=True)
            for strided, dense in apart:
                strided.copy_(dense)

    for line in sys.stdin:
        do = json.loads(line)["do"]
        with torch.no_grad():
            if do == "awex":
                dist.barrier()
                t0, cpu = time.perf_counter(), time.process_time()
                refit()
                dist.barrier()
                emit(said=do, seconds=time.perf_counter() - t0, cpu=time.process_time() - cpu)
            elif do == "plan":
                dist.barrier()
                t0, cpu = time.perf_counter(), time.process_time()
                TransferPlanBuilder(infer, train, 1).build_local_transfer_plan(taken, given, rank)
                emit(said=do, seconds=time.perf_counter() - t0, cpu=time.process_time() - cpu)
            elif do == "check":
                wrong = [
                    t["name"]
                    for t in (() if trains else layout["tensors"])
                    if not torch.equal(mine[t["name"]].view(torch.int16), values(t["name"], t[side][own]))
                ]
                emit(said=do, wrong=wrong)


main()
