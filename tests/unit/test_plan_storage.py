"""Plans on disk and inventories on the wire: a damaged plan is made again, a hostile inventory is refused."""

import compileall
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xfer
from tests.support.examples import EXAMPLES
from tests.support.plan_worlds import dense, destination, quick, source
from xfer.errors import ProtocolError
from xfer.plan import subplan
from xfer.plan.cache import SUFFIX, PlanCache
from xfer.plan.fabric import Fabric, Host, Nic, Site
from xfer.plan.inventory import Inventory, Kept
from xfer.plan.options import MAX_BUCKET
from xfer.plan.part import PlanPart
from xfer.plan.planner import PlanOptions, plan_key, plan_replica
from xfer.plan.program import ROW
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Span, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
relaxed = settings(quick, max_examples=EXAMPLES // 2 + 1)

CATALOG = Catalog((TensorSpec("a", (8, 16), "bfloat16"), TensorSpec("b", (16,), "float32")))
FRAGMENTS = [dense("a", (8, 16), "bfloat16"), Fragment("b", (0,), (16,), "n", 60, (-4,), "float32")]
ROOTS = {"w": 256, "n": 72}
SOURCE = source(CATALOG, FRAGMENTS, ROOTS, host="h")
DESTINATION = destination(
    CATALOG, FRAGMENTS, ROOTS, host="h", fills=[Fill("n", 64, (1,), (0,), "float32", b"\0" * 4)],
    kept=[Kept("n", 68, 70, "scale")], staged=[Span("n", 70, 72)], reads=["a", "b"],
)  # fmt: skip
PLAN = plan_replica(CATALOG, [SOURCE], [DESTINATION])
PART = PlanPart.of(PLAN, 1)
SITE = Site(
    Fabric((Host("a", ((0, 1), (2, 3)), 9, (Nic((0, 1), 5, 0), Nic((2, 3), 5, 1)), 6, 8), Host("b", ((0,),), 0, (Nic((0,), 5),))), 7),
    (0, 1), ((2,), (4,)),
)  # fmt: skip
FILE = f"{PLAN.key}-1{SUFFIX}"


@st.composite
def damage(draw, data: bytes):
    """Cut, longer, something else, or a few bytes of it changed."""
    kind = draw(st.sampled_from(["cut", "grow", "other", "flip", "zero"]))
    if kind == "other":
        return draw(st.binary(max_size=200))
    at = draw(st.integers(0, len(data) - 1))
    if kind in ("cut", "grow"):
        return data[:at] if kind == "cut" else data + draw(st.binary(min_size=1, max_size=9))
    new = bytes(draw(st.integers(1, 8))) if kind == "zero" else bytes([data[at] ^ draw(st.integers(1, 255))])
    return (data[:at] + new + data[at + len(new) :])[: len(data)]


# ---- wire


def read_inventory(data: bytes) -> bytes:
    """What was read is the one encoding of it, and lies in its storages."""
    back = Inventory.from_bytes(data)
    same = data == DESTINATION.to_bytes()
    assert same or back.content() != DESTINATION.content() or back.rank or back.host != "h"
    assert replace(back).content() == back.content()  # encoded anew
    low, high = back.table.bounds()
    size = np.array([r.nbytes for r in back.roots])[back.table.root]
    assert ((low >= 0) & (high <= size)).all()
    return back.to_bytes()


def read_part(data: bytes) -> bytes:
    """Whether it is the right part is judged by the digest of the file (below)."""
    rows = PlanPart.from_bytes(data).program.rows
    assert rows.dtype == ROW and rows.ndim == 1
    return data


def read_site(data: bytes) -> bytes:
    site = Site.from_bytes(data)
    every = range(site.fabric.gpus)
    site.fabric.links.paths(*np.meshgrid(every, every))
    return data


def read_catalog(data: bytes) -> bytes:
    Catalog.from_bytes(data)
    return data


@pytest.mark.parametrize(
    "whole, read",
    [
        (DESTINATION.to_bytes(), read_inventory),
        (PART.to_bytes(), read_part),
        (SITE.to_bytes(), read_site),
        (CATALOG.to_bytes(), read_catalog),
    ],
    ids=["inventory", "part", "site", "catalog"],
)
@given(st.data())
@relaxed
def test_damaged_bytes_are_refused_or_are_another_sound_value(whole, read, data):
    assert read(whole) == whole
    bad = data.draw(damage(whole))
    with suppress(ProtocolError):
        assert read(bad) == bad
    with pytest.raises(ProtocolError):
        read(whole[:-1])


def taken_apart(inventory: Inventory) -> tuple[list, list]:
    """The envelope, and in it: 0 version, catalog, side, root names, root bytes, 5 count, dims, columns, fills, footprint,
    10 kept, reasons, staged, reads."""
    outer = msgspec.msgpack.decode(inventory.to_bytes())
    return outer, msgspec.msgpack.decode(outer[2])


def refused(outer: list, body: list, match: str | None = None) -> None:
    with pytest.raises(ProtocolError, match=match):
        Inventory.from_bytes(msgspec.msgpack.encode([outer[0], outer[1], msgspec.msgpack.encode(body)]))


def replaced(body: list, path: tuple[int, ...], new) -> list:
    at, *rest = path
    return [*body[:at], replaced(body[at], rest, new) if rest else new, *body[at + 1 :]]


@pytest.mark.parametrize("big", [2**62, -(2**63), 2**48, -1, 1 << 47])
def test_an_inventory_with_a_hostile_field_is_refused(big):
    """Not random bytes but well-formed messages with one field out of its range."""
    outer, body = taken_apart(DESTINATION)
    wrong = {
        (2,): ["referee"],
        (3,): [["w", "n"], ["n", "n"], ["n"], ["n", "w", "z"]],
        (4,): [np.full(2, n).tobytes() for n in (2**62, -1, 2**48)],
        (5,): [-1, 0, 1, 3, 2**31, 2**62],
        (6,): [-1, 0, 1, 3, 7, 2**40],
        (11,): [[]],
        **{(8, 0, k): [new] for k, new in enumerate([7, big, [big], [1, 2], 99, b"\0"])},
    }
    for at in (9, 10, 12):  # spans
        n = body[at][0]
        wrong |= {(at, 0): [n + 1], (at, 1): [np.full(n, 5, np.int32).tobytes()]}
        wrong |= {(at, 2): [np.full(n, -1).tobytes()], (at, 3): [np.full(n, big).tobytes()]}
    for k, kind in enumerate(["<i4", "<i4", "<u1", "<i8", "<i8", "<i8", "<i8"]):
        column = np.frombuffer(body[7][k], kind)
        # A large origin is the catalog's to refuse, and a stride of -1 byte is odd but lies inside the storage.
        new = {0: -1, 1: 2, 2: 200, 4: -1, 6: 2**48 if big == -1 else big}.get(k, big)
        each = [np.where(np.arange(len(column)) == j, new, column) for j in range(len(column))]
        wrong[7, k] = [c.astype(kind).tobytes() for c in each]
    for path, values in wrong.items():
        for new in values:
            refused(outer, replaced(body, path, new))
    refused(outer, [*body, 1])
    shape = body[5], body[6]  # every element on one byte: the reach is harmless, the count is not
    refused(
        outer, replaced(body, (7,), [*body[7][:5], *(np.full(shape, n).tobytes() for n in (1 << 47, 0))]), "elements"
    )


def test_other_encodings_of_the_same_layout_are_refused():
    """Padded columns and long forms of numbers would change the digest, and equal ranks would not be one class."""
    outer, body = taken_apart(SOURCE)
    shape = body[5], body[6]
    for k, padding in ((4, 0), (5, 1), (6, 0)):
        column = np.frombuffer(body[7][k], np.int64).reshape(shape)
        body[7][k] = np.insert(column, 0, padding, axis=1).tobytes()
    body[6] += 1
    refused(outer, body, "canonical")
    content = SOURCE.content()
    assert content[1] < 128  # behind the head of the array: the version, which msgpack writes in one byte
    with pytest.raises(ProtocolError, match="canonical"):
        Inventory.from_content(content[:1] + b"\xcc" + content[1:])


def test_the_largest_bucket_is_planned_and_a_larger_one_refused():
    largest = plan_replica(CATALOG, [SOURCE], [DESTINATION], PlanOptions(bucket_bytes=MAX_BUCKET))
    assert largest.waves == 1 and len(largest.program(1).rows) == len(PART.program.rows)
    for more in (MAX_BUCKET + 1, 1 << 62, 10**30):
        with pytest.raises(ValueError, match=f"at most {MAX_BUCKET}"):
            PlanOptions(bucket_bytes=more)


# ---- disk


@given(st.data())
@settings(relaxed, max_examples=EXAMPLES // 4 + 1)
def test_a_damaged_file_is_planned_again(data):
    with tempfile.TemporaryDirectory() as d:
        cache, path = PlanCache(d), Path(d, FILE)
        assert cache.put(PART)
        whole = path.read_bytes()
        back = cache.get(PLAN.key, 1)
        assert back.to_bytes() == PART.to_bytes() and back.summary == PLAN.summary
        bad = data.draw(damage(whole))
        path.write_bytes(bad)
        assert bad == whole or cache.get(PLAN.key, 1) is None
        assert cache.put(PART) and path.read_bytes() == whole  # and it is whole again


def test_a_part_is_found_by_its_inputs_and_its_rank_only(tmp_path):
    folder = tmp_path / "not" / "there"
    cache = PlanCache(folder)
    assert cache.put(PART) and cache.get(PLAN.key, 1).to_bytes() == PART.to_bytes()
    other = plan_key(CATALOG, [SOURCE], [DESTINATION], PlanOptions(rotation=1))
    assert other != PLAN.key == plan_key(CATALOG, [SOURCE], [DESTINATION], PlanOptions())
    assert cache.get(other, 1) is None and cache.get(PLAN.key, 0) is None
    for key, rank in (("0" * 32, 1), (PLAN.key, 0)):  # a file under another's name
        (folder / FILE).rename(folder / f"{key}-{rank}{SUFFIX}")
        assert cache.get(key, rank) is None and cache.get(PLAN.key, 1) is None
        cache.put(PART)
    for key, rank in (("../escape", 1), ("0" * 32, -1)):
        with pytest.raises(ValueError):
            cache.get(key, rank)


def test_the_code_that_plans_is_in_every_key_and_digest_and_in_files(tmp_path, monkeypatch):
    """Each rank expands rows by its own code, so ranks with equal tables and other code would have other rows."""
    cache = PlanCache(tmp_path)
    assert cache.put(PART) and len(subplan.PLANNER) == 16
    for name in ("planner", "subplan", "part"):
        monkeypatch.setattr(f"xfer.plan.{name}.PLANNER", "another")
    made = plan_replica(CATALOG, [SOURCE], [DESTINATION])
    assert made.key != PLAN.key and made.digest != PLAN.digest and cache.get(PLAN.key, 1) is None


def printed(code: str, **how) -> list[str]:
    """The words that a new Python process prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, **how
    ).stdout.split()


def test_all_code_that_planning_loads_is_in_the_digest_and_needs_no_torch():
    """A new process imports the planner. Only xfer.errors and xfer.sources, which make no rows, may stay outside the digest."""
    loaded = printed("import sys, xfer.plan.planner, xfer.plan.cache; print(*sys.modules)")
    ours = {n for n in loaded if n.startswith("xfer.")}
    outside = {n for n in ours if n.split(".")[1] not in ("mesh", "trace", "plan")}
    assert "xfer.plan.subplan" in ours and outside <= {"xfer.errors", "xfer.sources"} and "torch" not in loaded


def installed(folder: Path, version: str, sources: bool) -> list[str]:
    """Install xfer in `folder` and return its digest of the planner, and whether it sees the code of plan and of mesh."""
    package = folder / "xfer"
    (package / "plan").mkdir(parents=True)
    for name in ("__init__.py", "sources.py", "plan/__init__.py", "plan/program.py"):
        text = (ROOT / "xfer" / name).read_text()
        (package / name).write_text(text.replace(f'__version__ = "{xfer.__version__}"', f'__version__ = "{version}"'))
    if not sources:
        assert compileall.compile_dir(package, quiet=1, legacy=True)
        for file in package.rglob("*.py"):
            file.unlink()
    code = "from xfer.sources import *; print(digest_of('plan'), has_sources('plan'), has_sources('mesh'))"
    return printed(code, cwd=folder, env={"PYTHONPATH": str(folder)})


def test_versions_installed_without_sources_are_told_apart_and_keep_nothing(tmp_path, monkeypatch):
    cases = [("1", True), ("2", True), ("1", False), ("2", False), ("2", False)]
    told = [installed(tmp_path / str(i), *case) for i, case in enumerate(cases)]
    assert len({digest for digest, *_ in told[:4]}) == 4 and told[3] == told[4]
    assert [sees for _, sees, _ in told] == ["True", "True", "False", "False", "False"] and told[0][2] == "False"
    cache = PlanCache(tmp_path / "kept")
    assert cache.put(PART)
    monkeypatch.setattr("xfer.plan.cache.KEEPS", False)
    assert cache.get(PLAN.key, 1) is None and not cache.put(PART)


def test_the_cache_stays_within_its_size_and_keeps_what_is_used(tmp_path):
    plans = [plan_replica(CATALOG, [SOURCE], [DESTINATION], PlanOptions(rotation=r)) for r in range(4)]
    parts = [PlanPart.of(plans[r], rank) for r, rank in ((0, 1), (1, 1), (2, 1), (2, 0), (3, 1))]
    size = max(len(p.to_bytes()) for p in parts) + 64
    cache = PlanCache(tmp_path, max_bytes=3 * size)
    for i, p in enumerate(parts):
        assert cache.put(p)
        os.utime(tmp_path / f"{p.key}-{p.program.rank}{SUFFIX}", (i + 1, i + 1))
        if i >= 1:
            assert cache.get(parts[0].key, 1) is not None  # used every time, so never the oldest
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= 3 * size
    assert cache.get(parts[4].key, 1) is not None and cache.get(parts[1].key, 1) is None
    assert not PlanCache(tmp_path / "small", max_bytes=10).put(PART)


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path):
    for name, age in ((".old.part", 7200), (".new.part", 60)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    assert PlanCache(tmp_path).put(PART)
    assert {p.name for p in tmp_path.glob(".*.part")} == {".new.part"}


@pytest.mark.parametrize("name", ["file", "file/in it", "null\0byte", "no UTF-8 \ud800", "x" * 5000])
def test_a_directory_that_cannot_be_written_is_no_error(tmp_path, name):
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / name)
    assert not cache.put(PART) and cache.get(PLAN.key, 1) is None
