"""A live engine model compared with its traced twin: what a refit writes, byte for byte, and what it leaves alone.

The twin is the same model class on the meta device, in the same parallel groups, whose own loader has been traced: it
tells where each canonical element goes *in the twin*. Here that is carried over to the live storages, and every byte of
the live model gets one class: written, filled, staged (computed by the loader), or kept. Aliases need no class of their
own: names that share a storage share its bytes. What has no class is an error that lists every name. Plain torch;
vLLM's side is vllm_layout.py.
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
from xfer.plan.inventory import SCRATCH, Kept
from xfer.plan.program import ITEMSIZE
from xfer.trace.fragment import Fill, Fragment, Root, Span, TensorSpec
from xfer.trace.traced import Recipe, Traced

logger = logging.getLogger("xfer")
EMPTIED = "the live tensor is empty: its bytes were packed elsewhere after loading. On CPU set XFER_CPU_RESIDENT=1"
GUIDE = "docs/guide.md, 'Weights that refits leave alone',"


@dataclass(frozen=True, eq=False)
class EngineLayout:
    """What one worker's model offers to a refit. Nothing in it changes; storages that move make new `tensors`
    elsewhere.

    roots      the live storages, and one "scratch/<name>" per checkpoint tensor that the loader computes with; by name
    tensors    root name -> flat uint8 tensor over the whole storage
    traced     fragments, fills and recipes over these roots
    footprint  every byte of every live parameter and buffer, disjoint, by root
    kept       bytes that no refit touches, and why
    staged     bytes that recipes write
    aliases    (name, storage's name) of live tensors that lie in a storage called after another tensor
    """

    roots: tuple[Root, ...]
    tensors: Mapping[str, torch.Tensor]
    traced: Traced
    footprint: tuple[Span, ...]
    kept: tuple[Kept, ...]
    staged: tuple[Span, ...]
    aliases: tuple[tuple[str, str], ...]

    def bytes_of(self, spans: Iterable[Span | Kept]) -> int:
        return sum(s.stop - s.start for s in spans)


def read_layout(
    live: LiveStorages, twin: LiveStorages, traced: Traced, *, keep: Sequence[str] = (), device: torch.device
) -> EngineLayout:
    """`traced`: over the twin's storages. `keep`: globs over live names.

    A storage in which every name is kept stays as it is where the trainers send nothing of it or all of it: a tower is
    not written even if they have one. Where they send a part (q of a fused q, k and v), that part is written and only
    the rest stays. Each reason in `kept` names what the trainers send of that tensor.

    Raises one LayoutError with every name whose live place cannot be told from the twin's, and every live parameter
    byte that the loader leaves untouched and nobody asked to keep: a model refitted by half must be impossible to
    report as done.
    """
    sent, held = _sent(traced), _held_back(twin, traced, keep)
    if stale := sorted(held & sent.keys()):
        logger.warning(
            "xfer: keep= holds back %d tensors that the trainers send, such as %s: training does not change them",
            len(stale), stale[0],
        )  # fmt: skip
    traced = without_roots(traced, held)
    places, violations = _places(live, twin, traced, keep)
    if violations:
        raise LayoutError("the live model does not lie in memory as its class lays it out when it is built", violations)
    # A trace names a storage after some tensor in it, which need not be the one that this module names it after.
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
        aliases=tuple((s.name, s.root) for s in live.slots.values() if s.root not in ("", s.name)),
    )


def refuse_kept_in_vain(
    keep: Sequence[str], own: Iterable[str], twin: LiveStorages, traced: Traced, *, whole: bool
) -> None:
    """LayoutError for globs of `keep` that name tensors which the trainers send, and none of the engine's `own`: written in the
    checkpoint's names, where the engine has others (it fuses projections), they keep nothing, and those tensors would be
    written. One that names nothing at all is told in the log: what it names may be made by the first forward.

    `traced`: over the twin's storages. `whole`: this worker's names are all that the engine has; without it nothing is refused,
    since other pipeline stages have more.
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
    """Where a checkpoint tensor lies in the engine, and what else lies there, as the end of a sentence."""
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
    """Twin root -> (live root, bytes to add to offsets there), and what stands against it.

    Every parameter of the twin must be there alive with shape, dtype and strides, and so must every buffer in a storage
    that the loader writes; what lies together in a twin storage that the loader writes must lie together alive.
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
            # A parameter that the loader does not write and that post-load code removed has no bytes to be wrong.
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

    def moved(f: Fragment) -> Fragment:  # `replace` would be most of what this takes: there are tens of thousands
        root, by = places[f.root]
        return Fragment(f.tensor, f.origin, f.extent, root, f.offset + by, f.strides, f.dtype, f.steps)

    return replace(
        traced,
        # Twin storages may be one live storage (a head tied again after loading): equal writes are one write.
        fragments=tuple(dict.fromkeys(map(moved, traced.fragments))),
        fills=tuple(dict.fromkeys(map(move, traced.fills))),
        recipes=tuple(
            replace(r, target=places[r.target][0], offset=r.offset + places[r.target][1]) for r in traced.recipes
        ),
        casts=tuple(replace(c, root=places[c.root][0]) for c in traced.casts if c.root in places),
    )


# ---- two models, one layout


def renamed(traced: Traced, prefix: str) -> Traced:
    """The same with `prefix` before every root's name."""

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
    """Without what is written to these storages; what was read stays read."""

    def rest(items):
        return tuple(x for x in items if x.root not in roots)

    recipes = tuple(r for r in traced.recipes if r.target not in roots)
    return replace(
        traced, fragments=rest(traced.fragments), fills=rest(traced.fills), recipes=recipes, casts=rest(traced.casts)
    )


def joined(a: Traced, b: Traced) -> Traced:
    """Of two models that load the same checkpoint tensors into storages of their own. `unread`: by neither."""
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
    """A whole checkpoint tensor in scratch for each one that a recipe reads, and the fragment that brings it there."""
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
    """The loader's own arithmetic, from scratch into `tensors` (root name -> flat uint8), after the wire."""
    if not layout.traced.recipes:
        return
    specs = {s.name: s for s in layout.traced.specs}

    def source(name: str) -> torch.Tensor:
        return tensors[scratch_name(name)].view(getattr(torch, specs[name].dtype)).view(specs[name].shape)

    for recipe in layout.traced.recipes:
        recipe.apply(source, tensors)


# ---- what stays


def _sent(traced: Traced) -> dict[str, set[str]]:
    """Root -> the checkpoint tensors that reach it."""
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
    """How many bytes of these roots of `traced` a refit would not write."""
    done = _done(without_roots(traced, _targets(traced) - roots))
    whole = {name: union(s.bytes() for s in twin.by_root[twin.slots[name].root]) for name in roots}
    return {name: size(difference(whole[name], done.get(name, NONE))) for name in roots}


def _held_back(twin: LiveStorages, traced: Traced, keep: Sequence[str]) -> set[str]:
    """Roots of `traced` of which nothing is to be written. One that also has a name which is not kept (the embedding that a
    kept drafter shares with the model) is written for that name's sake, and one of which the trainers send a part is
    written for that part's."""
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
    """Bytes that stay, with reasons, and the names whose bytes may not.

    A byte stays when a name that covers it was given by the caller, or when only buffers that the class itself makes
    cover it: those hold no checkpoint values (rotary tables, attention scales). A buffer that only the live model has
    was computed after loading, perhaps from weights, and would go stale unseen.

    `sent`: live name -> the checkpoint tensors that reach its storage, and whether they are held back all the same.
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
    """One reason per byte: the first name in the order of storage and byte."""
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
