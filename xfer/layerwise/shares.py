"""The layout of a bucket's parameters in memory: one contiguous run of bytes per owner, which is sent and received as it lies.

`settle_in` moves parameters into such runs (`home`). Parameters that cannot be moved are copied into and out of a temporary run
(`staging`). Nothing here communicates; see gather.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from xfer.errors import RebindError
from xfer.kernels.bits import copy_bits

NAN_BYTE = 0xFF
"""A bf16, fp16, fp32 or fp64 number of such bytes is a NaN."""
ALIGN = 64
"""Parameters begin at multiples of this many bytes, because some kernels need aligned addresses and others are faster with them. At
most 63 bytes of padding per parameter travel."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A parameter with its name and its `offset` in the share's run, in bytes. dtype: its dtype at `settle_in`."""

    name: str
    param: torch.nn.Parameter
    offset: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.param.numel() * self.param.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The parameters of one bucket and one owner, in one run of `nbytes`.

    owner: rank within the bucket's group. home: flat uint8, the memory of the parameters themselves; None if they lie
    elsewhere and are copied.
    """

    owner: int
    members: tuple[Member, ...]
    nbytes: int
    device: torch.device
    home: torch.Tensor | None

    def staging(self, fill: bool) -> torch.Tensor:
        """A new run to send from or to receive into, if `home` is None. fill: copy the parameters' bytes into it."""
        run = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if fill:
            copy_bits([_view(run, m) for m in self.members], [m.param.detach() for m in self.members])
        return run

    def unpack(self, run: torch.Tensor) -> None:
        """Copy a received run into the parameters: one kernel per dtype where torch has one."""
        copy_bits([m.param.detach() for m in self.members], [_view(run, m) for m in self.members])

    def outdate(self) -> None:
        """Tells autograd that the parameters change, since it does not see bytes that arrive in a home. The backward of a forward that read
        the old ones then raises, as after a write of any optimizer."""
        for m in self.members:
            torch.autograd.graph.increment_version(m.param)

    def blank(self) -> None:
        """Overwrites the parameters by NaNs."""
        if self.home is not None:
            self.home.fill_(NAN_BYTE)
            return
        for m in self.members:
            m.param.detach().fill_(float("nan"))

    def astray(self) -> list[str]:
        """Names of parameters whose memory, dtype or device was replaced since `settle_in`."""
        cast = [m.name for m in self.members if m.param.dtype != m.dtype or m.param.device != self.device]
        if self.home is None or cast:
            return cast
        base = self.home.data_ptr()
        return [m.name for m in self.members if m.param.numel() and m.param.data_ptr() != base + m.offset]


def settle_in(
    owned: Mapping[int, Sequence[tuple[str, torch.nn.Parameter]]], *, move: bool, fixed: frozenset[int]
) -> list[Share]:
    """The shares of one bucket: for each owner and device at most one with a `home` and one without.

    Args:
        owned: owner -> (name, parameter).
        move: Give parameters a home, by making their memory part of a run. Objects, shapes and values stay. Parameters that are
            not contiguous are not moved.
        fixed: Ids of parameters that are not moved, because other tensors use their memory.
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
    """Whether `settle_in` gives this parameter a home. Must be equal on all ranks: runs with and without a home travel apart."""
    return move and id(p) not in fixed and p.is_contiguous()


def known_elsewhere(trees: Iterable[torch.nn.Module], params: Iterable[torch.nn.Parameter]) -> frozenset[int]:
    """Ids of parameters that share memory with a buffer or an attribute of some module: a tensor, or a tensor in a list or dict."""
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
    """All tensors in `held`, also in nested lists and dicts, which may contain each other."""
    left, seen = list(held), set()
    while left:
        x = left.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple | set | Mapping) and id(x) not in seen:
            seen.add(id(x))
            left += x.values() if isinstance(x, Mapping) else x


def overlapping(params: Sequence[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """One line for each pair of parameters that share bytes. (One parameter under several names is fine.)"""
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
    """Raises RebindError for parameters whose memory was replaced since `settle_in` (`model.to(…)`, `param.data = …`). Gathers would not
    reach them."""
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
