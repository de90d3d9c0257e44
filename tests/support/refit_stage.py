"""Four real Megatron-Core trainer ranks and real vLLM engines as processes, and the question that is asked of every route between
them: are two refits, each after a step, the same as a fresh vLLM that loads what Bridge exported at that step?
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from examples.common.ports import free_port
from tests.support.proc import Child, Family, stop_all
from tests.support.refit_job import until


class Stage:
    """Four trainer ranks that build one case after the other, and an engine process that tells the truth."""

    token = "end to end token"

    def __init__(self, work: Path):
        self.family, self.starts, self.whole = Family(work), 0, True
        self.start()

    def start(self) -> None:
        self.starts += 1
        world = dict(WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), XFER_TOKEN=self.token)
        world |= dict(XFER_LOG_LEVEL="INFO")  # else vLLM's own level, which tests set to ERROR, would be xfer's
        self.trainers = [
            self.family.start(
                f"trainer{r}-{self.starts}", "trainer", "megatron_main", RANK=str(r), LOCAL_RANK=str(r), **world
            )
            for r in range(4)
        ]
        self.truth = self.engine("truth")
        for c in (*self.trainers, self.truth):
            c.expect("up", timeout=180)

    def engine(self, name: str) -> Child:
        return self.family.start(
            f"{name}-{self.starts}", "engine", "vllm_main", XFER_TOKEN=self.token, XFER_LOG_LEVEL="INFO"
        )

    @contextmanager
    def case(self) -> Iterator[Stage]:
        """Inside, one case; the next one starts new processes unless this comes to its end."""
        if not self.whole:
            stop_all((*self.trainers, self.truth))
            self.start()
        self.whole = False
        yield self
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


def lines(child: Child) -> list[str]:
    """xfer's own, of this process and those that it started."""
    return [x for x in child.log_path.read_text().splitlines() if " xfer: " in x]


LEFT = "goes on serving version 2: trainer"


def says_what_happened(trainers: list[list[str]], engines: list[list[str]], layouts: Sequence[dict]) -> None:
    """A job that goes well says a line for each thing that happens, with the time and the rank, and warns about nothing."""
    assert not [x for some in (*trainers, *engines) for x in some if not re.search(r" INFO |^INFO ", x)]
    for replica, (said, how) in enumerate(zip(engines, layouts, strict=True)):
        for worker in range(how["tp"]):
            process = f"Worker_TP{worker}" if how["tp"] > 1 else "Worker"
            want = rf"\({process}\S* pid=\d+\) INFO \d\d-\d\d [\d:]{{8}} \[.*\] xfer: replica {replica} worker {worker} has joined tcp://"
            assert any(re.match(want, x) for x in said), (want, said)
        for version in (1, 2):
            assert sum(f"replica {replica} serves version {version}, outage" in x for x in said) == 1, said
        assert sum(LEFT in x for x in said) == 1, said
    for joined in ("4 of 4 trainers have joined", "has joined: "):  # in either order
        order = ["listening at tcp://", joined, " direct, in ", "version 1 committed", "version 2 committed"]
        found = [next((i for i, x in enumerate(trainers[0]) if words in x), None) for words in order]
        assert None not in found and found == sorted(found), trainers[0]
    assert found[-1] == found[-2] + 1, f"between two refits nothing is said: {trainers[0]}"
    assert all("no answer from" in x for some in trainers[1:] for x in some), trainers[1:]


def two_refits_are_fresh_loads(
    stage: Stage,
    work: Path,
    *,
    model: Path,
    layout: dict,
    engines: Sequence[dict],
    frozen: Sequence[str] = (),
    scramble: bool = True,
    **connect,
) -> None:
    """`model`: a checkpoint; `layout`: of the trainers; `engines`: one dict per replica; `frozen`: engine parameters (globs) that
    this training does not touch; `scramble`: noise in every live byte but the kept ones between the refits; `connect`: more
    arguments of `xfer.connect`."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    logged = [len(lines(c)) for c in stage.trainers]
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
        until(
            lambda: all(any(LEFT in x for x in lines(e)) for e in running),
            20,
            "controllers hear that the trainers left",
        )
        says_what_happened([lines(c)[n:] for c, n in zip(stage.trainers, logged)], list(map(lines, running)), engines)
        layouts = [how for i, how in enumerate(engines) if how not in engines[:i]]
        for how in layouts:  # fresh engines load while the others end
            stage.truth.say(do="truth", folders=exports, layout=how)
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
