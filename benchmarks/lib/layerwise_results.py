"""The results of benchmarks.layerwise_gpu: records, and the lines that it prints."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from benchmarks.lib import layerwise_dead as dead
from benchmarks.lib.layerwise_net import Timeline

HIDDEN_GOAL, WIRE_GOAL = 0.8, 1.02
OVERLAPS = ("overlap", "pull", "narrow", "megatron", "skew")


@dataclass(frozen=True, slots=True)
class Exact:
    """One model trained in several ways.

    differ: ways whose losses or parameters are not equal to the blocking gather's bit for bit. distance: the greatest
    relative difference of a loss from a single process's; None if that did not run.
    """

    model: str
    ranks: int
    steps: int
    ways: tuple[str, ...]
    differ: tuple[str, ...]
    first_loss: float
    last_loss: float
    distance: float | None


@dataclass(frozen=True, slots=True)
class Overlap:
    """The cost of one kind of gather. Milliseconds are medians over steps of the slowest rank.

    forward_ms: by way, from the end of all ranks' updates to the end of the next forward; "none" does not gather.
    step_ms: whole steps without a barrier. exposed_ms: forward_ms less that of "none". hidden: 1 - exposed / exposed of
    "blocking". timeline: by way, one per rank. Bytes of one gather by rank: received, as planned; lacked, owned by other
    ranks; travelled, as NVLink counted them, empty without counters.
    """

    what: str
    ranks: int
    parameters: int
    buckets: int
    owned_bytes: tuple[int, ...]
    forward_ms: dict[str, float]
    spread_ms: dict[str, tuple[float, float]]
    step_ms: dict[str, float]
    received: tuple[int, ...]
    lacked: tuple[int, ...]
    travelled: tuple[int, ...]
    timeline: dict[str, list[Timeline]]

    @property
    def exposed_ms(self) -> dict[str, float]:
        return {w: t - self.forward_ms["none"] for w, t in self.forward_ms.items() if w != "none"}

    @property
    def hidden(self) -> dict[str, float]:
        e = self.exposed_ms
        return {w: 1 - t / e["blocking"] for w, t in e.items() if w != "blocking"}


def medians(forward: dict[str, list[float]], whole: dict[str, list[float]]) -> tuple[dict, dict, dict]:
    middle = lambda found: {n: statistics.median(ms) for n, ms in found.items()}  # noqa: E731
    return middle(forward), {n: (min(ms), max(ms)) for n, ms in forward.items()}, middle(whole)


def flat(x: Overlap) -> dict:
    return asdict(x) | {"exposed_ms": x.exposed_ms, "hidden": x.hidden}


def table(result: dict) -> list[str]:
    """The lines to print for one run."""
    took = "".join(f", {part} {s:.0f} s" for part, s in result.get("seconds", {}).items())
    out = [f"== {result['ranks']} ranks, {result.get('what', '')}{took}"]
    for x in result.get("exact", ()):
        near = "" if x["distance"] is None else f", losses within {x['distance']:.1e} of one process"
        verdict = "ALL EQUAL" if not x["differ"] else f"DIFFER: {', '.join(x['differ'])}"
        out.append(
            f"exact, {x['model']}: {x['steps']} steps, {len(x['ways'])} ways, {verdict}; loss {x['first_loss']:.3f} -> "
            f"{x['last_loss']:.3f}{near}"
        )
    for part in OVERLAPS:
        if part in result:
            out += _overlap_lines(result[part])
        elif part in result["skipped"]:
            out.append(f"{part}: not run, {result['skipped'][part]}")
    for x in result.get("dead", ()):
        out += dead.lines(x)
    return out


def summary(runs: list[dict]) -> list[str]:
    """The goals, one line per number of ranks and kind of gather.

    "overlapped" is the way that exposes least. "hidden" compares it with the same run's blocking gather, and with few
    thread blocks also with the blocking gather of all. Timelines are those of the rank that exposes most.
    """
    out = [
        "",
        "Exposed gather, ms per step (medians of the slowest rank); goals: hidden >= "
        f"{HIDDEN_GOAL:.0%}, planned / lacked <= {WIRE_GOAL}",
        "ranks  gather                    blocking  overlapped  hidden | timeline: blocking  overlapped  hidden | planned / lacked",
    ]
    for r in runs:
        for part in OVERLAPS:
            if part in r:
                out.append(_summary_line(r[part], r.get("overlap")))
        for x in r.get("exact", ()):
            verdict = f"differ: {', '.join(x['differ'])}" if x["differ"] else "equal to the bit"
            out.append(f"{r['ranks']:5}  exact, {x['model']}: {x['steps']} steps, {len(x['ways'])} ways: {verdict}")
        for x in r.get("dead", ()):
            out.append(f"{r['ranks']:5}  {dead.lines(x)[0]}")
    return out


def _summary_line(x: dict, full: dict | None) -> str:
    exposed = x["exposed_ms"]
    best = min((w for w in exposed if w != "blocking"), key=exposed.get)
    line = (
        f"{x['ranks']:5}  {x['what'][:24]:24} {exposed['blocking']:9.2f} {exposed[best]:11.2f} {x['hidden'][best]:7.1%}"
    )
    bare = bare_ms(x)
    if "blocking" in bare and len(bare) > 1:
        least = min((w for w in bare if w != "blocking"), key=bare.get)
        line += f" | {bare['blocking']:18.2f} {bare[least]:11.2f} {1 - bare[least] / bare['blocking']:7.1%}"
    else:
        line += f" | {'-':>18} {'-':>11} {'-':>7}"
    line += f" | {wire_ratio(x):.5f}" if x["lacked"] else " | -"
    if full is not None and x is not full and x["what"].startswith("xfer"):
        line += f"; {1 - exposed[best] / full['exposed_ms']['blocking']:.1%} of what xfer's blocking broadcasts expose"
    return line


def bare_ms(x: dict) -> dict[str, float]:
    """Exposed milliseconds of the timeline by way, of the rank that exposes most."""
    return {way: max(t["exposed_ms"] for t in ranks) for way, ranks in x["timeline"].items() if ranks}


def wire_ratio(x: dict) -> float:
    """Bytes planned / bytes lacked, the greatest of all ranks."""
    return max(r / n for r, n in zip(x["received"], x["lacked"]) if n)


def _overlap_lines(x: dict) -> list[str]:
    out = [
        f"{x['what']}: {x['parameters'] / 1e9:.2f} B parameters, {x['buckets']} buckets, "
        f"owned MB {[round(n / 1e6) for n in x['owned_bytes']]}"
    ]
    if x["lacked"]:
        each = [f"{r / 1e6:.1f} / {n / 1e6:.1f}" for r, n in zip(x["received"], x["lacked"])]
        out.append(
            f"  wire, by plan: received / lacked MB by rank {each}, at most {wire_ratio(x):.5f} (goal {WIRE_GOAL})"
        )
        seen = x.get("travelled") or ()
        ratio = max((t / n for t, n in zip(seen, x["lacked"]) if n), default=None)
        by_rank = f"{[f'{t / 1e6:.1f}' for t in seen]} MB by rank, at most {ratio or 0:.5f} of what is lacked (goal {WIRE_GOAL})"
        out.append(f"  wire, by NVLink's counters: {'not available' if ratio is None else by_rank}")
    out.append(
        "  way         forward ms (min-max)        exposed ms  hidden  step ms   timeline: gather, exposed ms, hidden"
    )
    base = max((t["exposed_ms"] for t in x["timeline"].get("blocking", ())), default=None)
    for way, ms in x["forward_ms"].items():
        low, high = x["spread_ms"][way]
        exposed = x["exposed_ms"].get(way)
        line = f"  {way:10} {ms:9.2f} ({low:.2f}-{high:.2f})".ljust(42)
        line += " " * 10 if exposed is None else f"{exposed:8.2f}  "
        line += f"{x['hidden'][way]:7.1%}" if way in x["hidden"] else " " * 7
        line += f"{x['step_ms'][way]:10.1f}"
        if way in x["timeline"]:  # of the rank with most
            seen = [max(t[k] for t in x["timeline"][way]) for k in ("gather_ms", "exposed_ms")]
            line += f"   {seen[0]:8.2f} {seen[1]:8.2f} {1 - seen[1] / base:7.1%}"
        out.append(line)
    best = max(x["hidden"].values())
    return [*out, f"  best hidden by events {best:.1%} (goal {HIDDEN_GOAL:.0%})"]
