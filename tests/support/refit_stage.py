"""Four real Megatron-Core trainer ranks and real vLLM engines as processes. For each route between them: two refits, each after a
step, are the same as a fresh vLLM that loads what Bridge exported at that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from examples.common.ports import free_port
from tests.support.proc import Child, Family, stop_all


class Stage:
    """Four Megatron-Core ranks, which build one case after the other, and an engine process for fresh loads."""

    token = "end to end token"

    def __init__(self, work: Path):
        self.family, self.starts = Family(work), 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.started = self.processes()
        for c in self.started:
            c.expect("up", timeout=180)
        self.whole = True

    def processes(self) -> list[Child]:
        world = dict(WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        self.trainers = [
            self.child(f"trainer{r}", "trainer", "megatron_main", RANK=str(r), LOCAL_RANK=str(r), **world)
            for r in range(4)
        ]
        self.truth = self.engine("truth")
        return [*self.trainers, self.truth]

    def engine(self, name: str) -> Child:
        return self.child(name, "engine", "vllm_main")

    def child(self, name: str, side: str, module: str, **env: str) -> Child:
        return self.family.start(f"{name}-{self.starts}", side, module, XFER_TOKEN=self.token, **env)

    @contextmanager
    def case(self) -> Iterator[None]:
        """Run one case inside. After a case that failed, the next one starts new processes."""
        if not self.whole:
            stop_all(self.started)
            self.start()
        self.whole = False
        yield
        self.whole = True

    def trained(self, *kinds: str, **command) -> list[dict]:
        return on_all(self.trainers, *kinds, **command)


def on_all(children: list[Child], *kinds: str, timeout: float = 240.0, **command) -> list[dict]:
    for c in children:
        c.say(**command)
    return [c.expect(*kinds, timeout=timeout) for c in children]


def differ(a: dict, b: dict) -> list[str]:
    """Names of the engine parameters that are not the same in two observations."""
    a, b = a["checksums"], b["checksums"]
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))


def two_refits_are_fresh_loads(
    stage: Stage,
    work: Path,
    *,
    model: Path,
    layout: dict,
    engines: Sequence[dict],
    frozen: Sequence[str] = (),
    scramble: bool = True,
    as_served: Callable[[str], str] = str,
    **connect,
) -> None:
    """`model`: a checkpoint; `layout`: of the trainers; `engines`: one dict per replica; `frozen`: engine parameters (globs) that
    this training does not touch; `scramble`: noise in every live byte but the kept ones between the refits; `as_served`: makes the
    checkpoint that fresh engines load of what Bridge exported; `connect`: more arguments of `xfer.connect`."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    running = [stage.engine(f"{work.name}-engine{i}") for i in range(len(engines))]
    try:
        for e, how in zip(running, engines, strict=True):
            e.say(do="start", model=str(model), load_format="dummy", **how)
        stage.trained("built", do="build", folder=str(model), layout=layout)
        for e in running:
            e.expect("started", timeout=240)
        for i, e in enumerate(running):
            e.say(do="serve", rendezvous=rendezvous, replica=i)
        stage.trained("connected", do="connect", rendezvous=rendezvous, replicas=len(running), **connect)
        exports, seen, kept = [], [], None
        for step in (1, 2):
            losses = stage.trained("stepped", do="step")
            reports = stage.trained("refitted", do="refit", verify=True)
            assert all(r["verified"] and r["committed"] == len(running) for r in reports), reports
            assert not connect.get("relay") or all("relay" in some for some in reports[0]["routes"][1:]), reports[0]
            assert losses[0]["loss"] > 0
            exports.append(str(work / f"export{step}"))
            stage.trained("exported", do="export", folder=exports[-1])
            seen.append(on_all(running, "observed", do="observe"))
            if scramble and step == 1:
                kept = on_all(running, "scrambled", do="scramble", seed=step)
        if kept is not None:
            assert [k["kept"] for k in on_all(running, "kept", do="kept")] == [k["kept"] for k in kept]
        stage.trained("closed", do="close")
        layouts = [how for i, how in enumerate(engines) if how not in engines[:i]]
        for how in layouts:  # fresh engines load while the others end
            stage.truth.say(do="truth", folders=[as_served(e) for e in exports], layout=how)
    finally:
        stop_all(running)
    truth = [[stage.truth.expect("observed", timeout=240) for _ in exports] for _ in layouts]
    for i, how in enumerate(engines):
        for step, want in enumerate(truth[layouts.index(how)]):
            got = seen[step][i]
            assert got["version"] == step + 1
            wrong = differ(want, got)
            assert not wrong, f"after refit {step + 1}, replica {i}: {wrong[:10]}"
            assert got["outputs"] == want["outputs"], f"after refit {step + 1}, replica {i}"
        same = seen[0][i]["checksums"].keys() - set(differ(*(s[i] for s in seen)))
        same = {k for k in same if not any(fnmatchcase(k, f) for f in frozen)}
        assert not same, f"not changed by training, so the second refit proved nothing of them: {sorted(same)}"
