"""Parameters in FP8 as xfer/trainers/block_scaled.py reads them, on TransformerEngine's attributes alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.te_blocks import DType, Float8BlockwiseQTensor
from xfer.errors import RebindError, Unsupported
from xfer.trace.fragment import Fragment, TensorSpec
from xfer.trace.slots import Slots, walk
from xfer.trace.traced import Traced
from xfer.trainers import block_scaled
from xfer.trainers.bridge_stream import _refuse_fp8


def parts(rows: int, columns: int, **other) -> dict:
    return {
        "rowwise_data": torch.zeros(rows, columns, dtype=torch.uint8),
        "rowwise_scale_inv": torch.ones(-(-rows // 128), -(-columns // 512) * 4),
        "columnwise_data": None,
        "columnwise_scale_inv": None,
        "fp8_dtype": DType.kFloat8E4M3,
        "quantizer": SimpleNamespace(block_len=128, force_pow_2_scales=False),
        "is_2D_scaled": True,
        **other,
    }


def parameter(rows: int = 256, columns: int = 384, **other) -> torch.Tensor:
    like = torch.nn.Parameter(torch.empty(rows, columns, dtype=torch.bfloat16))
    p = Float8BlockwiseQTensor(like, parts(rows, columns, **other))
    p.partition_dim = 0
    return p


class Quantized(torch.Tensor):
    """Of another recipe: it has parts, too."""

    def get_metadata(self) -> dict:
        return {"rowwise_data": torch.zeros(1), "rowwise_scale_inv": torch.zeros(1)}


def module_of(p: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2, bias=False)
    module._parameters["weight"] = p
    return module


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, ""),
        (dict(rowwise_data=None), "without rowwise_data and rowwise_scale_inv now"),
        (dict(rowwise_scale_inv=None), "without rowwise_data and rowwise_scale_inv now"),
        (dict(is_2D_scaled=False), "with scales per 1x128"),
        (dict(fp8_dtype=DType.kFloat8E5M2), "in kFloat8E5M2 with scales per 128x128"),
        (dict(quantizer=SimpleNamespace(block_len=64)), "with scales per 64x64"),
        (dict(quantizer=None), "with scales per NonexNone"),
        (dict(rowwise_scale_inv=torch.ones(2, 2)), "scales [2, 2]"),
        (dict(rowwise_data=torch.zeros(384, 256, dtype=torch.uint8).t()), "of [256, 384] with bytes [256, 384]"),
    ],
)
def test_other_forms_are_refused_by_what_they_are(given, said):
    why = block_scaled.refused(parameter(**given))
    assert (said in why) if said else not why
    assert not said or "Float8BlockwiseQTensor" in why


def test_another_recipes_class_is_refused_by_its_name():
    p = torch.zeros(2).as_subclass(Quantized)
    assert not block_scaled.is_scaled(p)
    assert "is a Quantized, whose raw bytes are not its values" in block_scaled.refused(p)


def test_the_packed_route_names_what_it_does_not_read():
    plain, quantized = torch.nn.Linear(2, 2), module_of(parameter())
    _refuse_fp8(walk([plain]))
    with pytest.raises(Unsupported, match="does not read weights in FP8(?s:.*)1:weight: is a Float8BlockwiseQTensor"):
        _refuse_fp8(walk([plain, quantized]))


def test_a_twin_has_the_nominal_dtype_and_megatrons_marks_and_no_bytes():
    t = block_scaled.twin(parameter())
    assert (t.dtype, t.shape, t.device.type) == (torch.bfloat16, (256, 384), "meta") and vars(t) == {"partition_dim": 0}


def test_values_and_scales_are_watched_where_they_lie():
    """Megatron-Core moves values into its buffer, and frameworks replace parameters."""
    module = module_of(parameter())
    (slot,) = walk([module])
    slots, seats = Slots([module], block_scaled.slots_of(slot)), block_scaled.Seats([slot])
    bound = slots.bind()
    assert list(bound.places) == ["0:weight", "0:weight:rowwise_scale_inv"] and slots.check() == "same"
    module.weight._rowwise_data = module.weight._rowwise_data.clone()
    assert slots.check() == "moved"
    found = slots.bind().tensors["0:weight"]
    assert found.data_ptr() == module.weight._rowwise_data.data_ptr() and seats.hold()
    module.weight._rowwise_data = None
    with pytest.raises(RebindError, match="0:weight"):
        slots.check()
    module._parameters["weight"] = parameter()
    assert not seats.hold()
    assert block_scaled.Seats().hold()


def test_all_tensors_that_no_scale_fits_are_named_at_once():
    module = module_of(parameter())
    (slot,) = walk([module])
    places = Slots([module], block_scaled.slots_of(slot)).bind().places
    specs, box = tuple(TensorSpec(n, (128, 384), "bfloat16") for n in "abc"), ((0, 0), (128, 384))
    rows = [Fragment(n, *box, slot.name, r * 768, (768, 2), "bfloat16") for n, r in zip("abc", (0, 64, 128))]
    scaled = {slot.name: module.weight}
    with pytest.raises(Unsupported) as error:
        block_scaled.in_fp8(Traced(specs, (*rows, rows[1])), scaled, places, "trainer 3")
    said = str(error.value)
    assert "trainer 3" in said and "b: 0:128 x 0:384 of [128, 384] lie at row 64, column 0" in said
    recipe = SimpleNamespace(target="c", sources=(slot.name, "x"), ops=("aten.add",))
    with pytest.raises(Unsupported, match=r"c: is computed \(aten.add\) from 0:weight, in FP8 in the trainer"):
        block_scaled.in_fp8(Traced(specs, (rows[0],), recipes=(recipe,)), scaled, places, "trainer 3")
    other = Fragment("a", *box, "1:weight", 0, (768, 2), "bfloat16")
    with pytest.raises(Unsupported, match="a: lies partly in FP8 parameters, and partly in others"):
        block_scaled.in_fp8(Traced(specs, (rows[0], other)), scaled, places, "trainer 3")
    traced, scales = block_scaled.in_fp8(Traced(specs, (rows[0], rows[2])), scaled, places, "trainer 3")
    there = [(f.offset, f.strides, f.dtype) for f in traced.fragments]
    assert there == [(r * 384, (384, 1), "float8_e4m3fn") for r in (0, 128)]
    assert [(f.offset, f.extent, f.strides) for f in scales] == [(r * 16, (1, 3), (0, 4)) for r in (0, 1)]
