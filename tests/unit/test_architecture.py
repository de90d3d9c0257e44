"""The layout of xfer: imports go one way, and names mean one thing. ruff holds the size of functions (pyproject.toml).

`python -m tests.support.house` prints the figures. A list of exceptions here says of each why it is there; one that is no longer
needed fails its test too, so that the lists only shrink.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.support import house

AGAINST_THE_FLOW: set[str] = set()
CIRCLES = 3
"""Sets of modules that import each other. At most 3 is the goal."""
INHERITED_ACROSS_PACKAGES: dict[str, str] = {}
REPEATED_NAMES = {
    "Export": "one interface for GPUs (peer) and for host memory (peer_host); transport/routes.py takes the module",
    "Mapping": "as Export",
    "Pull": "as Export",
    "Layout": "a message, and one side of an xferdtensor call: to be renamed with its rewrite",
}
"""Names of several classes, and why each is right."""


def test_every_package_has_its_place():
    homeless = sorted({p for m in house.modules() if house.level(p := house.package_of(m)) < 0})
    assert homeless == [], "give it a place in LAYERS (tests/support/house.py)"


def test_imports_go_one_way():
    """Those inside functions count too. Those for type checkers do not: a lower package may name the type of what it is handed."""
    found = {f"{i.source} {i.target}": i for i in house.against_the_flow()}
    assert [str(i) for pair, i in sorted(found.items()) if pair not in AGAINST_THE_FLOW] == []
    assert sorted(AGAINST_THE_FLOW - found.keys()) == [], "no longer needed: delete it from AGAINST_THE_FLOW"


def test_there_are_no_more_circles_of_imports():
    assert len(house.circles()) <= CIRCLES, house.circles()


def test_the_coordinator_has_no_io():
    """No socket, thread, clock or torch: tests drive it with a fake clock through any order of events."""
    banned = {"socket", "threading", "time", "asyncio", "select", "torch", "queue", "concurrent", "multiprocessing"}
    found = [
        f"{name}:{node.lineno} {word}"
        for name, (_, tree) in house.modules().items() if house.package_of(name) == "coordinator"
        for node in house.ast.walk(tree) if isinstance(node, house.ast.Import | house.ast.ImportFrom)
        for word in ([a.name for a in node.names] if isinstance(node, house.ast.Import) else [node.module or ""])
        if word.split(".")[0] in banned
    ]  # fmt: skip
    assert found == []


def test_no_class_inherits_from_another_package():
    """Except from a Protocol, an ABC or an exception, which are made for it."""
    assert house.inherited_across_packages() == INHERITED_ACROSS_PACKAGES


def test_a_class_name_means_one_thing():
    """A leading underscore does not count: whoever greps for a name finds both."""
    found = house.repeated_names()
    assert {name: where for name, where in found.items() if name not in REPEATED_NAMES} == {}, "rename all but one"
    assert sorted(REPEATED_NAMES.keys() - found.keys()) == [], "no longer needed: delete it from REPEATED_NAMES"
    assert all(REPEATED_NAMES.values())


# ---- the measures themselves


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Writes a package `xfer` of some modules, which the measures then read."""

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / "xfer" / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    monkeypatch.setattr(house, "ROOT", tmp_path)
    house.modules.cache_clear()
    house.imports.cache_clear()
    yield write
    house.modules.cache_clear()
    house.imports.cache_clear()


def test_the_measures_find_what_is_wrong(sources):
    sources(
        plan__in__a="from xfer.plan import b\nclass Box: pass\nclass Base: pass\n",
        plan__in__b="def f():\n    import xfer.plan.a\n    from xfer.trace.c import C\n",
        trace__in__c="""
            from typing import TYPE_CHECKING, Protocol
            from xfer.plan.a import Base as B, Box
            if TYPE_CHECKING:
                from xfer.engines.e import E
            class C(B): pass
            class _Box: pass
            class P(Protocol): pass
        """,
        engines__in__e="from xfer.trace.c import P\nclass E(P): pass\n",
    )
    assert [str(i) for i in house.against_the_flow()] == ["xfer.trace.c:3 imports xfer.plan.a"]
    assert house.circles() == [["xfer.plan.a", "xfer.plan.b", "xfer.trace.c"]]
    assert house.inherited_across_packages() == {"xfer.trace.c.C": "xfer.plan.a.Base"}
    assert house.repeated_names() == {"Box": ["xfer.plan.a", "xfer.trace.c"]}
