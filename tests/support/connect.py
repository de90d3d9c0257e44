"""`xfer.connect` for tests whose options are one flat dict: those of a route among the others."""

from __future__ import annotations

from dataclasses import fields

import xfer


def flat_connect(*, route: str = "direct", **options) -> xfer.Session:
    """`cache_dir` is None unless it is given."""
    kind = {"direct": xfer.Direct, "packed": xfer.Packed}[route]
    names = {f.name for f in fields(kind)} & options.keys()
    of_route = {name: options.pop(name) for name in names}
    if route == "direct":
        of_route.setdefault("cache_dir", None)
    else:
        options.pop("cache_dir", None)
    return xfer.connect(route=kind(**of_route), **options)
