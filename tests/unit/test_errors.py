"""Errors do not grow with the model: one line per kind of violation, with a count, examples and what to write; what is sent to
other processes is as short. All violations stay on the error that was raised."""

from __future__ import annotations

import ast
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import EXAMPLES
from xfer import errors
from xfer.coordinator import messages as m
from xfer.errors import EXAMPLE_CHARS, KINDS_SHOWN, CoverageError, XferError, by_kind
from xfer.plan.inventory import engine_inventory, trainer_inventory
from xfer.plan.options import PlanOptions, matches, written
from xfer.plan.planner import plan_replica
from xfer.trace.catalog import Catalog
from xfer.trace.fragment import Fragment, Root, Span, TensorSpec

LAYERS = 400
GATE, BIAS = "model.layers.{}.mlp.gate.weight", "model.layers.{}.mlp.gate.e_score_correction_bias"
WIDE = [name.format(i) for i in range(3, LAYERS) for name in (GATE, BIAS)]  # the first layers are dense
MEMBERS = [f"model.layers.{i}.mlp.experts.{e}.w.weight" for i in range(3, LAYERS) for e in (0, 1)]
KINDS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, XferError)]
PLAIN = ["model.norm.weight", *(f"model.layers.{i}.mlp.down.weight" for i in range(3))]


def side(names: list[str], dtype: str, catalog: Catalog, make):
    item = {"float32": 4, "bfloat16": 2}
    kind = {n: dtype if n in WIDE else "bfloat16" for n in names}
    rows = [Fragment(n, (0,), (2,), n, 0, (item[kind[n]],), kind[n]) for n in names]
    size = {n: 2 * item[kind[n]] for n in names}
    more = {} if make is trainer_inventory else {"footprint": [Span(n, 0, size[n]) for n in names], "reads": names}
    return make(catalog, rank=0, host="", roots=[Root(n, size[n]) for n in names], fragments=rows, **more)


def planned(held: list[str], read: list[str], **options):
    catalog = Catalog(tuple(sorted(TensorSpec(n, (2,), "float32" if n in WIDE else "bfloat16") for n in held)))
    source = side(held, "float32", catalog, trainer_inventory)
    destination = side(read, "bfloat16", catalog, engine_inventory)
    return plan_replica(catalog, [source], [destination], PlanOptions(**options))


@pytest.mark.parametrize(
    "held, read, argument, count",
    [
        ([*WIDE, *PLAIN], [*WIDE, *PLAIN], {"narrow": [BIAS.format("*"), GATE.format("*")]}, len(WIDE)),
        ([*MEMBERS, *PLAIN], PLAIN, {"drop": ["model.layers.*.mlp.experts.*.w.weight"]}, len(MEMBERS)),
    ],
    ids=["narrow", "drop, of experts, by the checkpoint's names"],
)
def test_a_missing_option_is_one_line_which_says_what_to_write(held, read, argument, count):
    with pytest.raises(CoverageError) as e:
        planned(held, read)
    error, text = e.value, str(e.value)
    assert len(error.violations) == count, "every violation is there for programs"
    (line,) = re.findall(r"\n  - (.*)", text)
    assert f"[{count} of this kind: also " in line and line.count("model.layers.") <= 7, line
    assert len(m.encode(m.Failed(m.WireError.of(error, "trainer 0")))) < 2000 and len(text) < 2000
    assert str(m.WireError.of(error, "").error()) == text
    ((option, patterns),) = argument.items()
    assert ast.literal_eval(re.search(rf"pass {option}=(\[.*?\])(?: |$)", line)[1]) == patterns
    assert planned(held, read, **argument).summary.nbytes


NAMES = [f"a.{i}.x.w" for i in range(4)]
OTHERS = ["a.0.b.x.w", "b", "b.1.w"]  # a.*.x.w matches the first one too


@given(st.sets(st.sampled_from(NAMES + OTHERS), min_size=1))
@settings(max_examples=EXAMPLES)
def test_an_argument_names_these_and_no_other(chosen):
    some = [n for n in NAMES + OTHERS if n in chosen]
    for every in (some, NAMES + OTHERS, [*NAMES, *some]):
        every = list(dict.fromkeys(every))
        patterns = ast.literal_eval(written("drop", some, every).partition("=")[2])
        assert [n for n in every if matches(n, tuple(patterns))] == [n for n in every if n in chosen]


def test_an_argument_is_short():
    assert written("drop", NAMES, [*NAMES, "b"]) == 'drop=["a.*.x.w"]'
    assert len(written("drop", [f"n{i}" for i in range(10_000)], ["b"])) < 300


def test_lines_that_say_the_same_are_one_and_keep_their_numbers():
    ranks = [f"trainer {i}: it has not called" for i in range(6)]
    differ = [f"replica 0 worker {i}: version={i // 2}" for i in range(4)]
    assert by_kind([*ranks, *differ, ranks[0]]) == [
        f"{ranks[0]} [6 of this kind: also {', '.join(f'trainer {i}' for i in range(1, 6))}]",
        f"{differ[0]} [2 of this kind: also replica 0 worker 1]",
        f"{differ[2]} [2 of this kind: also replica 0 worker 3]",
    ]
    assert by_kind([*ranks, ranks[0]]) == ranks, "a few lines stay as they are"


def test_many_lines_that_differ_in_numbers_are_one_kind_and_many_kinds_are_cut():
    shapes = [f"layers.{i}.w: ({i}, 64) of float32 in the engine" for i in range(1000)]
    others = [f"layers.{i}.w: ({i}, 64) of bfloat16 in the engine" for i in range(20)]
    lines = by_kind([*shapes, *others])
    assert [line.split(" [")[0] for line in lines] == [shapes[0], others[0]]
    assert "[1000 of this kind: also layers.1.w, " in lines[0]
    assert all(len(line) < len(shapes[0]) + EXAMPLE_CHARS + 60 for line in lines)
    letters = [f"x: {chr(97 + i % 26) * (1 + i // 26)}" for i in range(100)]
    assert by_kind(letters) == [*letters[: KINDS_SHOWN - 1], f"… and {101 - KINDS_SHOWN} more of other kinds"]
    error = XferError("m", letters)
    assert str(error).count("\n  - ") == KINDS_SHOWN and str(m.WireError.of(error, "").error()) == str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("violations", [(), ("a: 1",), tuple(f"{chr(97 + i)}: {i}" for i in range(12))])
def test_the_text_of_an_error_ends_with_one_code(kind, violations):
    """Here, after a journey to other processes, and if it quotes other errors, whose codes would lead to other advice."""
    error = kind("message", violations, where="trainer 0")
    for _ in range(2):  # by two hops
        assert str(error).endswith(f"({kind.code})") and len(re.findall(r"XF\d", str(error))) == 1
        assert error.line().endswith(f"({kind.code})") and "\n" not in error.line()
        error = m.WireError.of(error, "").error()
        assert type(error) is kind and not re.search(r"XF\d", f"{error.message}{error.violations}")
    outer = errors.RefitFailed(f"it failed: {error}", [str(error), error.line()])
    assert re.findall(r"XF\d+", f"{outer} {outer.line()}") == [errors.RefitFailed.code] * 2
    assert all("XF" not in line for line in (outer.message, *outer.violations))
