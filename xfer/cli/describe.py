"""Reads and checks the description of two sides and a fabric; one error lists every mistake.

A side is text, "CONFIG key=value …", or a table of a TOML or JSON file; both become the same dataclasses. No framework is
imported here.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xfer.cli.examples import FOLDER, MODELS
from xfer.errors import XferError
from xfer.mesh.parallel import MEGATRON_ORDER, EngineParallel, TrainerParallel
from xfer.plan.fabric import Fabric, Site
from xfer.plan.fabric_file import parse, read_data
from xfer.plan.plain_data import TOO_DEEP, unfit

MOST_RANKS = 1 << 14
"""Most ranks of a side. A larger mesh would take long to build, only to be refused."""
SIZES = {"trainer": ("world", "tp", "pp", "vpp", "cp", "dp", "ep", "etp"), "engine": ("tp", "pp", "dp", "replicas")}
GLOBS = ("keep", "drop", "narrow")
KEYS = {
    "trainer": ("config", *SIZES["trainer"], "order", "provider"),
    "engine": ("config", *SIZES["engine"], "ep", *GLOBS, "args"),
}
THEIR_NAMES = {
    "trainer": {
        "world_size": "world", "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp",
        "virtual_pipeline_model_parallel_size": "vpp", "context_parallel_size": "cp", "data_parallel_size": "dp",
        "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp",
    },
    "engine": {
        "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
        "enable_expert_parallel": "ep",
    },
}  # fmt: skip
"""Megatron-Core's and vLLM's names of the same sizes."""
HOST, NVLINK, NIC, LOCAL = 8, 396 * 10**9, 48_500_000_000, 1600 * 10**9
WRONG = "the description or an option has mistakes"
ASSUMED = f"assumed, as none was given: hosts of {HOST} GPUs, NVLink {NVLINK / 1e9:g} GB/s, one NIC of {NIC / 1e9:g} GB/s per GPU"


@dataclass(frozen=True, slots=True)
class Config:
    """A Hugging Face config.

    Attributes:
        names: Names of the checkpoint's tensors, if an index or safetensors headers lie beside the config; else None.
    """

    path: Path
    content: Mapping[str, Any] = field(hash=False)
    names: tuple[str, ...] | None = None

    @property
    def title(self) -> str:
        """Name of the model for people: folder or file, and architecture."""
        of = self.path.parent.resolve().name if self.path.name == "config.json" else self.path.stem
        kinds = self.content.get("architectures")
        kind = kinds[0] if isinstance(kinds, list) and kinds else self.content.get("model_type", "")
        return f"{of} ({kind})"


@dataclass(frozen=True, slots=True)
class DescribedTrainer:
    """The trainers. `provider`: fields of Bridge's model provider, e.g. how many layers the last stage has."""

    config: Config
    parallel: TrainerParallel
    provider: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        p = self.parallel
        sizes = {"TP": p.tp, "PP": p.pp, "VPP": p.vpp or 1, "CP": p.cp, "EP": p.ep, "DP": p.dp or 1}
        etp = f" ETP{p.etp}" if p.ep > 1 and p.etp != p.tp else ""
        return " ".join(f"{n}{v}" for n, v in sizes.items() if v > 1) + etp or "one rank"


@dataclass(frozen=True, slots=True)
class DescribedEngine:
    """The engines.

    Attributes:
        parallel: sizes of one replica.
        keep: See xfer.serve.
        drop, narrow: See xfer.connect.
        args: Further EngineArgs of vLLM.
    """

    config: Config
    parallel: EngineParallel
    replicas: int = 1
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        p = self.parallel
        sizes = " ".join(f"{n}{v}" for n, v in {"TP": p.tp, "PP": p.pp, "DP": p.dp}.items() if v > 1) or "TP1"
        return sizes + (" with EP" if p.ep else "")


@dataclass(frozen=True, slots=True)
class Described:
    """A refit to plan. `fabric`: the source of the links, in words."""

    trainer: DescribedTrainer
    engine: DescribedEngine
    site: Site
    fabric: str


def describe(
    trainer: str | None = None,
    engine: str | None = None,
    fabric: str | None = None,
    file: str | None = None,
    more: Sequence[str] = (),
) -> Described:
    """Reads the two descriptions and a fabric's file, or one file that holds all three.

    Args:
        trainer, engine: "CONFIG key=value …"; replaces the file's table.
        fabric: path of a TOML or JSON file; replaces the file's fabric.
        file: path of a TOML or JSON file with all three.
        more: mistakes that the caller has found, to be told with these.

    Raises:
        XferError: every mistake in all of them.
    """
    bad: list[str] = []
    whole, base = {}, Path(file or "").parent
    try:
        if file is not None and not isinstance(whole := read_data(file), dict):
            raise XferError(f"{file}: a table is needed")
    except XferError as error:
        bad, whole = [error.message], {}
    if "model_type" in whole:
        raise XferError(WRONG, [f'{file} is a model\'s config; give it as --trainer "{file} world=…"'])
    parts = ("engine", "fabric", "trainer")
    bad += [f"{file}: unknown key {k!r}; known: {', '.join(parts)}" for k in whole if k not in parts]
    tables, bases = {}, {}
    for side, text in (("trainer", trainer), ("engine", engine)):
        table = whole.get(side, {}) if text is None else _text(text, side, bad)
        if not isinstance(table, Mapping):
            bad.append(f"{side}: a table is needed, [{side}]")
            table = {}
        if text is None and side not in whole:
            bad.append(f'{side}: not described; give --{side} "CONFIG tp=…", or a file with [{side}]')
        tables[side], bases[side] = _in_our_names(table, side, bad), base if text is None else Path()
    t, e = tables["trainer"], tables["engine"]
    configs = _configs(tables, bases, bad)
    of = _trainer(t, bad)
    replica, replicas = _engine(e, bad)
    sizes = None if of is None or replica is None else (of.world, replicas, replica.world)
    source, at = (whole.get("fabric"), base) if fabric is None else (fabric, Path())
    site, words = _site(source, at, sizes, bad)
    if bad or more or of is None or replica is None or site is None:
        raise XferError(WRONG, [*bad, *more])
    globs = {key: _globs(e, key) for key in GLOBS}
    return Described(
        DescribedTrainer(configs["trainer"], of, dict(t.get("provider", {}))),
        DescribedEngine(configs["engine"], replica, replicas, **globs, args=dict(e.get("args", {}))),
        site,
        words,
    )


# ---- sides


def _text(text: str, side: str, bad: list[str]) -> dict[str, Any]:
    """Turns "CONFIG tp=2 provider.x=3" into the table that a file would have."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        bad.append(f"{side}: {text!r}: {e}")
        return {}
    out: dict[str, Any] = {}
    for word in words:
        key, is_set, value = word.partition("=")
        if not is_set:
            key, value = "config", word
        to, dot, name = key.partition(".")
        given: Any = value
        try:
            with suppress(ValueError):  # no literal of JSON (4, 0.5, true): the word itself
                given = value if key == "config" else json.loads(value)
            why = unfit(given, key)
        except RecursionError:
            why = f"{key}: {TOO_DEEP}"
        if why:
            bad.append(f"{side}: {why}")
            continue
        if dot and to in ("provider", "args"):
            out.setdefault(to, {})[name] = given
        elif key in out:
            bad.append(f"{side}: {key} is given twice: {out[key]!r} and {value!r}")
        else:
            out[key] = given
    return out


def _in_our_names(table: Mapping[str, Any], side: str, bad: list[str]) -> dict[str, Any]:
    """Replaces the framework's own names of sizes, as options (with dashes) or as fields, by xfer's."""
    out: dict[str, Any] = {}
    told: dict[str, str] = {}
    for name, value in table.items():
        key = THEIR_NAMES[side].get(name.lstrip("-").replace("-", "_"), name)
        if key in told:
            bad.append(f"{side}: {told[key]}={out[key]} and {name}={value} mean the same; give one of them")
        told[key], out[key] = name, value
    return out


def _sizes(table: Mapping[str, Any], side: str, bad: list[str]) -> dict[str, int]:
    """The sizes in the table that are valid, once its keys are known to be."""
    theirs = THEIR_NAMES[side]
    known = f"known: {', '.join(KEYS[side])}, and {', '.join(theirs)}"
    bad += [f"{side}: unknown key {k!r}; {known}" for k in table if k not in KEYS[side]]
    group = {"trainer": "provider", "engine": "args"}[side]
    more = table.get(group, {})
    if isinstance(more, Mapping):
        bad += [f"{side}: {group}.{k}: write {k}=…, by which ranks are counted, too" for k in more if k in theirs]
    else:
        bad.append(f"{side}: {group}: names and values are needed, as in {group}.NAME=VALUE")
    out = {k: table[k] for k in SIZES[side] if k in table}
    for key, n in list(out.items()):
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_RANKS:
            bad.append(f"{side}: {key}={out.pop(key)}: an integer from 1 to {MOST_RANKS} is needed")
    return out


def _trainer(table: Mapping[str, Any], bad: list[str]) -> TrainerParallel | None:
    """Returns None after a mistake. Valid sizes are still checked against each other."""
    known = len(bad)
    sizes = _sizes(table, "trainer", bad)
    if table and "world" not in table:
        bad.append("trainer: world=… is needed: how many ranks train")
    if "world" not in sizes:
        return None
    if len(bad) > known:
        sizes.pop("dp", None)  # the product of all sizes means nothing when one is not known
    try:
        of = TrainerParallel(order=str(table.get("order", MEGATRON_ORDER)), **sizes)
    except XferError as e:
        bad += [f"trainer: {v}" for v in e.violations]
    return of if len(bad) == known else None


def _engine(table: Mapping[str, Any], bad: list[str]) -> tuple[EngineParallel | None, int]:
    known = len(bad)
    sizes = _sizes(table, "engine", bad)
    ep = table.get("ep", False)
    if not isinstance(ep, bool):
        bad.append(f"engine: ep={ep}: true or false is needed (vLLM's enable_expert_parallel); its size is dp*tp")
    for key in GLOBS:
        value = table.get(key, "")
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            bad.append(f"engine: {key}={value!r}: a list of names or patterns is needed")
    replicas = sizes.pop("replicas", 1)
    if len(bad) > known:
        return None, replicas
    parallel = EngineParallel(**sizes, ep=ep)
    if parallel.world * replicas > MOST_RANKS:
        bad.append(f"engine: {replicas} replicas of {parallel.world} workers: at most {MOST_RANKS} ranks are planned")
        return None, replicas
    return parallel, replicas


def _globs(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, ())
    return tuple(p for p in value.split(",") if p) if isinstance(value, str) else tuple(value)


# ---- configs


def _configs(tables: Mapping[str, Mapping], bases: Mapping[str, Path], bad: list[str]) -> dict[str, Any]:
    """Config of each side. A side without one uses the other's. One that has mistakes is None."""
    read: dict[Path, Config | None] = {}
    found: dict[str, Config | None] = {}
    if not any("config" in t for t in tables.values()):
        bad.append('no config: begin a description with one, as in --trainer "path/to/config.json world=8"')
    for side, table in tables.items():
        value = table.get("config")
        if isinstance(value, str) and value:
            path = bases[side] / os.path.expanduser(value)
            if value in MODELS and not os.path.exists(path):
                path = FOLDER / f"{value}.json"
            if path not in read:
                read[path] = _config(path, side, bad)
            found[side] = read[path]
        elif value is not None:
            bad.append(f"{side}: config={value!r}: the path of a config.json, or of its folder, is needed")
    other = next(iter(found.values()), None)
    return {side: found.get(side, other) for side in tables}


def _config(path: Path, side: str, bad: list[str]) -> Config | None:
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        content = read_data(file, "JSON")
        if not (isinstance(content, dict) and isinstance(content.get("model_type"), str)):
            raise XferError(f"{file} is no Hugging Face config: it has no model_type")
    except XferError as e:
        need = f"a Hugging Face config.json, its folder, or one of {', '.join(MODELS)} is needed"
        bad.append(f"{side}: {e.message}; {need}")
        return None
    return Config(file, content, _names(file.parent, side, bad))


def _names(folder: Path, side: str, bad: list[str]) -> tuple[str, ...] | None:
    from xfer.engines.hf_spec import checkpoint_specs

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = read_data(index)["weight_map"]
            if not isinstance(files, dict):
                raise ValueError("weight_map: names and files are needed")
            return tuple(sorted(files))
        if any(folder.glob("*.safetensors")):
            return tuple(s.name for s in checkpoint_specs(folder))
    except (OSError, ValueError, KeyError, TypeError, XferError) as e:
        bad.append(f"{side}: the names of the tensors in {folder} cannot be read: {type(e).__name__}: {e}")
    return None


# ---- the fabric


def _site(source: Any, base: Path, sizes: tuple[int, int, int] | None, bad: list[str]) -> tuple[Site | None, str]:
    """The fabric of `source` with the ranks on it, and its source in words. No site after a mistake.

    Args:
        source: A path, a table, or None for the assumed fabric.
        sizes: Trainers, replicas, workers of one; None if there are mistakes in them.
    """
    words = ASSUMED if source is None else source if isinstance(source, str) else "the job's file"
    fabric = ranks = None
    try:
        if isinstance(source, str):
            source = read_data(base / os.path.expanduser(source))
        if source is not None:
            fabric, ranks = parse(source if isinstance(source, Mapping) else {"": source}, words)
        if sizes is None:
            return None, words
        trainers, replicas, workers = sizes
        if fabric is None:
            hosts = -(-trainers // HOST) + -(-workers * replicas // HOST)
            fabric = Fabric.uniform(hosts, HOST, nvlink=NVLINK, nic=NIC, local=LOCAL)
        site = Site.packed(fabric, trainers, replicas, workers) if ranks is None else Site(fabric, *ranks)
    except XferError as e:
        bad += [f"fabric ({words}): {v}" for v in (e.violations or [e.message])]
        return None, words
    placed = [len(r) for r in site.replicas]
    if len(site.trainers) != trainers:
        bad.append(f"fabric ({words}): [ranks] places {len(site.trainers)} trainers, there are world={trainers}")
    if placed != [workers] * replicas:
        bad.append(f"fabric ({words}): [ranks] places replicas of {placed} workers, there are {replicas} of {workers}")
    return site, words
