"""CUDA_VISIBLE_DEVICES: the observed behaviour of a real driver, compared with torch's own parser."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from transload.diagnose.rules.process import visible_devices

torch_cuda = pytest.importorskip("torch.cuda")

UUID = "GPU-62e9b7ab-dfcb-c55c-9dce-14c089e99fe6"
HEX = UUID[4:]
MIG = "MIG-41b35014-542c-55ba-a80a-0a6e7e0f5b0e"
TWO = (UUID, "GPU-62000000-0000-4000-8000-000000000000")

# Observed on one H200 with driver 580.159.04.
SELECTS_GPU = (
    *("0", "0 ", " 0", "\t0", "\n0", "0\n", "0\r", "00", "+0", "-0", "0" * 40),
    *("0x0", "0x1", "0abc", "0.5", "0;1", "0 0", "0-1", "0:1", "4294967296"),
    *("0,", "0,,0", "0,1", "0,7", "0,7,0", "0,-1,0", "0,1,1", "0,1,0,2", "0,7,7", "0,gpu,0", "0,+", '0,"0"', "0,MIG-x"),
    *(UUID, UUID.replace(HEX, HEX.upper()), UUID[:5], UUID[:6], UUID[:12], UUID[:16]),
    *("GPU-" + HEX.replace("-", ""), "GPU-" + HEX.replace("-", "")[:11], "GPU-62e-9b7", "GPU--" + HEX),
    *(UUID + " ", UUID + "x", UUID + "0", UUID + "/0/0", "GPU-62e9b7ab-dfc-", "GPU-62e9,"),
    *("0," + UUID, UUID + ",0", UUID + ",7", UUID + ",x", UUID + ", " + UUID[:9], UUID + ",GPU-62e9bz"),
    *(UUID + ",GPU-dead", UUID + ",GPU-dead," + UUID, "MIG-" + HEX),
)
SELECTS_NOTHING = (
    *("", " ", ",0", "7", "7,0", "-1", "-1,0", "gpu0", "NoDevFiles", "all", "none", "void", "+", "-", "cuda:0", "[0]"),
    *("'0'", '"0"', "\uff10", "4294967295", "2147483648", "-2147483648", "99999999999999999999"),
    *("GPU-deadbeef", "GPU-", "GPU", "GPU-g", "GPU-62e9x", "GPU-62e9 ", "GPU-62e9/1", "GPU-62e9\n", "GPU-62e9b7ab_"),
    *("gpu-" + HEX, " " + UUID, HEX, "GPU- " + HEX, "GPU-0x" + HEX, '"' + UUID + '"', "GPU" + HEX.replace("-", "")),
    *("GPU-dead," + UUID, "7," + UUID, "MIG-", "MIG", "MIG-0"),
)
DUPLICATES = ("0,0", "0,00", "0, 0", "0,0,-1", "0,4294967296", UUID + "," + UUID, UUID[:10] + "," + UUID)


@each("value", SELECTS_GPU)
def test_values_that_select_the_gpu(value: str) -> None:
    visible = visible_devices(value, (UUID,))
    assert (visible.indices, visible.error, visible.known) == ((0,), 0, True)


@each("value", SELECTS_NOTHING)
def test_values_that_select_no_gpu(value: str) -> None:
    visible = visible_devices(value, (UUID,))
    assert (visible.count, visible.error) == (0, 100)
    assert visible.why
    assert visible.dropped


@each("value", DUPLICATES)
def test_duplicate_id_is_an_error(value: str) -> None:
    assert visible_devices(value, (UUID,)).error == 101


@each(
    ("value", "indices", "why"),
    [
        ("1,0", (1, 0), ""),
        ("0,2,-1,1", (0,), "no-such-index"),
        ("1,-1,0", (1,), "negative"),
        ("1,,0", (1,), "empty"),
        ("1,x", (1,), "not-a-number"),
        ("1," + UUID, (1,), "mixed"),
        (UUID + ",0", (0,), "mixed"),
        ("GPU-62", (), "ambiguous"),
        ("GPU-620,GPU-62", (1,), "ambiguous"),
        ("GPU-62e,GPU-7", (0,), "no-such-uuid"),
    ],
)
def test_parsing_stops_at_the_first_invalid_id(value: str, indices: tuple[int, ...], why: str) -> None:
    visible = visible_devices(value, TWO)
    assert (visible.indices, visible.why) == (indices, why)


def test_mig_device_is_selected_by_its_uuid() -> None:
    assert visible_devices(MIG, (UUID,), (MIG,)).mig == (0,)
    assert visible_devices("MIG-41b3", (UUID,), (MIG,)).mig == (0,)
    assert visible_devices("MIG-ff", (UUID,), (MIG,)).why == "no-such-uuid"


@each("value", ["GPU-ff", f"MIG-{UUID}/1/0"])
def test_value_that_depends_on_an_unknown_uuid_is_not_judged(value: str) -> None:
    visible = visible_devices(value, ("",))
    assert (visible.known, visible.error) == (False, 0)


def indices_by_torch(value: str, uuids: tuple[str, ...]) -> list[int]:
    """The GPUs that torch considers visible, as its ``device_count()`` counts them with NVML."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getenv", {"CUDA_VISIBLE_DEVICES": value}.get)
        devices = torch_cuda._parse_visible_devices()
        if devices and isinstance(devices[0], str):
            devices = torch_cuda._transform_uuid_to_ordinals(devices, list(uuids))
    end = next((position for position, index in enumerate(devices) if index >= len(uuids)), len(devices))
    return list(devices[:end])


NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "7", " 1", "2 ", "+1", "-1", "-2", "", "x", "1x", "03", "0x1", "\t0", "gpu0"]
)
NAMES = st.sampled_from([*TWO, UUID[:9], "GPU-620", "GPU-62", "GPU-ff", "0", "", "x", UUID[:7]])
FOUR = (*TWO, "GPU-aa000000-0000-4000-8000-000000000000", "GPU-bb000000-0000-4000-8000-000000000000")


def has_duplicates(tokens: list[str]) -> bool:
    ids = [int(number[0]) if (number := re.match(r"\s*[+-]?\d+", token)) else token for token in tokens]
    return len(set(ids)) < len(ids)


@given(st.lists(NUMBERS, max_size=5) | st.lists(NAMES, max_size=5))
def test_torch_agrees_unless_an_id_is_duplicated(tokens: list[str]) -> None:
    value = ",".join(tokens)
    ours = visible_devices(value, FOUR)
    theirs = indices_by_torch(value, FOUR)
    # torch sees no GPU if an ID is duplicated, even after the point where the driver stops parsing
    assert theirs == list(ours.indices) or (theirs == [] and has_duplicates(tokens))


@each(
    "value", ["0,7,0", "0,1,1", "4294967296", UUID + "x", UUID.replace(HEX, HEX.upper()), "GPU-" + HEX.replace("-", "")]
)
def test_values_on_which_torch_and_the_driver_differ(value: str) -> None:
    """torch counts no device on a machine with one GPU, and the driver selects it: observed with torch 2.11."""
    assert indices_by_torch(value, (UUID,)) == []
    assert visible_devices(value, (UUID,)).indices == (0,)


@given(st.text(max_size=20), st.integers(0, 3))
def test_any_value_can_be_parsed(value: str, count: int) -> None:
    visible = visible_devices(value, FOUR[:count])
    assert (visible.error == 0) == (visible.count > 0)
    assert set(visible.indices) <= set(range(count))


@each(("value", "why"), [("9" * 5000, "negative"), ("-" + "9" * 5000, ""), ("²", "not-a-number")])
def test_number_of_any_length_is_parsed_as_by_the_driver(value: str, why: str) -> None:
    assert visible_devices(value, ("",)).why == why


def test_leading_zeros_are_ignored() -> None:
    assert visible_devices("0" * 5000 + "1", ("", "")).indices == (1,)
