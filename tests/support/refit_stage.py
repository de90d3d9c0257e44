"""Real trainer ranks and real vLLM engines as processes: two refits, each after a step, are the same as a fresh vLLM that loads what the
trainers' own framework exported at that step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from examples.common.ports import free_port
from tests.support.proc import Child, Children, Family, stop_all


class Stage:
    """Trainer ranks, which run `module` of tests.support and build one case after the other, and an engine process for fresh loads.
    `faults`: the file from which engines' workers read faults."""

    token = "end to end token"

    def __init__(
        self,
        work: Path,
        module: str = "megatron_main",
        world: int = 4,
        trainer_env: dict[str, str] | None = None,
        **engine_env: str,
    ):
        self.family, self.starts = Family(work), 0
        self.faults = work / "engine.fault"
        self.module, self.world = module, world
        self.engine_env = {"XFER_FAULT_FILE": str(self.faults), **engine_env}
        self.trainer_env = {"XFER_TOKEN": self.token, **(trainer_env or {})}
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.started = self.processes()
        for c in self.started:
            c.expect("up", timeout=180)
        self.whole = True

    def processes(self) -> list[Child]:
        self.trainers = self.family.ranks(self.module, self.world, f"trainer-{self.starts}-", **self.trainer_env)
        self.truth = self.engine("truth")
        return [*self.trainers, self.truth]

    def engine(self, name: str) -> Child:
        return self.child(name, "engine", "vllm_main", **self.engine_env)

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


def stage_of(*how, **env: str):
    """A module's fixture: a Stage of these arguments."""

    @pytest.fixture(scope="module")
    def stage(tmp_path_factory) -> Iterator[Stage]:
        stage = Stage(tmp_path_factory.mktemp("stage"), *how, **env)
        yield stage
        stage.family.__exit__()

    return stage


def differ(a: dict, b: dict) -> list[str]:
    """Names of the engine parameters that are not the same in two observations."""
    a, b = a["checksums"], b["checksums"]
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))


def two_refits_are_fresh_loads(stage: Stage, *args, **how) -> None:
    """See `_fresh_loads`; after one that failed, the next one starts new processes."""
    with stage.case():
        _fresh_loads(stage, *args, **how)


def _fresh_loads(
    stage: Stage,
    work: Path,
    *,
    model: Path,
    build: dict,
    engines: Sequence[dict],
    frozen: Sequence[str] = (),
    scramble: bool = True,
    trained: Callable[[], object] = lambda: None,
    watched: Callable[[Children, Callable[..., list[dict]]], list[dict]] = lambda engines, refit: refit(),
    as_served: Callable[[str], str] = str,
    **connect,
) -> None:
    """Refits engines (one dict per replica) after a first and a second step. `build`, `connect`: more arguments of these calls.
    `frozen`: parameters (globs) that this training does not touch. `scramble`: noise in every live byte but the kept ones between the
    refits. `watched` makes the refit. `as_served` makes the checkpoint that fresh engines load of what was exported."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    running = Children(stage.engine(f"{work.name}-engine{i}") for i in range(len(engines)))
    try:
        for e, how in zip(running, engines, strict=True):
            e.say(do="start", model=str(model), load_format="dummy", **how)
        stage.trainers.ask("build", "built", folder=str(model), **build)
        for e in running:
            e.expect("started", timeout=240)
        for i, e in enumerate(running):
            e.say(do="serve", rendezvous=rendezvous, replica=i)
        stage.trainers.ask("connect", "connected", rendezvous=rendezvous, replicas=len(running), **connect)
        exports, seen, kept = [], [], None
        for step in (1, 2):
            stage.trainers.ask("step", "stepped")
            trained()
            reports = watched(running, lambda **more: stage.trainers.ask("refit", "refitted", verify=True, **more))
            assert all(r["verified"] and r["committed"] == [True] * len(running) for r in reports), reports
            exports.append(str(work / f"export{step}"))
            stage.trainers.ask("export", "exported", folder=exports[-1])
            seen.append(running.ask("observe", "observed"))
            if scramble and step == 1:
                kept = running.ask("scramble", "scrambled", seed=step)
        if kept is not None:
            assert [k["kept"] for k in running.ask("kept", "kept")] == [k["kept"] for k in kept]
        stage.trainers.ask("close", "closed")
        layouts = [how for i, how in enumerate(engines) if how not in engines[:i]]
        folders = [as_served(e) for e in exports]
        for how in layouts:  # fresh engines load while the others end
            stage.truth.say(do="truth", folders=folders, layout=how)
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
        assert seen[0][i]["outputs"] != seen[1][i]["outputs"]
        same = seen[0][i]["checksums"].keys() - set(differ(*(s[i] for s in seen)))
        same = {k for k in same if not any(fnmatchcase(k, f) for f in frozen)}
        assert not same, f"not changed by training, so the second refit proved nothing of them: {sorted(same)}"
