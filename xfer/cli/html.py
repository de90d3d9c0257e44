"""Draws a plan's report as one HTML file: timeline, links, traffic, bytes. It needs no script and no network.

All text from outside goes through `esc`. The page's content policy forbids scripts and fetches, so a missed escape does no
harm either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import floor, log10

from xfer.cli.plan_report import Matrix, Report
from xfer.plan.explain import size

WIDTH, LEFT = 1040, 170
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
svg{display:block;font:11px system-ui,-apple-system,"Segoe UI",sans-serif}
svg text{fill:var(--fg)} svg .d{fill:var(--dim)}
.g{stroke:var(--line);stroke-width:1} .b{fill:var(--ink)} .h{fill:var(--hot)} .c{fill:var(--cell)}
.f{stroke:var(--hot);stroke-width:1.5;stroke-dasharray:4 3}
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
        f'<div class="wide">{_timeline(r)}</div>'
        "<h2>Links</h2><p>The busiest links of the fabric, by the time that their bytes need at full rate. The dashed "
        "line is the predicted time of the whole refit.</p>"
        f'<div class="wide">{_bars(r)}</div>'
        "<p>All links of each kind, in the order of the hosts; the stronger the colour, the longer busy.</p>"
        f'<div class="wide">{_strips(r)}</div>'
        f"<h2>Traffic</h2><p>Bytes from each {esc(r.matrix.unit)} of trainers (rows) to each of workers (columns).</p>"
        f'<div class="wide">{_matrix(r.matrix)}</div>'
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


# ---- pieces of SVG


def _svg(width: float, height: float, parts: Iterable[str], what: str) -> str:
    inside = "".join(parts)
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{esc(what)}">{inside}</svg>'
    )


def _rect(x: float, y: float, w: float, h: float, tip: str, kind: str = "b", opacity: float = 1.0) -> str:
    seen = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.7):.1f}" height="{h:.1f}"{seen}>'
        f"<title>{esc(tip)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "", turn: float = 0) -> str:
    turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{turned}>{esc(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "g") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _axis(end: float, top: float, bottom: float, span: float, title: str) -> list[str]:
    """Grid and labels of seconds from LEFT on; unit by the size of `end`."""
    scale, unit = (1, "s") if end >= 1 else (1e3, "ms") if end >= 1e-3 else (1e6, "us")
    out = []
    for t in ticks(end):
        x = LEFT + t / end * span if end else LEFT
        out += [_line(x, top, x, bottom), _text(x, bottom + 15, f"{t * scale:g}", "middle", "d")]
    return [*out, _text(LEFT + span / 2, bottom + 33, f"{title} ({unit})", "middle", "d")]


# ---- the four pictures


def _timeline(r: Report) -> str:
    spent = dict(r.phases)
    end, span = max(r.transfer_s, r.floor_s), WIDTH - LEFT - 24
    start = spent["control"]
    waves = r.timeline
    group = -(-len(waves) // STEPS_DRAWN) if waves else 1
    runs = [(i, waves[i : i + group]) for i in range(0, len(waves), group)]  # with the number of their first wave
    runs = [(i, w) for i, w in runs if sum(x.nbytes for x in w)]
    tall = min(200.0, max(22.0, 14.0 * len(runs)))
    wire_end = start + spent["pack"] + spent["wire"]
    lanes = [("control", 18.0, [(0.0, start, "ready to first byte, last byte to decision")])]
    if spent["pull"]:
        said = f"pulled inside NVLink islands: {size(r.pulled_bytes)}"
        lanes.append(("pull over NVLink", 18.0, [(start, start + spent["pull"], said)]))
    if runs:
        lanes.append(
            ("pack, before the wire", 18.0, [(start, start + spent["pack"], "packing that no wire time hides")])
        )
        lanes.append(("wire, wave by wave", tall, []))
        lanes.append(("bytes on the wire", 54.0, []))
        lanes.append(
            ("unpack, after it", 18.0, [(wire_end, wire_end + spent["unpack"], "unpacking that no wire time hides")])
        )
    if spent["relay"]:
        to = r.transfer_s - spent["fill"]
        lanes.append(
            ("bytes that replicas hand on", 18.0, [(to - spent["relay"], to, "what they read from each other")])
        )
    if spent["fill"]:
        lanes.append(("constants", 18.0, [(r.transfer_s - spent["fill"], r.transfer_s, "padding written")]))
    height = 14 + sum(h + 10 for _, h, _ in lanes)
    parts = _axis(end, 8, height, span, "time after all are ready")

    def at(t: float) -> float:
        return LEFT + t / end * span if end else LEFT

    y = 14.0
    for name, h, bars in lanes:
        parts.append(_text(LEFT - 10, y + min(h, 18) / 2 + 4, name, "end"))
        parts += [
            _rect(at(a), y, at(b) - at(a), h, f"{name}: {seconds(b - a)}; {said}") for a, b, said in bars if b > a
        ]
        if name.startswith("wire"):
            step = h / max(1, len(runs))
            for row, (first, w) in enumerate(runs):
                a, b = min(x.begin for x in w) + start, max(x.end for x in w) + start
                label = f"wave {first}" if group == 1 else f"waves {first} to {first + len(w) - 1}"
                said = f"{label}: {seconds(a)} to {seconds(b)}, {size(sum(x.nbytes for x in w))}"
                parts.append(
                    _rect(at(a), y + row * step, at(b) - at(a), max(step - 1 if step > 4 else step, 0.6), said)
                )
        if name.startswith("bytes"):
            rate = _rate(r, start, end)
            for i, b in enumerate(rate):
                if b:
                    tall, tip = h * b / max(rate), f"{seconds(end * i / len(rate))}: {size(round(b))}/s over all links"
                    parts.append(_rect(LEFT + i * span / len(rate), y + h - tall, span / len(rate) - 1, tall, tip))
            parts.append(_text(LEFT - 10, y + 26, f"at most {size(round(max(rate)))}/s", "end", "d"))
        y += h + 10
    x = at(r.floor_s)
    right = x > LEFT + span - 150
    parts += [
        _line(x, 8, x, height, "f"),
        _text(x - 5 if right else x + 5, height - 3, f"floor {seconds(r.floor_s)}", "end" if right else "start", "h"),
    ]
    return _svg(WIDTH, height + 42, parts, "timeline of a refit")


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
    left = 250
    end, span = max(r.transfer_s, max((b.seconds for b in r.busiest), default=0.0)), WIDTH - left - 190
    parts, y = [], 6.0
    for b in r.busiest:
        w = b.seconds / end * span if end else 0
        tip = f"{b.name}: {size(b.nbytes)}, {seconds(b.seconds)} at full rate"
        parts += [
            _text(left - 10, y + 12, short(b.name, 40), "end"),
            _rect(left, y, w, 16, tip),
            _text(left + span + 14, y + 12, f"{seconds(b.seconds)} · {size(b.nbytes)}", "start", "d"),
        ]
        y += 21
    if not r.busiest:
        parts.append(_text(left, y + 12, "no byte goes over a link"))
        y += 21
    if r.transfer_s > 0:
        x = left + r.transfer_s / end * span
        parts += [_line(x, 2, x, y, "f"), _text(x, y + 13, f"refit {seconds(r.transfer_s)}", "middle", "h")]
    return _svg(WIDTH, y + 20, parts, "busiest links")


def _strips(r: Report) -> str:
    most = max((s for k in r.kinds for s in k.seconds), default=0.0)
    span, parts, y = WIDTH - LEFT - 260, [], 6.0
    for k in r.kinds:
        group = -(-len(k.links) // CELLS)
        cells = [range(i, min(i + group, len(k.links))) for i in range(0, len(k.links), group)]
        w = span / len(cells)
        parts.append(_text(LEFT - 10, y + 15, f"{k.name} ({len(k.links):,})", "end"))
        for i, cell in enumerate(cells):
            busy = max(cell, key=lambda j: k.seconds[j])
            where = (
                k.links[busy]
                if len(cell) == 1
                else f"{k.links[cell[0]]} … {k.links[cell[-1]]}, busiest {k.links[busy]}"
            )
            tip = f"{where}: {seconds(k.seconds[busy])}, {size(k.nbytes[busy])}"
            parts.append(_cell(LEFT + i * w, y, w, 22, k.seconds[busy] / most if most else 0, tip))
        used = [s for s, n in zip(k.seconds, k.nbytes) if n]
        said = f"most {seconds(max(used))}, mean of {len(used):,} used {seconds(sum(used) / len(used))}"
        parts.append(_text(LEFT + span + 12, y + 15, said, "start", "d"))
        y += 30
    return _svg(WIDTH, max(y, 20), parts, "load of all links by kind")


def _cell(x: float, y: float, w: float, h: float, share: float, tip: str) -> str:
    gap = 1 if min(w, h) > 4 else 0
    if share <= 0:
        return _rect(x, y, w - gap, h - gap, tip, "c")
    return _rect(x, y, w - gap, h - gap, tip, "b", 0.12 + 0.88 * share)


def _matrix(m: Matrix) -> str:
    most = max((n for row in m.nbytes for n in row), default=0)
    n = max(len(m.rows), len(m.columns), 1)
    cell = 30 if n <= 16 else 18 if n <= 32 else 12
    left = 20 + 6.2 * max(len(short(x, 22)) for x in m.rows)
    top = 14 + 6.0 * max(len(short(x, 22)) for x in m.columns)
    parts = [_text(left - 8, top + i * cell + cell / 2 + 4, short(x, 22), "end") for i, x in enumerate(m.rows)]
    for j, name in enumerate(m.columns):
        parts.append(_text(left + j * cell + cell / 2 + 4, top - 6, short(name, 22), "start", "", -90))
    for i, row in enumerate(m.nbytes):
        for j, b in enumerate(row):
            tip = f"{m.rows[i]} to {m.columns[j]}: {size(b)}"
            parts.append(_cell(left + j * cell, top + i * cell, cell, cell, b / most if most else 0, tip))
    y = top + len(m.rows) * cell + 16
    steps = 24
    parts += [_cell(left + k * 8, y, 8.9, 12, k / (steps - 1), "") for k in range(steps)]
    parts += [
        _text(left, y + 26, "0", "start", "d"),
        _text(left + steps * 8, y + 26, size(most), "end", "d"),
        _text(left + steps * 8 + 14, y + 10, f"bytes from row to column, per {m.unit}", "start", "d"),
    ]
    width = max(left + len(m.columns) * cell + 12, left + steps * 8 + 300)
    return _svg(width, y + 32, parts, "traffic matrix")


def _bytes(r: Report) -> str:
    def row(cells: Sequence[object]) -> str:
        return (
            "<tr>" + "".join(f"<td{' class=n' if i == 1 else ''}>{esc(c)}</td>" for i, c in enumerate(cells)) + "</tr>"
        )

    c = r.byte_classes
    rows = [
        ("live bytes of all engine workers", size(c["footprint"]), ""),
        ("written from the wire", size(c["written"]), f"{r.pieces_direct:,} pieces straight into place"),
        ("filled with constants", size(c["filled"]), f"{r.fills:,} regions, such as padding"),
        ("computed from what was staged", size(c["staged"]), f"{r.pieces_staged:,} pieces through {size(c['scratch'])} of scratch"),
        ("kept", size(c["kept"]), "; ".join(map(str, r.kept)) or "none"),
        ("between hosts", size(r.between_hosts), f"of {size(r.nbytes)} moved"),
        ("sent most", size(r.most_out.nbytes), f"{r.most_out.rank}; mean {size(round(r.most_out.mean))}"),
        ("received most", size(r.most_in.nbytes), f"{r.most_in.rank}; mean {size(round(r.most_in.mean))}"),
        *(("cast on the way", "", x) for x in r.casts),
    ]  # fmt: skip
    if r.dropped:
        rows.append(("dropped, as asked", f"{len(r.dropped):,} tensors", ", ".join(r.dropped[:8])))
    return "<table><tr><th>what<th>bytes<th></tr>" + "".join(row(x) for x in rows) + "</table>"
