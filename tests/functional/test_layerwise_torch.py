"""Plain torch under a layer-wise optimizer: the bits of training without owners, whatever users and networks do to it.

Four processes over gloo, a toy transformer with a tied head and a frozen parameter, Muon and Adam. Training is compared with
DDP in which every rank steps everything, hazards with a twin model that does the same beside. What has gone wrong in such
gathers elsewhere must give right parameters or a typed error, never old parameters unnoticed.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.layerwise_ranks import Ranks, content
from tests.support.proc import PATIENCE, Family

pytestmark = pytest.mark.trainer
STEPS, EARLY = 50, 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Family(tmp_path_factory.mktemp("layerwise")) as family:
        yield Ranks(family, 4)


@pytest.fixture(scope="module")
def truth(ranks):
    """Every rank steps everything, under DDP; and one process with all the data."""
    one = ranks.ask("train", "trained", how="one", steps=STEPS)
    return ranks.ask("train", "trained", how="everywhere", steps=STEPS), one[0]


def owners(ranks, steps: int, **options) -> list[dict]:
    return ranks.ask("train", "trained", how="owners", steps=steps, **options)


@pytest.mark.parametrize("way", ["blocking", "overlapped"])
def test_fifty_steps_have_the_bits_of_training_without_owners(ranks, truth, way):
    everywhere, one = truth
    seen = owners(ranks, STEPS, overlap=way == "overlapped")
    assert len({x["digest"] for x in everywhere}) == 1
    assert {x["digest"] for x in seen} == {everywhere[0]["digest"]}
    assert all(x["losses"] == everywhere[0]["losses"] for x in seen)
    assert seen[0]["losses"] == pytest.approx(one["losses"], rel=2e-4)
    assert all(x["distance"] < 1e-3 for x in seen)
    assert seen[0]["losses"][-1] < 0.5 * seen[0]["losses"][0]
    assert seen[0]["buckets"] > 3
    assert all(x["stale"] == (STEPS if way == "overlapped" else 0) for x in seen)
    assert all(x["unexpected"] == 0 for x in seen)


@pytest.mark.parametrize("route", ["broadcast", "pull"])
def test_so_do_gathers_that_begin_while_others_are_stepped(ranks, truth, route):
    """The embedding and the first norm are Adam's, which steps before Muon. By copies only the first bucket is sent."""
    seen = owners(ranks, EARLY, bucket_bytes=1, prefetch_depth=3, route=route)
    assert {x["digest"] for x in seen} == {truth[0][0]["digests"][str(EARLY)]}
    assert all(x["ahead"] == [1 if x["pulled"] else 3] * EARLY for x in seen)


@pytest.mark.parametrize(
    "options", [dict(prefetch_depth=3), dict(rehome=False), dict(guard="always"), dict(guard="first")], ids=str
)
def test_so_do_other_ways_of_gathering(ranks, truth, options):
    seen = owners(ranks, EARLY, **options)
    assert {x["digest"] for x in seen} == {truth[0][0]["digests"][str(EARLY)]}


@pytest.mark.parametrize(
    "steps, options",
    [
        (EARLY, {}),
        pytest.param(STEPS, {}, marks=pytest.mark.slow),
        pytest.param(STEPS, dict(overlap=False), marks=pytest.mark.slow),
        pytest.param(STEPS, dict(guard="first", prefetch_depth=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_so_do_copies_out_of_the_owners_memory(ranks, truth, steps, options):
    seen = owners(ranks, steps, route="pull", **options)
    if not any(x["pulled"] for x in seen):
        pytest.skip("processes may not read each other's memory here")
    assert {x["digest"] for x in seen} == {truth[0][0]["digests"][str(steps)]}
    assert all(x["pulled"] == 1 and x["received"] == pytest.approx(x["lacked"], rel=0.02) for x in seen)


@pytest.mark.parametrize("steps", [EARLY, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_gradients_reduced_to_owners_only(ranks, truth, steps):
    """Another order of summation than DDP's, so equal bits between the two gathers, and close to one process."""
    a = owners(ranks, steps, ddp=False, overlap=False)
    b = owners(ranks, steps, ddp=False)
    assert len({x["digest"] for x in a + b}) == 1
    assert a[0]["losses"] == b[0]["losses"] == pytest.approx(truth[1]["losses"][:steps], rel=2e-4)


@pytest.mark.parametrize("steps", [EARLY, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_bf16_fp16_and_fp32_in_one_model(ranks, steps):
    """The bits of every rank keeping fp32 masters of everything."""
    a = owners(ranks, steps, model="mixed", overlap=False)
    b = owners(ranks, steps, model="mixed")
    everywhere = ranks.ask("train", "trained", how="everywhere", steps=steps, model="mixed")
    assert len({x["digest"] for x in a + b + everywhere}) == 1
    assert a[0]["losses"] == b[0]["losses"] == everywhere[0]["losses"]
    assert b[0]["losses"][-1] < 0.9 * b[0]["losses"][0]


# ---- hazards


def run(ranks, name: str) -> list:
    return [x["what"] for x in ranks.ask("hazard", "fine", name=name)]


@pytest.mark.parametrize(
    "name",
    [
        "started_twice_finished_twice",
        "drained_between_backward_and_step",
        "one_rank_evaluates",
        "skipped_module",
        "state_dict_is_current",
        "unannounced_but_watched",
        "not_finite_on_one_rank",
    ],
)
def test_parameters_are_always_those_of_the_last_step(ranks, name):
    run(ranks, name)


def test_draining_what_is_in_flight_loses_nothing(ranks):
    """Some buckets were in flight and some not started, and every rank lacked something: else this proves nothing."""
    seen = run(ranks, "drained_in_flight")
    assert all(x["stale"] for x in seen)
    assert {"in flight", "stale"} <= set().union(*(x["states"] for x in seen))


def test_old_values_are_nans(ranks):
    for seen in run(ranks, "old_values_are_nans"):
        assert all(n > 0 for n in seen), "nothing was stale: this proves nothing"


def test_copies_out_of_owners_memory_wait_for_owners_and_owners_for_them(ranks):
    assert len(set(run(ranks, "pulled_beside_slow_ranks"))) == 1


def test_after_a_drain_on_all_ranks_parameters_may_be_changed(ranks):
    seen = run(ranks, "drained_and_changed")
    assert all(x == seen[0] and x[0] == 0 for x in seen)


def test_nothing_is_stepped_on_a_norm_that_was_aborted(ranks):
    assert all(run(ranks, "an_aborted_norm"))


def test_modules_in_another_order_even_on_some_ranks_only(ranks):
    assert all(n > 0 for n in run(ranks, "another_order"))


def test_a_forward_past_the_hooks_is_an_error_on_every_rank(ranks):
    for text in run(ranks, "without_hooks"):
        assert "no hook had asked for" in text and "blocks.0.up.weight" in text


def test_ranks_that_own_nothing(ranks):
    assert sorted(run(ranks, "few_parameters")) == [0, 0, 0, 1]


def test_experts_over_their_own_groups_and_one_norm(ranks):
    assert all(x == [4, 2] for x in run(ranks, "experts_over_halves"))


def test_a_rank_that_skips_its_experts_holds_nobody_up(ranks):
    """Over gloo its peer waited for experts, and it for dense layers, which the peer had not started."""
    for stale, (overlapped, at_once) in run(ranks, "skipped_experts"):
        assert stale == 5 and overlapped == at_once


def test_ranks_that_are_in_different_numbers_of_groups_meet(ranks):
    """torch's own way to make a group without all ranks of the job waits for ever then."""
    a, b, c, d = run(ranks, "unequal_groups")
    assert a == b != c == d


def test_a_graph_captured_over_parameters_on_their_way_is_an_error(ranks):
    assert all("drain() before capturing" in x for x in run(ranks, "captured"))


def test_an_optimizer_that_was_closed_says_so(ranks):
    assert all("closed" in x for x in run(ranks, "closed"))


def test_a_wire_that_its_watch_aborted_is_an_error_at_every_use(ranks):
    for seen, untouched in run(ranks, "aborted"):
        assert len(seen) == 4 and all("aborted by the watch" in x for x in seen)
        assert untouched


def test_a_close_beside_a_rank_that_failed_lets_go_of_everything(ranks):
    seen = run(ranks, "closed_beside_a_rank_that_failed")
    assert all(said in ("RebindError", "PeerLost", "DeadlineExceeded", "closed") for said, _, _ in seen)
    assert seen[1][0] == "RebindError" and all(not wires and not any(mapped) for _, wires, mapped in seen)


def test_a_rank_that_does_not_build_the_optimizer(ranks):
    for kind, seconds in run(ranks, "absent"):
        assert kind in ("DeadlineExceeded", "PeerLost") and seconds < 10.0 * PATIENCE


def test_memory_that_was_replaced_is_an_error_on_every_rank(ranks):
    assert all("late.weight" in x for x in run(ranks, "changed_memory"))


def test_the_wire_carries_only_what_a_rank_lacks_however_skewed(ranks):
    """What is planned is; and what the kernel counts on the way into a process, too, whatever the collectives make of the plan."""
    seen = run(ranks, "wire")
    assert max(lacked for lacked, *_ in seen) > 5 * min(lacked for lacked, *_ in seen)
    for lacked, planned, travelled, total in seen:
        assert lacked <= planned <= 1.02 * lacked
        assert lacked < total
        assert travelled is None or lacked <= travelled <= 1.02 * lacked, (travelled, lacked)


def test_ranks_that_are_not_alike_are_told_so_before_anything_is_sent(ranks):
    """gloo ends a process that is sent more bytes than it has room for."""
    for seen in run(ranks, "different_ranks"):
        assert len(seen) == 9
        for what, said in seen.items():
            lie = what in ("bucket_bytes", "rehome", "view", "strides")
            assert (
                "disagree about which parameters lie together" if lie else "disagree about their parameters"
            ) in said


def test_buffers_that_differ_are_saved_from_one_rank(ranks):
    seen = run(ranks, "buffers_of_their_own")
    assert len({str(before) for before, _, _ in seen}) == 4, "all had the same: this proves nothing"
    assert all(after == seen[0][0] and digest == seen[0][2] for _, after, digest in seen)


def test_a_checkpoint_that_one_rank_cannot_save_or_load_is_refused_on_all_at_once(ranks):
    """And later ones are whole. The others once waited in a collective, by the timeout of torch's default group."""
    for r, seen in enumerate(run(ranks, "fails_on_one_rank")):
        assert list(seen) == ["save gather", "save adapter", "load gather", "load adapter"]
        for what, (kind, said, seconds) in seen.items():
            why = ("StaleWeights", "memory ran out") if "gather" in what else ("RuntimeError", "this adapter is broken")
            own = why[0] if r == 1 or "gather" in what else "XferError"
            assert kind == own and why[1] in said and (r == 1 or "rank 1: " in said), (what, kind, said)
            assert seconds < 20 * PATIENCE, (what, seconds)


def test_a_plan_takes_owners_as_sources_before_any_gather_and_everybody_after_a_drain(ranks):
    for seen in run(ranks, "refit_sources"):
        assert seen["before"] and seen["owners"]["lacking"], "nothing was on its way: this proves nothing"
        assert seen["owners"]["wrong"] == seen["all"]["wrong"] == []
        senders = seen["owners"]["senders"]
        assert {n: senders[n] for n in seen["owner"]} == {n: [r] for n, r in seen["owner"].items()}
        assert set(senders) - set(seen["owner"]) == {"frozen"}
        assert seen["all"]["lacking"] == []
        assert set(seen["all"]["senders"]) == set(senders)
        assert len({r for ranks in seen["all"]["senders"].values() for r in ranks}) == 4


def test_a_refit_by_an_adapter_that_knows_of_no_optimizer_drains_first(ranks):
    for seen in run(ranks, "refit_without_the_wrapper"):
        assert all(before > 0 for before, _ in seen.values()), "nothing was on its way: this proves nothing"
        after = {name: n for name, (_, n) in seen.items()}
        assert (
            after["module"] == after["tensors"] == after["copies"] == 0 < min(after["owners"], after["another model's"])
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world", [2, 1])
def test_a_checkpoint_saved_in_the_midst_of_a_gather_is_loaded_by_another_number_of_ranks(ranks, tmp_path, world):
    """Saved by four: equal bits, and of state too; five steps later still near those of the four."""
    saved = ranks.ask("checkpointed", "saved", folder=str(tmp_path / "saved"), steps=5)
    assert len({x["saved"] for x in saved}) == 1
    with Family(tmp_path) as family:
        others = Ranks(family, world)
        seen = others.ask(
            "resumed", "resumed", folder=str(tmp_path / "saved"), again=str(tmp_path / "2"), steps=5, of=4
        )
        for x in seen:
            assert x["loaded"] == saved[0]["saved"]
            got, want = torch.tensor(x["values"]), torch.tensor(saved[0]["values"])
            assert (got - want).norm() < 1e-2 * (want - torch.tensor(x["start"])).norm()
    first, second = content(tmp_path / "saved"), content(tmp_path / "2")
    assert first.keys() == second.keys() and sum(k.endswith("/momentum_buffer") for k in first) > 3
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_a_rank_that_dies_in_a_gather(tmp_path):
    """Everybody else has a typed error by the deadline, and has it again at every later use."""
    with Family(tmp_path) as family:
        two = Ranks(family, 2)
        for c in two.ranks:
            c.say(do="dying", victim=1)
        assert two.ranks[1].expect("ended", timeout=120)["code"] == 7
        for c in two.ranks[:1]:
            said = c.expect("survived", timeout=120)
            seen = said["seen"]
            assert len(seen) == 3
            assert {kind for kind, _ in seen} <= {"PeerLost", "DeadlineExceeded"}
            assert all("bucket" in text for _, text in seen)


@pytest.mark.slow
def test_a_rank_that_dies_while_others_copy_from_it(tmp_path):
    with Family(tmp_path) as family:
        two = Ranks(family, 2)
        for c in two.ranks:
            c.say(do="dying", victim=1, route="pull")
        assert two.ranks[1].expect("ended", timeout=120)["code"] == 7
        seen = two.ranks[0].expect("survived", timeout=120)["seen"]
        assert len(seen) == 3 and {kind for kind, _ in seen} <= {"PeerLost", "DeadlineExceeded"}


def test_a_rank_that_stops_in_a_gather(tmp_path):
    """Its connections stay open: only the deadline tells."""
    with Family(tmp_path) as family:
        two = Ranks(family, 2)
        for c in two.ranks:
            c.say(do="dying", victim=1, how="stops", deadline_s=4.0 * PATIENCE)
        said = two.ranks[0].expect("survived", timeout=120)
        assert [kind for kind, _ in said["seen"]] == ["DeadlineExceeded"] * 3
        assert all("bucket" in text for _, text in said["seen"])
        assert said["seconds"] < 4.0 * PATIENCE + 10.0
        two.ranks[1].kill()  # it would not see that its pipe is closed
