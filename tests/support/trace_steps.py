"""Small steps of random loaders and exports: each moves or computes one tensor, and looks at shapes only, so that a run on
meta tensors and one on real tensors make the same choices.
"""

import torch

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, of which the most negative is a float's sign."""
    return x.view(INTEGERS[x.element_size()])


def sign(x: torch.Tensor) -> int:
    return torch.iinfo(bits(x).dtype).min


def shorten(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)[:200] if x.numel() > 200 else x


def along(x: torch.Tensor, d: int, index) -> torch.Tensor:
    return x[(slice(None),) * d + (index,)]


def narrow(x, d, i, j):
    size = 1 + j % x.shape[d]
    return x.narrow(d, i % (x.shape[d] - size + 1), size)


def reshape(x, d, i, j):
    divisors = [k for k in range(1, x.numel() + 1) if x.numel() % k == 0]
    return x.reshape(divisors[j % len(divisors)], -1)


def swap(x, d, i, j):
    parts = x.chunk(2, d)
    return torch.cat([parts[-1], parts[0]], d)


def scratch(x, d, i, j):
    """Only a part is written, the rest is zero."""
    s, n = torch.zeros_like(x), x.shape[d] - j % x.shape[d]
    s.narrow(d, j % x.shape[d], n).copy_(x.narrow(d, 0, n))
    return s


def put(x, d, i, j):
    s, n = x.clone(), x.shape[d]
    s[(slice(None),) * d + (torch.tensor([j % n]),)] = x.narrow(d, i % n, 1)
    return s


def copyin(x, d, i, j):
    s = torch.empty(x.numel() + 3, dtype=x.dtype, device=x.device)
    s.fill_(float(j % 5))
    s[i % 3 : i % 3 + x.numel()].view(x.shape).copy_(x)
    return s


def rows(x, d, i, j):
    n = x.shape[d]
    s = torch.empty(n, *x.movedim(d, 0).shape[1:], dtype=x.dtype, device=x.device)
    for k in range(n):
        s[k] = x.select(d, n - 1 - k if i % 2 else k)
    return s


def bitfill(x, d, i, j):
    """A small integer's bits are no number of that size."""
    s = bits(x).clone()
    s.narrow(d, j % x.shape[d], 1).fill_(i)
    return s.view(x.dtype)


def in_place(x, d, j, change) -> torch.Tensor:
    """A copy, of which a part along `d` is changed."""
    s = x.clone()
    change(s, d, j % x.shape[d], x.shape[d] - j % x.shape[d])
    return s


def dense(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def turned(x, d, i, j):
    """In place, but no element moves; sometimes on the tensor that was given."""
    return (x.clone() if i % 2 else x[...]).transpose_(d, -1).unsqueeze_(j % 2).squeeze_(j % 2)


def grown(x, d, i, j):
    """In place, sometimes on the tensor that was given; what is new is not read."""
    return (dense(x) if i % 2 or not x.is_contiguous() else x[...]).resize_(x.numel() + 1 + j % 3)[: x.numel()]


def anew(x, d, i, j):
    """Another tensor over the storage, sometimes that of the tensor that was given."""
    of = dense(x) if i % 2 or not x.is_contiguous() else x
    at = j % x.numel()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        of.untyped_storage(), of.storage_offset() + at, (x.numel() - at,), (1,)
    )


# Each takes a tensor, one of its dims and two numbers.
MOVES = {
    "permute": lambda x, d, i, j: x.permute(*range(d, x.dim()), *range(d)),
    "narrow": narrow,
    "contiguous": lambda x, d, i, j: x.contiguous(),
    "clone": lambda x, d, i, j: x.clone(),
    "swap": swap,
    "flatten": lambda x, d, i, j: x.flatten(0, 1) if x.dim() > 1 else x.unsqueeze(i % 2),
    "reshape": reshape,
    "stack": lambda x, d, i, j: torch.stack([x, x.clone()], j % (x.dim() + 1)),
    "scratch": scratch,
    "pad": lambda x, d, i, j: torch.nn.functional.pad(x, (i % 3, j % 3), value=float(j % 4)),
    "gather": lambda x, d, i, j: x.index_select(d, torch.arange(x.shape[d]).roll(j % x.shape[d])),
    "select": lambda x, d, i, j: along(
        x, d, torch.tensor([(i + k * (1 + j % 3)) % x.shape[d] for k in range(1 + i % x.shape[d])])
    ),
    "mask": lambda x, d, i, j: along(x, d, (torch.arange(x.shape[d]) % (1 + j % 3) == 0).nonzero()[:, 0]),
    "step": lambda x, d, i, j: along(x, d, slice(j % x.shape[d], None, 1 + i % 3)),
    "expand": lambda x, d, i, j: x.unsqueeze(0).expand(1 + j % 3, *x.shape),
    "repeat": lambda x, d, i, j: x.repeat(*(1 + j % 2 if k == d else 1 for k in range(x.dim()))),
    "flip": lambda x, d, i, j: x.flip(d - x.dim() * (j % 2)),
    "itself": lambda x, d, i, j: in_place(x, d, j, lambda s, *part: s.narrow(*part).copy_(s.narrow(*part))),
    "put": put,
    "copyin": copyin,
    "fill": lambda x, d, i, j: in_place(x, d, j, lambda s, d, at, n: s.narrow(d, at, 1).fill_(2.0)),
    "joined": lambda x, d, i, j: torch.cat([x.reshape(-1), x.reshape(-1)[: 1 + j % x.numel()]]),
    "rows": rows,
    "cast": lambda x, d, i, j: x.to([torch.float32, torch.bfloat16, torch.float64][j % 3]),
    "bitview": lambda x, d, i, j: bits(x).clone().view(x.dtype),
    "bitfill": bitfill,
    "turned": turned,
    "restrided": lambda x, d, i, j: dense(x).as_strided_((x.numel() - j % x.numel(),), (1,), j % x.numel()),
    "grown": grown,
    "anew": anew,
    "from the end": lambda x, d, i, j: along(x, d, torch.tensor([-1 - j % x.shape[d], i % x.shape[d]])),
    "resized": lambda x, d, i, j: dense(x).resize_(1 + j % x.numel()),
}
COMPUTES = {
    "scale": lambda x, d, i, j: x * 0.5,
    "add": lambda x, d, i, j: x + x.flip(d),
    "inplace": lambda x, d, i, j: in_place(x, d, j, lambda s, *part: s.narrow(*part).mul_(0.25)),
    "negative": lambda x, d, i, j: -x,
    "bitflip": lambda x, d, i, j: (bits(x) ^ sign(x)).view(x.dtype),
    "bitflip_": lambda x, d, i, j: in_place(x, d, j, lambda s, *part: bits(s).narrow(*part).bitwise_xor_(sign(x))),
}


_STEPS = MOVES | COMPUTES


def move(op: str, i: int, j: int, x: torch.Tensor) -> torch.Tensor:
    return _STEPS[op](x, i % x.dim(), i, j)
