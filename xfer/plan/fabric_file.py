"""A fabric and the places of ranks on it, from a small TOML or JSON file. One error lists all mistakes in it.

    spine = 0                    # optional: bytes/s of one rail to and from all others; 0 or absent: never the limit
    cross_rail = "nvlink"        # optional: or "spine"

    [[host]]                     # hosts of one kind; as many of these as there are kinds
    names = ["a", "b"]           # or: count = 2, which names them host0, host1, … through the file
    gpus = 8
    nvlink = 396e9               # bytes/s of one GPU in its island, each way
    islands = [[0, 1, 2, 3], [4, 5, 6, 7]]     # optional: default one island of all
    bridge = 50e9                # between islands of this host; needed when there are several
    local = 1.5e12               # optional: copies inside one GPU
    nic = 48.5e9                 # one NIC per GPU, GPU i on rail i; or in full:
    nics = [{gpus = [0, 1], rate = 48.5e9, rail = 0}, …]

    [ranks]                      # optional: who sits where, in rank order
    trainers = ["a"]             # all GPUs of a host, or some: "a:0-3", "a:0,2"
    replicas = [["b:0-3"], ["b:4-7"]]

This module only reads files; fabric.py says what the words mean.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xfer.errors import XferError
from xfer.plan.fabric import MAX_GPUS, Fabric, Host, Nic, Site
from xfer.plan.plain_data import TOO_DEEP, unfit

_PLACE = re.compile(r"([^:]+)(?::(.*))?")
_SOME = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_site(path: str | Path) -> Site:
    """The fabric of a file and its `[ranks]`. XferError with every violation."""
    data = read_data(path)
    fabric, ranks = parse(data if isinstance(data, dict) else {"": data}, str(path))
    if ranks is None:
        raise XferError(
            f"{path}: [ranks] is needed here: who sits where", ['e.g. trainers = ["a"], replicas = [["b"]]']
        )
    return Site(fabric, *ranks)


def parse(data: Mapping[str, Any], what: str = "fabric") -> tuple[Fabric, tuple | None]:
    """The fabric and the ranks of a parsed file: (fabric, (trainers, replicas) or None)."""
    r = _TableReader(what)
    r.known(data, "", {"spine", "cross_rail", "host", "ranks"})
    hosts: list[Host] = []
    for i, entry in enumerate(r.items(data, "host")):
        hosts += _hosts(r, entry, f"host[{i}]", len(hosts))
    if not hosts and not r.bad:
        r.bad.append("no [[host]] at all")
    r.check()
    try:
        fabric = Fabric(tuple(hosts), r.rate(data, "spine", "", 0), data.get("cross_rail", "nvlink"))
    except XferError as e:
        raise XferError(f"{what}: this is no fabric", [*r.bad, *e.violations]) from None
    ranks = _ranks(r, data["ranks"], fabric) if "ranks" in data else None
    r.check()
    return fabric, ranks


def read_data(path: str | Path, kind: str = "") -> Any:
    """Contents of a JSON or TOML file. kind: which; default: TOML if its name does not end in .json.

    Raises:
        XferError: The file cannot be read, or has values that no plan can use.
    """
    path, why = Path(path), ""
    kind = kind or ("JSON" if path.suffix == ".json" else "TOML")
    try:
        text = path.read_text()
        data = json.loads(text) if kind == "JSON" else read_toml(text)
        why = unfit(data)
    except RecursionError:
        why = TOO_DEEP
    except OSError as e:
        raise XferError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError as e:  # both decoders' errors are ValueErrors
        why = str(e)
    if why:
        raise XferError(f"{path} cannot be read as {kind}: {why}")
    return data


def read_toml(text: str) -> dict:
    """Parse TOML. Raises ValueError if the text is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


@dataclass
class _TableReader:
    """Takes values out of parsed tables and collects what is wrong with them."""

    what: str
    bad: list[str] = field(default_factory=list)

    def check(self) -> None:
        if self.bad:
            raise XferError(f"{self.what}: this does not describe a fabric", self.bad)

    def known(self, table: Mapping, where: str, keys: set[str]) -> None:
        self.bad += [
            f"{where or 'file'}: unknown key {k!r}; known: {', '.join(sorted(keys))}" for k in table if k not in keys
        ]

    def items(self, table: Mapping, key: str, where: str = "") -> list[Mapping]:
        value = table.get(key, [])
        if isinstance(value, list) and all(isinstance(v, Mapping) for v in value):
            return value
        self.bad.append(f"{where}{key}: a list of tables is needed")
        return []

    def rate(self, table: Mapping, key: str, where: str, default: int | None = None) -> int:
        value = table.get(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1e15:
            return round(value)
        self.bad.append(f"{where}{key}: {value!r}: bytes/s as a number are needed (48.5e9)")
        return 0

    def integer(self, table: Mapping, key: str, where: str, low: int, high: int, default: int | None = None) -> int:
        value = table.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.bad.append(f"{where}{key}: {value!r}: an integer from {low} to {high} is needed")
        return low

    def numbers(self, value: Any, where: str) -> tuple[int, ...]:
        if isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            return tuple(value)
        self.bad.append(f"{where}: {value!r}: a list of GPU numbers is needed")
        return ()


def _hosts(r: _TableReader, entry: Mapping, where: str, before: int) -> Iterator[Host]:
    r.known(entry, where, {"names", "count", "gpus", "nvlink", "islands", "bridge", "local", "nic", "nics"})
    where += "."
    if ("names" in entry) == ("count" in entry):
        r.bad.append(f"{where}names or {where}count: one of the two is needed")
    names = entry.get("names", [])
    if not (isinstance(names, list) and all(isinstance(n, str) and n and ":" not in n for n in names)):
        r.bad.append(f"{where}names: {names!r}: a list of host names (without ':') is needed")
        names = []
    if "count" in entry:
        names = [f"host{before + i}" for i in range(r.integer(entry, "count", where, 1, MAX_GPUS))]
    gpus = r.integer(entry, "gpus", where, 1, 1024, 8)
    every = list(range(gpus))
    islands = entry.get("islands", [every])
    if not isinstance(islands, list):
        r.bad.append(f"{where}islands: {islands!r}: a list of lists of GPU numbers is needed")
        islands = [every]
    islands = tuple(r.numbers(i, f"{where}islands[{k}]") for k, i in enumerate(islands))
    if sum(map(len, islands)) != gpus:
        r.bad.append(f"{where}islands: have {sum(map(len, islands))} GPUs, the host has {gpus}")
    nvlink = r.rate(entry, "nvlink", where)
    bridge, local = r.rate(entry, "bridge", where, 0), r.rate(entry, "local", where, 0)
    if "nic" in entry and "nics" in entry:
        r.bad.append(f"{where}nic and {where}nics: give one of the two")
    if "nic" in entry:
        rate = r.rate(entry, "nic", where)
        nics = tuple(Nic((i,), rate, i) for i in every)
    else:
        nics = tuple(_nic(r, n, f"{where}nics[{k}]") for k, n in enumerate(r.items(entry, "nics", where)))
    for name in names:
        yield Host(name, islands, nvlink, nics, bridge, local)


def _nic(r: _TableReader, entry: Mapping, where: str) -> Nic:
    r.known(entry, where, {"gpus", "rate", "rail"})
    where += "."
    gpus = r.numbers(entry.get("gpus"), f"{where}gpus")
    return Nic(gpus, r.rate(entry, "rate", where), r.integer(entry, "rail", where, 0, 65535, 0))


def _ranks(r: _TableReader, table: Any, fabric: Fabric) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    if not isinstance(table, Mapping):
        r.bad.append("ranks: a table is needed")
        return (), ()
    r.known(table, "ranks", {"trainers", "replicas"})
    first, at = {}, 0
    for h in fabric.hosts:
        first[h.name], at = (at, h.gpus), at + h.gpus
    trainers = _gpus(r, table.get("trainers"), "ranks.trainers", first)
    replicas = table.get("replicas")
    if not isinstance(replicas, list):
        r.bad.append(f"ranks.replicas: {replicas!r}: a list of lists of places is needed")
        replicas = []
    return trainers, tuple(_gpus(r, v, f"ranks.replicas[{i}]", first) for i, v in enumerate(replicas))


def _gpus(r: _TableReader, places: Any, where: str, first: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    """ "a:0-2,5" -> GPU numbers of the whole fabric."""
    if not isinstance(places, list) or not all(isinstance(p, str) for p in places):
        r.bad.append(f'{where}: {places!r}: a list of places such as "{next(iter(first))}:0-3" is needed')
        return ()
    out: list[int] = []
    for place in places:
        match = _PLACE.fullmatch(place)
        if not match or match[1] not in first:
            r.bad.append(f"{where}: {place!r}: no such host; there are {', '.join(list(first)[:8])}")
            continue
        start, n = first[match[1]]
        some = [_SOME.fullmatch(p) for p in (f"0-{n - 1}" if match[2] is None else match[2]).split(",")]
        ends = [(int(m[1]), int(m[2] or m[1])) if m else (1, 0) for m in some]
        if not all(0 <= a <= b < n for a, b in ends):
            r.bad.append(f"{where}: {place!r}: GPUs of {match[1]} are 0..{n - 1}, as in {match[1]}:0-{n - 1}")
            continue
        out += [start + g for a, b in ends for g in range(a, b + 1)]
    return tuple(out)
