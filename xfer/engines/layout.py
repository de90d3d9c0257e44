"""Compares a live engine model with its traced twin: which bytes a refit writes, and which it leaves alone.

The twin is the same model class on the meta device, in the same parallel groups. The trace of its own loader gives the
place of each element of a checkpoint tensor *in the twin*. This module maps these places to the live storages and gives
every byte of the live model one class: written, filled, staged (computed by the loader) or kept. Aliases need no class:
names that share a storage share its bytes. Bytes without a class are an error that lists every name. This module uses
plain torch; vllm_layout.py has the part for vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import numpy as np
import torch

from xfer.engines.live import DRAFT, NONE, LiveSlot, LiveStorages, Ranges, common, covered, pairs, union, written
from xfer.errors import LayoutError
from xfer.mesh.box import row_major
from xfer.plan.intervals import difference, size
from xfer.plan.inventory import SCRATCH, Inventory, Kept, engine_inventory
from xfer.plan.program import ITEMSIZE
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fill, Fragment, Root, Span, TensorSpec
from xfer.trace.traced import Recipe, Traced

logger = logging.getLogger("xfer")
EMPTIED = "the live tensor is empty: its bytes were packed elsewhere after loading. On CPU set XFER_CPU_RESIDENT=1"
GUIDE = "docs/guide.md, 'Weights that refits leave alone',"


@dataclass(frozen=True, eq=False)
class EngineLayout:
    """The layout of one worker's model for refits. It is immutable; a storage that moves does not change `tensors` here.

    Attributes:
        roots: The live storages, and one "scratch/<name>" per checkpoint tensor that the loader computes with, by name.
        tensors: Root name -> flat uint8 tensor over the whole storage.
        traced: Fragments, fills and recipes over these roots.
        footprint: Every byte of every live parameter and buffer, disjoint, by root.
        kept: Bytes that no refit writes, with reasons.
        staged: Bytes that recipes write.
    """

    roots: tuple[Root, ...]
    tensors: Mapping[str, torch.Tensor]
    traced: Traced
    footprint: tuple[Span, ...]
    kept: tuple[Kept, ...]
    staged: tuple[Span, ...]

    @property
    def derived(self) -> tuple[TensorSpec, ...]:
        """The tensors among its fragments that trainers derive from a checkpoint tensor."""
        taken = {f.tensor for f in self.traced.fragments}
        return tuple(s for s in self.traced.specs if s.of and s.name in taken)

    def inventory(self, catalog: Catalog, rank: int, host: str = "") -> Inventory:
        """The inventory that the worker of that rank publishes."""
        return engine_inventory(
            catalog, rank=rank, host=host, roots=self.roots, fragments=self.traced.fragments, fills=self.traced.fills,
            footprint=self.footprint, kept=self.kept, staged=self.staged, reads=self.traced.reads,
            recipes=(r.digest() for r in self.traced.recipes),
        )  # fmt: skip

    def bytes_of(self, spans: Iterable[Span | Kept]) -> int:
        return sum(s.stop - s.start for s in spans)


def read_layout(
    live: LiveStorages, twin: LiveStorages, traced: Traced, *, keep: Sequence[str] = (), device: torch.device
) -> EngineLayout:
    """Map a traced loader to the live storages and classify every byte.

    If every name in a storage is kept and the trainers send nothing or all of that storage, it stays as it is: a kept tower
    is not written even if the trainers have one. If they send a part (q of a fused q, k and v), that part is written and
    the rest stays. Each reason in `kept` names what the trainers send of that tensor.

    Args:
        live: The live model.
        twin: Its twin on the meta device.
        traced: Trace of the twin's loader, over the twin's storages.
        keep: Globs over live names.
        device: Where to allocate scratch.

    Raises:
        LayoutError: It lists every name whose live place does not follow from the twin's; or every live parameter that
            `keep` does not name and that has bytes that the loader does not write; or every recipe with a source that `keep`
            holds back elsewhere. A refit of half a model must fail.
    """
    sent, held = _sent(traced), _held_back(twin, traced, keep)
    if stale := sorted(held & sent.keys()):
        logger.warning(
            "xfer: keep= holds back %d tensors that the trainers send, such as %s: training does not change them",
            len(stale), stale[0],
        )  # fmt: skip
    traced = without_roots(traced, held)
    kept_by = {tensor: root for root in sorted(held) for tensor in sent.get(root, ())}
    if mixed := [
        f"{r.target}: computed from {t}, which keep= holds back from {kept_by[t]}; name both in keep=, or neither"
        for r in traced.recipes for t in r.sources if t in kept_by
    ]:  # fmt: skip
        raise LayoutError("keep= would leave this model with weights of two versions", mixed)
    places, violations = _places(live, twin, traced, keep)
    if violations:
        raise LayoutError("the live model does not lie in memory as its class lays it out when it is built", violations)
    # The trace may name a storage after another tensor in it than this module does.
    traced = _relocated(traced, {name: places[twin.slots[name].root] for name in _targets(traced)})
    scratch, scratch_fragments = _scratch(traced)
    footprint = {root: union(s.bytes() for s in slots) for root, slots in live.by_root.items()}
    done = _done(traced)
    untouched = {name: difference(whole, done.get(name, NONE)) for name, whole in footprint.items()}
    by_name = {
        slot.name: (tensors, root in held)
        for root, tensors in sent.items()
        if root in twin.slots
        for slot in twin.by_root[twin.slots[root].root]
    }
    kept, violations = _kept(live, twin, untouched, keep, by_name)
    violations += [
        f"{name}: the loader writes {size(outside)} bytes of this storage where no live parameter or buffer lies"
        for name, whole in footprint.items()
        if size(outside := difference(done.get(name, NONE), whole))
    ]
    if violations:
        raise LayoutError("a refit would leave parts of this model as they are", violations)
    return EngineLayout(
        roots=tuple(sorted((*live.roots, *scratch), key=lambda r: r.name)),
        tensors={**live.tensors, **{r.name: torch.empty(r.nbytes, dtype=torch.uint8, device=device) for r in scratch}},
        traced=replace(traced, fragments=traced.fragments + scratch_fragments),
        footprint=_spans(footprint),
        kept=kept,
        staged=_spans(_staged(traced.recipes)),
    )


def refuse_kept_in_vain(
    keep: Sequence[str], own: Iterable[str], twin: LiveStorages, traced: Traced, *, whole: bool
) -> None:
    """Refuse globs of `keep` that match checkpoint tensors but no tensor of the engine.

    Such a glob uses the checkpoint's names where the engine has others, for example because it fuses projections. It would
    keep nothing, and a refit would write those tensors. A glob that matches nothing is logged only: the first forward may
    make its tensor.

    Args:
        keep: The globs.
        own: The engine's names on this worker.
        twin: The twin.
        traced: Trace over the twin's storages.
        whole: Whether this worker has all names of the engine. Otherwise nothing is refused, since other pipeline stages
            have more names.

    Raises:
        LayoutError: It lists the globs.
    """
    own, bad = list(own), []
    for pattern in keep:
        if pattern.startswith(DRAFT) or any(_named(name, (pattern,)) for name in own):
            continue
        theirs = next((name for name in sorted((*traced.reads, *traced.unread)) if _named(name, (pattern,))), "")
        if theirs and whole:
            bad.append(
                f"{pattern}: the trainers send {theirs}, and no tensor of the engine is called so{_where(theirs, twin, traced)}"
            )
        else:
            logger.warning(
                "xfer: keep=%r names no tensor of this worker's model; one is %s", pattern, next(iter(own), "none")
            )
    if bad:
        raise LayoutError("keep= takes the engine's own names, as its model calls its parameters", bad)


def _where(tensor: str, twin: LiveStorages, traced: Traced) -> str:
    """The end of a sentence that names the engine's tensor with a checkpoint tensor, and other checkpoint tensors in it."""
    sent = _sent(traced)
    name = next((n for n in sorted(sent) if tensor in sent[n] and n in twin.slots), "")
    if not name:
        return ""
    if _unsent(twin, traced, {name})[name]:
        return f"; it lies in {name}, of which the trainers send a part, and what they send is written"
    others = sent[name] - {tensor}
    return f"; did you mean {name}?" + (f" It also holds {some(others)}" if others else "")


# ---- from the twin's storages to the live ones


def _places(
    live: LiveStorages, twin: LiveStorages, traced: Traced, keep: Sequence[str]
) -> tuple[dict[str, tuple[str, int]], list[str]]:
    """Map each storage of the twin that the loader writes to a live one.

    Every parameter of the twin, and every buffer in a storage that the loader writes, must be in the live model with the
    same shape, dtype and strides. Tensors that share such a storage in the twin must share one in the live model.

    Returns:
        Twin root -> (live root, bytes to add to offsets), and one line per violation.
    """
    targets = {twin.slots[name].root for name in _targets(traced) if name in twin.slots}
    places: dict[str, tuple[str, int]] = {}
    by: dict[str, str] = {}
    bad: list[str] = []
    for slot in twin.slots.values():
        loaded = slot.root in targets
        if not (loaded or slot.is_parameter) or (not loaded and _named(slot.name, keep)):
            continue
        alive = live.slots.get(slot.name)
        if alive is None:
            # Code after the load may have removed a parameter that the loader does not write. It has no bytes to check.
            if loaded:
                bad.append(f"{slot.name}: written by the loader, but not in the live model")
            continue
        if (alive.shape, alive.dtype, alive.strides) != (slot.shape, slot.dtype, slot.strides):
            why = EMPTIED if not prod(alive.shape) else "it was laid out anew after loading, and xfer does not know how"
            bad.append(f"{slot.name}: built as {slot.described()}, alive as {alive.described()}: {why}")
            continue
        if not loaded or not slot.root:
            continue
        place = (alive.root, alive.offset - slot.offset)
        if places.setdefault(slot.root, place) != place:
            bad.append(
                f"{slot.name}: shares a storage with {by[slot.root]} when built, but lies elsewhere in the live model "
                f"(byte {alive.offset} of {alive.root})"
            )
        by.setdefault(slot.root, slot.name)
    bad += [
        f"{name}: written by the loader, but neither parameter nor buffer"
        for name in sorted(_targets(traced) - set(twin.slots))
    ]
    return places, bad


def _targets(traced: Traced) -> set[str]:
    return {f.root for f in traced.fragments} | {f.root for f in traced.fills} | {r.target for r in traced.recipes}


def _relocated(traced: Traced, places: Mapping[str, tuple[str, int]]) -> Traced:
    def move(x: Fill) -> Fill:
        root, by = places[x.root]
        return replace(x, root=root, offset=x.offset + by)

    def moved(f: Fragment) -> Fragment:  # `replace` is too slow for tens of thousands of fragments
        root, by = places[f.root]
        return Fragment(f.tensor, f.origin, f.extent, root, f.offset + by, f.strides, f.dtype, f.steps)

    return replace(
        traced,
        # Two twin storages may be one live storage (a head that is tied after loading). Equal writes are then one write.
        fragments=tuple(dict.fromkeys(map(moved, traced.fragments))),
        fills=tuple(dict.fromkeys(map(move, traced.fills))),
        recipes=tuple(
            replace(r, target=places[r.target][0], offset=r.offset + places[r.target][1]) for r in traced.recipes
        ),
        casts=tuple(replace(c, root=places[c.root][0]) for c in traced.casts if c.root in places),
    )


# ---- two models, one layout


def renamed(traced: Traced, prefix: str) -> Traced:
    """Return the trace with `prefix` before the name of every root."""

    def named(x):
        return replace(x, root=prefix + x.root)

    return replace(
        traced,
        fragments=tuple(map(named, traced.fragments)),
        fills=tuple(map(named, traced.fills)),
        recipes=tuple(replace(r, target=prefix + r.target) for r in traced.recipes),
        casts=tuple(map(named, traced.casts)),
    )


def without_roots(traced: Traced, roots: Container[str]) -> Traced:
    """Return the trace without the writes to these storages. `reads` is unchanged."""

    def rest(items):
        return tuple(x for x in items if x.root not in roots)

    recipes = tuple(r for r in traced.recipes if r.target not in roots)
    return replace(
        traced, fragments=rest(traced.fragments), fills=rest(traced.fills), recipes=recipes, casts=rest(traced.casts)
    )


def joined(a: Traced, b: Traced) -> Traced:
    """Join the traces of two models with storages of their own. `unread` then lists the tensors that neither reads."""
    if not (b.specs or b.reads or b.unread):
        return a
    return Traced(
        specs=tuple(sorted({*a.specs, *b.specs})),
        fragments=a.fragments + b.fragments,
        fills=a.fills + b.fills,
        recipes=a.recipes + b.recipes,
        reads=tuple(sorted({*a.reads, *b.reads})),
        unread=tuple(sorted({*a.unread, *b.unread} - {*a.reads, *b.reads})),
        casts=a.casts + b.casts,
    )


# ---- loader arithmetic


def scratch_name(tensor: str) -> str:
    return SCRATCH + tensor


def _scratch(traced: Traced) -> tuple[tuple[Root, ...], tuple[Fragment, ...]]:
    """One storage in scratch per checkpoint tensor that a recipe reads, and the fragment that writes it there whole."""
    specs: dict[str, TensorSpec] = {s.name: s for s in traced.specs}
    roots, fragments = [], []
    for name in sorted({n for r in traced.recipes for n in r.sources}):
        spec = specs[name]
        item = ITEMSIZE[spec.dtype]
        strides = tuple(s * item if n > 1 else 0 for s, n in zip(row_major(spec.shape), spec.shape, strict=True))
        roots.append(Root(scratch_name(name), prod(spec.shape) * item))
        origin = (0,) * len(spec.shape)
        fragments.append(Fragment(name, origin, spec.shape, scratch_name(name), 0, strides, spec.dtype))
    return tuple(roots), tuple(fragments)


def _staged(recipes: Iterable[Recipe]) -> dict[str, Ranges]:
    regions: dict[str, list] = {}
    for r in recipes:
        regions.setdefault(r.target, []).append((r.offset, r.shape, r.strides, ITEMSIZE[r.dtype]))
    return {name: covered(parts, name) for name, parts in regions.items()}


def run_recipes(layout: EngineLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Run the loader's own arithmetic from scratch into the live storages, after the transfer.

    Args:
        layout: The layout with the recipes.
        tensors: The binding table: root name -> flat uint8 tensor.
    """
    if not layout.traced.recipes:
        return
    specs = {s.name: s for s in layout.traced.specs}

    def source(name: str) -> torch.Tensor:
        return tensors[scratch_name(name)].view(getattr(torch, specs[name].dtype)).view(specs[name].shape)

    for recipe in layout.traced.recipes:
        recipe.apply(source, tensors)


# ---- bytes that stay


def _sent(traced: Traced) -> dict[str, set[str]]:
    """Root -> the checkpoint tensors that are written to it."""
    out: dict[str, set[str]] = {}
    for f in traced.fragments:
        out.setdefault(f.root, set()).add(f.tensor)
    for r in traced.recipes:
        out.setdefault(r.target, set()).update(r.sources)
    return out


def _done(traced: Traced) -> dict[str, Ranges]:
    """Root -> the bytes that fragments, fills and recipes write."""
    touched, staged = written(traced.fragments, traced.fills), _staged(traced.recipes)
    return {name: union([touched.get(name, NONE), staged.get(name, NONE)]) for name in touched.keys() | staged.keys()}


def _unsent(twin: LiveStorages, traced: Traced, roots: set[str]) -> dict[str, int]:
    """Number of bytes of each of these roots of `traced` that a refit would not write."""
    done = _done(without_roots(traced, _targets(traced) - roots))
    whole = {name: union(s.bytes() for s in twin.by_root[twin.slots[name].root]) for name in roots}
    return {name: size(difference(whole[name], done.get(name, NONE))) for name in roots}


def _held_back(twin: LiveStorages, traced: Traced, keep: Sequence[str]) -> set[str]:
    """Roots of `traced` that a refit must not write.

    A root is written if one of its names is not kept (the embedding that a kept drafter shares with the model), or if the
    trainers send only a part of it.
    """
    asked = {
        name
        for name in _targets(traced) & twin.slots.keys()
        if all(_named(s.name, keep) for s in twin.by_root[twin.slots[name].root])
    }
    unsent, sent = _unsent(twin, traced, asked), _sent(traced)
    return {name for name in asked if not unsent[name] or name not in sent}


def _kept(
    live: LiveStorages,
    twin: LiveStorages,
    untouched: Mapping[str, Ranges],
    keep: Sequence[str],
    sent: Mapping[str, tuple[set[str], bool]],
) -> tuple[tuple[Kept, ...], list[str]]:
    """The bytes that stay, with reasons, and one line per name whose bytes must not stay.

    A byte stays if `keep` names a tensor that covers it, or if only buffers cover it that the class itself makes: these
    hold no checkpoint values (rotary tables, attention scales). A buffer that only the live model has was computed after
    loading, perhaps from weights, and would become stale unnoticed.

    `sent`: live name -> the checkpoint tensors that are written to its storage, and whether `keep` holds them back.
    """
    kept: list[Kept] = []
    bad: dict[str, str] = {}
    for root, left in untouched.items():
        if not size(left):
            continue
        owners = [(s, o) for s in live.by_root[root] if size(o := common(s.bytes(), left))]
        asked = [(s, o, _named(s.name, keep)) for s, o in owners]
        by_caller = union([o for _, o, pattern in asked if pattern])
        for slot, own, pattern in asked:
            tensors, held = sent.get(slot.name, (set(), False))
            if pattern:
                but = f", {'though the trainers send' if held else 'all but'} {some(tensors)}" if tensors else ""
                kept += [Kept(root, a, b, f"{slot.name}{but}: kept by request ({pattern})") for a, b in pairs(own)]
                continue
            rest = difference(own, by_caller)
            if not size(rest):
                continue
            problem = _why_not_kept(slot, twin, size(rest), size(slot.bytes()), tensors)
            if problem:
                bad[slot.name] = problem
            else:
                kept += [
                    Kept(root, a, b, f"{slot.name}: a buffer that no checkpoint tensor fills") for a, b in pairs(rest)
                ]
    return _disjoint(kept), list(bad.values())


def _why_not_kept(slot: LiveSlot, twin: LiveStorages, missing: int, whole: int, sent: set[str]) -> str:
    if slot.name not in twin.slots:
        return (
            f"{slot.name}: made after loading, in a storage of its own, and not redone after a refit; "
            f"name it in keep= only if it does not depend on weights"
        )
    if not slot.is_parameter:
        return ""
    untold = f"{slot.name}: {missing} of its {whole} bytes are written by no tensor of the trainers' checkpoint"
    if sent and missing < whole:
        return f"{untold}, the others by {some(sent)}; send what is missing ({GUIDE} says what else can be done)"
    return f"{untold}; send them, or name it in keep= if it is frozen"


def some(names: Iterable[str], most: int = 3) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _disjoint(kept: list[Kept]) -> tuple[Kept, ...]:
    """Keep one reason per byte, that of the first name in the order of storage and byte."""
    out: list[Kept] = []
    seen: dict[str, Ranges] = {}
    for k in sorted(kept, key=lambda k: (k.root, k.start, k.stop, k.reason)):
        new = difference((np.array([k.start]), np.array([k.stop])), seen.get(k.root, NONE))
        out += [replace(k, start=a, stop=b) for a, b in pairs(new)]
        seen[k.root] = union([seen.get(k.root, NONE), new])
    return tuple(out)


def _named(name: str, patterns: Sequence[str]) -> str:
    return next((p for p in patterns if fnmatchcase(name, p)), "")


def _spans(by_root: Mapping[str, Ranges]) -> tuple[Span, ...]:
    return tuple(Span(root, a, b) for root in sorted(by_root) for a, b in pairs(by_root[root]))
