"""Profile one warm refit of a real vLLM in all its processes: what each GPU ran, and which CUDA calls were made.

    python -m benchmarks.profile_refit [--model 4b] [--folder TRACES]

A plain trainer and an engine have a GPU each, or share one. Two refits are profiled, the second verified, each after some
that are not; then every byte is compared. The profiler slows a refit down: for seconds use benchmarks.gpu_session.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu_session import MODELS
from benchmarks.lib import command
from examples.common import toy
from tests.support.gpu_job import Job, config


def table(who: str, seen: dict) -> None:
    print(f"\n{who}: its GPU ran {seen['busy']:.2f} ms of {seen['span']:.2f}")
    print("\n| on the GPU | times | ms together | longest |\n|---|---|---|---|")
    for name, (n, ms, longest) in sorted(seen["ran"].items(), key=lambda x: -x[1][1]):
        print(f"| `{name[:70]}` | {n} | {ms:.3f} | {longest:.3f} |")
    print("\n| CUDA calls of all threads | times | ms together |\n|---|---|---|")
    for name, (n, ms) in sorted(seen["calls"].items(), key=lambda x: -x[1][1]):
        print(f"| `{name}` | {n} | {ms:.3f} |")


def main() -> None:
    p = command.parser("profile_refit", __doc__)
    p.add_argument("--model", choices=sorted(MODELS), default="4b")
    p.add_argument("--layers", type=int, default=0, help="layers of the model; default: all")
    p.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile: starts faster")
    p.add_argument("--folder", default="", help="folder for traces, to open at ui.perfetto.dev; default: none are kept")
    args = p.parse_args()
    family, sizes = MODELS[args.model]
    sizes |= {"num_hidden_layers": args.layers} if args.layers else {}
    made = config(family, **sizes) if args.model == "toy" else toy.config(family, **sizes)
    with tempfile.TemporaryDirectory(prefix="xfer-profile-") as work, Job(work, made) as job:
        engine = job.engine("engine", [0], eager=args.eager, asynchronous=True)
        job.start_trainers([1 if torch.cuda.device_count() > 1 else 0])
        job.plain(experts="num_experts" in sizes)
        engine.started(400)
        job.good("set", "set", seed=1)
        job.meet([engine])
        for name, how in (("refit", {}), ("verified", {"verify": True})):
            job.refit(times=4, timeout=250, **how)
            paths = [
                str(Path(args.folder, f"{name}_{side}.json").resolve()) if args.folder else ""
                for side in ("trainer", "worker")
            ]
            job.good("profile", "profiling")
            engine.ask("profile", "profiling")
            report = job.refit(**how)
            (worker,) = engine.ask("unprofile", "profiled", path=paths[1])["workers"]
            (trainer,) = job.good("unprofile", "profiled", path=paths[0])
            ms = {k: f"{1e3 * report['scalars'][k]:.2f}" for k in ("transfer_s", "outage_s")}
            print(f"\n## {name}: {report['routes']}; with the profiler on, ms: {ms}")
            table("the engine's worker", worker)
            table("the trainer", trainer)
        print("\nwrong elements:", engine.wrong(config=job.config, seed=1), flush=True)


if __name__ == "__main__":
    main()
