"""Draws a plan's report as one HTML file: timeline, links, traffic, bytes. It needs no script and no network.

A bar is an element whose place in its track is given in percent; its tip is its title. All text from outside goes through `esc`. The
page's content policy forbids scripts and fetches, so a missed escape does no harm either.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import floor, log10

from xfer.cli.plan_report import Matrix, Report, byte_rows
from xfer.plan.explain import size

STEPS_DRAWN = 300
"""Waves drawn one by one; beyond, runs of them."""
BINS = 160
CELLS = 128
"""Most cells of a strip of links."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5b6470;--line:#d5dae0;--card:#f5f7f9;--ink:#2458c5;--hot:#b4420f;--cell:#e9edf1}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e4e8ec;--dim:#9aa4b0;--line:#343b44;--card:#1c2127;--ink:#7ba6ff;--hot:#ff9a62;--cell:#232a32}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:14px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 40px 60px}
h1{font-size:23px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 4px}
p{margin:2px 0 10px;color:var(--dim);overflow-wrap:anywhere;max-width:100ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(152px,1fr));gap:12px;margin:18px 0 4px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px;font-weight:600;overflow-wrap:anywhere}
.tile span{color:var(--dim);font-size:12.5px}
.wide{overflow-x:auto}
.chart{position:relative;min-width:820px;padding-bottom:36px;font-size:11px}
.row{display:flex;gap:10px;margin:4px 0;align-items:center}
.row b{flex:0 0 210px;text-align:right;font-weight:400}
.row em{flex:0 0 250px;font-style:normal;color:var(--dim)}
.track{flex:1;position:relative}
i{position:absolute;min-width:1px;background:var(--ink)}
.over{position:absolute;top:0;bottom:36px;left:0;right:0;margin:0;align-items:stretch}
.over u{position:absolute;top:0;bottom:0;border-left:1px solid var(--line)}
.over u.f{border-left:1.5px dashed var(--hot);color:var(--hot)}
u{text-decoration:none;white-space:nowrap}
u span{position:absolute;top:100%;transform:translateX(-50%);color:var(--dim)}
u.f span{color:inherit;top:calc(100% + 14px)}
.m{font-size:11px}.m td{width:var(--c);height:var(--c);padding:0;border:1px solid var(--bg);background:var(--ink)}
.m th{padding:0 8px 0 0;border:0;text-align:right;white-space:nowrap;color:inherit;font-weight:400}
.m tr:first-child th{padding:0 0 6px;vertical-align:bottom}
.m span{display:inline-block;writing-mode:vertical-rl;transform:rotate(180deg)}
.scale{display:inline-block;width:190px;height:12px;margin:0 6px;background:linear-gradient(90deg,var(--cell),var(--ink))}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:4px 18px 4px 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
th{font-weight:600;color:var(--dim)} td.n{text-align:right;white-space:nowrap}
"""


def page(r: Report) -> str:
    """The whole file."""
    h = r.header
    less = f"{r.broadcast_bytes / r.nbytes:.1f} times less than a full broadcast" if r.nbytes else "nothing to move"
    notes = "".join(f"<p>{esc(n)}</p>" for n in h.notes)
    tiles = [
        (seconds(r.transfer_s), "predicted, all ready to decided"),
        (seconds(r.floor_s), "floor: the busiest link alone"),
        (size(r.nbytes), f"moved in all; {less}"),
        (size(max(r.bytes_per_replica)), f"for a replica; {r.replicas} of {r.workers} workers"),
        (size(r.model_bytes), f"the model, {r.tensors:,} tensors"),
        (f"{r.messages:,}", f"messages in {r.waves:,} waves"),
    ]
    shown = "".join(f'<div class="tile"><b>{esc(a)}</b><span>{esc(b)}</span></div>' for a, b in tiles)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Refit plan: {esc(h.model)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{esc(h.model)}</h1>"
        f"<p>{r.trainers} trainers ({esc(h.trainer)}) to {r.replicas} x {r.workers} engine workers ({esc(h.engine)}) "
        f"on {r.hosts} hosts. Fabric: {esc(h.fabric)}.</p>{notes}"
        f'<div class="tiles">{shown}</div>'
        "<h2>Timeline</h2><p>Predicted: when each part of a refit begins and ends. Waves are rounds of messages; a rank "
        "begins one when it is done with the one before. Hover for numbers.</p>"
        f"{_timeline(r)}"
        "<h2>Links</h2><p>The busiest links of the fabric, by the time that their bytes need at full rate. The dashed "
        "line is the predicted time of the whole refit.</p>"
        f"{_bars(r)}"
        "<p>All links of each kind, in the order of the hosts; the stronger the colour, the longer busy.</p>"
        f"{_strips(r)}"
        f"<h2>Traffic</h2><p>Bytes from each {esc(r.matrix.unit)} of trainers (rows) to each of workers (columns).</p>"
        f"{_matrix(r.matrix)}"
        f"<h2>Bytes</h2>{_bytes(r)}"
        "</main></body></html>\n"
    )


def esc(text: object) -> str:
    return escape("".join(c if c.isprintable() else " " for c in str(text)), quote=True)


def seconds(s: float) -> str:
    if s >= 1:
        return f"{s:.3g} s"
    return f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} us" if s else "0 s"


def short(text: str, most: int) -> str:
    """Cuts the middle out of a long name: numbers stand at its ends."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def ticks(end: float, most: int = 8) -> list[float]:
    """Round numbers from 0 up to `end`."""
    if end <= 0:
        return [0.0]
    raw = end / most
    unit = 10.0 ** floor(log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * (1 - 1e-9))
    return [i * step for i in range(int(end / step * (1 + 1e-9)) + 1)]


# ---- pieces


def _bar(left: float, width: float, tip: str, top: float = 0.0, height: float = 1.0, opacity: float = 1.0) -> str:
    """All but the tip in parts of the track."""
    place = ";".join(
        f"{n}:{100 * x:.4g}%" for n, x in zip(("left", "width", "top", "height"), (left, width, top, height))
    )
    return f'<i style="{place}{f";opacity:{opacity:.2f}" if opacity < 1 else ""}" title="{esc(tip)}"></i>'


def _row(name: str, bars: Iterable[str], height: float = 18, said: str = "") -> str:
    said = f"<em>{esc(said)}</em>" if said else ""
    return f'<div class="row"><b>{esc(name)}</b><div class="track" style="height:{height:.0f}px">{"".join(bars)}</div>{said}</div>'


def _chart(rows: Iterable[str], lines: Iterable[tuple[float, str, str]] = (), said: bool = False) -> str:
    """Rows under each other, and vertical lines over all of them: (place, class, label). said: the rows have a column of text."""
    drawn = "".join(
        f'<u class="{kind}" style="left:{100 * x:.4g}%"><span>{esc(text)}</span></u>' for x, kind, text in lines
    )
    over = f'<div class="row over"><b></b><div class="track">{drawn}</div>{"<em></em>" * said}</div>' * bool(drawn)
    return f'<div class="wide"><div class="chart">{over}{"".join(rows)}</div></div>'


def _shade(part: float) -> float:
    return 0.12 + 0.88 * part if part else 0.07


# ---- the four pictures


def _timeline(r: Report) -> str:
    spent, end = dict(r.phases), max(r.transfer_s, r.floor_s) or 1.0
    start = spent["control"]
    wire_end, filling = start + spent["pack"] + spent["wire"], r.transfer_s - spent["fill"]
    group = -(-len(r.timeline) // STEPS_DRAWN) or 1
    # Each with the number of its first wave.
    runs = [(i, r.timeline[i : i + group]) for i in range(0, len(r.timeline), group)]
    runs = [(i, w) for i, w in runs if sum(x.nbytes for x in w)]
    waves = []
    for row, (first, w) in enumerate(runs):
        a, b = min(x.begin for x in w) + start, max(x.end for x in w) + start
        label = f"wave {first}" if group == 1 else f"waves {first} to {first + len(w) - 1}"
        tip = f"{label}: {seconds(a)} to {seconds(b)}, {size(sum(x.nbytes for x in w))}"
        waves.append(_bar(a / end, (b - a) / end, tip, row / len(runs), 0.9 / len(runs)))
    rate = _rate(r, start, end)
    bins = [
        _bar(i / BINS, 0.9 / BINS, f"{seconds(end * i / BINS)}: {size(round(b))}/s over all links", 1 - b / max(rate), b / max(rate))
        for i, b in enumerate(rate) if b
    ]  # fmt: skip

    def lane(name: str, a: float, b: float, said: str) -> list[str]:
        return [_row(name, [_bar(a / end, (b - a) / end, f"{name}: {seconds(b - a)}; {said}")])] if b > a else []

    rows = [
        *lane("control", 0.0, start, "ready to first byte, last byte to decision"),
        *lane("pull over NVLink", start, start + spent["pull"], f"pulled inside NVLink islands: {size(r.pulled_bytes)}"),
        *lane("pack, before the wire", start, start + spent["pack"], "packing that no wire time hides"),
        *([_row("wire, wave by wave", waves, min(200.0, max(22.0, 14.0 * len(runs))))] if runs else []),
        *([_row(f"bytes on the wire, at most {size(round(max(rate)))}/s", bins, 54)] if runs else []),
        *lane("unpack, after it", wire_end, wire_end + spent["unpack"], "unpacking that no wire time hides"),
        *lane("bytes that replicas hand on", filling - spent["relay"], filling, "what they read from each other"),
        *lane("constants", filling, r.transfer_s, "padding written"),
    ]  # fmt: skip
    scale, unit = (1, "s") if end >= 1 else (1e3, "ms") if end >= 1e-3 else (1e6, "us")
    lines = [(t / end, "", f"{t * scale:g} {unit}") for t in ticks(end)]
    floor_line = (r.floor_s / end, "f", f"floor {seconds(r.floor_s)}")
    return _chart(rows, [*lines, floor_line])


def _rate(r: Report, start: float, end: float) -> list[float]:
    """Wired bytes per second in each of BINS equal parts of the refit, each wave's spread evenly over its span."""
    out, width = [0.0] * BINS, end / BINS
    for w in r.timeline:
        a, b = w.begin + start, w.end + start
        for i in range(min(BINS - 1, int(a / width)), min(BINS, int(b / width) + 1)):
            inside = min(b, (i + 1) * width) - max(a, i * width)
            out[i] += w.nbytes * (inside / (b - a) if b > a else 1.0) / width
    return out


def _bars(r: Report) -> str:
    end = max(r.transfer_s, max((b.seconds for b in r.busiest), default=0.0)) or 1.0
    rows = [
        _row(short(b.name, 40), [_bar(0, b.seconds / end, f"{b.name}: {size(b.nbytes)}, {seconds(b.seconds)} at full rate")],
             16, f"{seconds(b.seconds)} · {size(b.nbytes)}")
        for b in r.busiest
    ] or [_row("no byte goes over a link", [], said=" ")]  # fmt: skip
    return _chart(rows, [(r.transfer_s / end, "f", f"refit {seconds(r.transfer_s)}")] * (r.transfer_s > 0), said=True)


def _strips(r: Report) -> str:
    most = max((s for k in r.kinds for s in k.seconds), default=0.0) or 1.0
    rows = []
    for k in r.kinds:
        group = -(-len(k.links) // CELLS)
        cells = [range(i, min(i + group, len(k.links))) for i in range(0, len(k.links), group)]
        bars = []
        for i, cell in enumerate(cells):
            busy = max(cell, key=lambda j: k.seconds[j])
            some = f"{k.links[cell[0]]} … {k.links[cell[-1]]}, busiest "
            tip = f"{some * (len(cell) > 1)}{k.links[busy]}: {seconds(k.seconds[busy])}, {size(k.nbytes[busy])}"
            bars.append(_bar(i / len(cells), 0.95 / len(cells), tip, opacity=_shade(k.seconds[busy] / most)))
        used = [s for s, n in zip(k.seconds, k.nbytes) if n]
        said = f"most {seconds(max(used))}, mean of {len(used):,} used {seconds(sum(used) / len(used))}"
        rows.append(_row(f"{k.name} ({len(k.links):,})", bars, 22, said))
    return _chart(rows)


def _matrix(m: Matrix) -> str:
    most, n = max((n for row in m.nbytes for n in row), default=0), max(len(m.rows), len(m.columns))
    head = "".join(f"<th><span>{esc(short(name, 22))}</span>" for name in m.columns)
    lines = []
    for name, row in zip(m.rows, m.nbytes):
        cells = (
            f'<td title="{esc(f"{name} to {to}: {size(b)}")}" style="opacity:{_shade(b / most if b else 0):.2f}">'
            for to, b in zip(m.columns, row)
        )
        lines.append(f"<tr><th>{esc(short(name, 22))}{''.join(cells)}")
    cell = 30 if n <= 16 else 18 if n <= 32 else 12
    return (
        f'<div class="wide"><table class="m" style="--c:{cell}px"><tr><th>{head}{"".join(lines)}</table></div>'
        f'<p>0<span class="scale"></span>{size(most)} from row to column, per {esc(m.unit)}</p>'
    )


def _bytes(r: Report) -> str:
    rows = "".join(f"<tr><td>{esc(a)}<td class=n>{esc(b)}<td>{esc(more)}" for a, b, more in byte_rows(r))
    return f"<table><tr><th>what<th>bytes<th>{rows}</table>"
