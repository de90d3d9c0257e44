"""How the parameters of one bucket lie in memory: one contiguous run of bytes per owner, so that what travels is just what
somebody owns, in the order it lies, and lands where it is used.

`settle_in` moves parameters into such runs (`home`); what cannot be moved goes through a run that is filled and emptied by
copies (`staged`). Nothing here communicates; see gather.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from xfer.errors import RebindError
from xfer.kernels.bits import copy_bits

NAN_BYTE = 0xFF
"""In every byte of a bf16, fp16, fp32 or fp64 number it makes a NaN."""
ALIGN = 64
"""Parameters begin at multiples of this many bytes: kernels take aligned addresses only, or are slower without. At most 63 bytes
per parameter travel for nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A parameter, under its canonical name, and where it lies in its share's run: `offset` in bytes. dtype: with which it settled in."""

    name: str
    param: torch.nn.Parameter
    offset: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.param.numel() * self.param.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank owns of one bucket, in one run of `nbytes`.

    owner: rank within the bucket's group. home: flat uint8, the memory of the parameters themselves; None where they lie
    elsewhere and are copied.
    """

    owner: int
    members: tuple[Member, ...]
    nbytes: int
    device: torch.device
    home: torch.Tensor | None

    def staging(self, fill: bool) -> torch.Tensor:
        """A run to send from (`fill`: with the parameters' present bytes) or to receive into, for parameters without a
        home."""
        run = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if fill:
            copy_bits([_view(run, m) for m in self.members], [m.param.detach() for m in self.members])
        return run

    def unpack(self, run: torch.Tensor) -> None:
        """Copy a received run into the parameters: one kernel per dtype where torch has one."""
        copy_bits([m.param.detach() for m in self.members], [_view(run, m) for m in self.members])

    def outdate(self) -> None:
        """The parameters are about to be others: the backward of a forward that read these raises, as after any optimizer's write.
        What arrives in a home autograd does not see."""
        for m in self.members:
            torch.autograd.graph.increment_version(m.param)

    def blank(self) -> None:
        """NaNs over the parameters' values."""
        if self.home is not None:
            self.home.fill_(NAN_BYTE)
            return
        for m in self.members:
            m.param.detach().fill_(float("nan"))

    def astray(self) -> list[str]:
        """Names of parameters that no longer lie in their home, or as other bytes: somebody replaced their memory."""
        cast = [m.name for m in self.members if m.param.dtype != m.dtype or m.param.device != self.device]
        if self.home is None or cast:
            return cast
        base = self.home.data_ptr()
        return [m.name for m in self.members if m.param.numel() and m.param.data_ptr() != base + m.offset]


def settle_in(
    owned: Mapping[int, Sequence[tuple[str, torch.nn.Parameter]]], *, move: bool, fixed: frozenset[int]
) -> list[Share]:
    """Shares of one bucket, by owner: for each at most one with a home per device and one without.

    move: give parameters a home, by making their memory part of a run; their objects, shapes and values stay. fixed: ids of
    parameters whose memory others know and that therefore stay where they are. Parameters whose strides are not those of
    a contiguous tensor stay too.
    """
    out = []
    for owner, members in sorted(owned.items()):
        kinds: dict[tuple[torch.device, bool], list[tuple[str, torch.nn.Parameter]]] = {}
        for name, p in members:
            kinds.setdefault((p.device, movable(p, move, fixed)), []).append((name, p))
        for (device, moved), those in sorted(kinds.items(), key=lambda x: (str(x[0][0]), not x[0][1])):
            laid, end = [], 0
            for name, p in those:
                start = -(-end // ALIGN) * ALIGN
                laid.append(Member(name, p, start, p.dtype))
                end = start + laid[-1].nbytes
            home = _move(laid, end, device) if moved else None
            out.append(Share(owner, tuple(laid), end, device, home))
    return out


def movable(p: torch.nn.Parameter, move: bool, fixed: frozenset[int]) -> bool:
    """Whether `settle_in` gives this parameter a home. Has to be the same on all ranks: runs with a home travel apart from others."""
    return move and id(p) not in fixed and p.is_contiguous()


def known_elsewhere(trees: Iterable[torch.nn.Module], params: Iterable[torch.nn.Parameter]) -> frozenset[int]:
    """Ids of parameters whose memory a buffer or an attribute of some module looks into as well: a tensor, or one in a list or dict."""
    params = list(params)
    inside = Counter(p.untyped_storage()._cdata for p in params)
    shared, own = {storage for storage, n in inside.items() if n > 1}, {id(p) for p in params}
    for tree in trees:
        for module in tree.modules():
            held = [v for k, v in vars(module).items() if k not in ("_parameters", "_modules")]
            others = (t for t in _tensors_in(held) if id(t) not in own and t.layout == torch.strided)
            shared |= {t.untyped_storage()._cdata for t in others if t.device.type != "meta"}
    return frozenset(id(p) for p in params if p.untyped_storage()._cdata in shared)


def _tensors_in(held: list) -> Iterator[torch.Tensor]:
    """Also those of lists and dicts within, which may hold each other."""
    left, seen = list(held), set()
    while left:
        x = left.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple | set | Mapping) and id(x) not in seen:
            seen.add(id(x))
            left += x.values() if isinstance(x, Mapping) else x


def overlapping(params: Sequence[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """Violations: different parameters over the same bytes. (One parameter under several names is fine.)"""
    spans = []
    for name, p in params:
        if p.numel():
            reach = sum((n - 1) * s for n, s in zip(p.shape, p.stride())) + 1
            at = (str(p.device), p.untyped_storage().data_ptr(), p.data_ptr())
            spans.append((*at, p.data_ptr() + reach * p.element_size(), name))
    spans.sort()
    return [
        f"{b[4]}: shares memory with {a[4]}, as another Parameter; tie them by using one Parameter object in both places"
        for a, b in zip(spans, spans[1:])
        if a[:2] == b[:2] and b[2] < a[3]
    ]


def refuse_astray(shares: Iterable[Share], who: str) -> None:
    """RebindError for parameters whose memory was replaced (`model.to(…)`, `param.data = …`) since they settled in: what is
    gathered would not reach them."""
    bad = [name for s in shares for name in s.astray()]
    if bad:
        raise RebindError(
            f"{who}: parameters were given other memory after the layer-wise optimizer was built",
            [
                f"{name}: change values in place, or build the optimizer after moving or casting the model"
                for name in bad
            ],
        )


def _move(laid: Sequence[Member], nbytes: int, device: torch.device) -> torch.Tensor:
    home = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for m in laid:
        view = _view(home, m)
        view.copy_(m.param.detach())
        m.param.data = view
    return home


def _view(run: torch.Tensor, m: Member) -> torch.Tensor:
    """The member's part of a run, with the parameter's dtype and shape."""
    return run[m.offset : m.offset + m.nbytes].view(m.param.dtype).view(m.param.shape)
