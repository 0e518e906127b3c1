"""The text of a placement plan."""

from __future__ import annotations

from tests.loading.placement_makers import GB, checkpoint, gpus

from transload.devices import Device, Devices
from transload.loading.placement import Plan, place

BROKEN = Devices((Device("cpu", 10 * GB),), absent="the driver is too old [D03]")


def test_each_tag_has_a_line_with_its_reason() -> None:
    saved = checkpoint(("cuda:0", 3 * GB), ("cpu", 4_000), ("cpu", 4_000))
    assert str(place(saved, BROKEN)).splitlines() == [
        "  cuda:0  → cpu  there is no cuda:0 here; the driver is too old [D03]  1 tensor   3.00 GB",
        "  cpu     → cpu  it was saved there                                    2 tensors  8.00 kB",
    ]


def test_refusal_is_shown_with_its_fix() -> None:
    text = str(place(checkpoint(("cuda:0", 4)), BROKEN, None))
    assert "→ nowhere" in text
    assert text.splitlines()[1:] == [
        "✗ there is no cuda:0 here, only cpu; the driver is too old [D03]",
        "  → Leave map_location out (it is 'auto'), or pass map_location='cpu'.",
    ]


def test_memory_shortage_shows_the_deficit_and_what_would_fit() -> None:
    text = str(place(checkpoint(("cuda:0", 14 * GB)), gpus(10 * GB, cpu=20 * GB)))
    assert text.splitlines()[1:] == [
        "✗ cuda:0 has 10.0 GB free and would need 14.0 GB: 4.00 GB too little",
        "  → map_location='cpu', which has 20.0 GB free",
        "  → as bfloat16 it would take 7.00 GB",
    ]


def test_map_location_function_leaves_the_device_undecided() -> None:
    assert "→ undecided" in str(place(checkpoint(("cuda:0", 4)), gpus(GB), lambda storage, _: storage))


def test_hostile_tags_are_escaped_and_bounded() -> None:
    tags = ["\x1b[31m", "a\nb", "x" * 9999, *(f"dev:{n}" for n in range(5000))]
    plan = place(checkpoint(*((tag, 8) for tag in tags)), BROKEN)
    for text in (str(plan), plan.warning):
        assert len(text) < 9999
        assert text.replace("\n", "").isprintable()
    assert "more devices" in str(plan)


def test_empty_plan_has_nothing_to_place() -> None:
    assert str(Plan()) == "  there is nothing to place"
