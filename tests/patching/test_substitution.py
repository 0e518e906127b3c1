from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import transload
from transload import patching
from transload.patching import devices
from transload.patching.devices import substitute

if TYPE_CHECKING:
    from tests.patching.conftest import Cards

torch = pytest.importorskip("torch")


@pytest.fixture
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", transload.LandingWarning)
        yield


@pytest.mark.usefixtures("no_cards", "_quiet")
@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", "cuda:1", 0, 7, -1, "xpu:1", "hpu", "mtia:0", torch.device("cuda:3")], ids=str
)
def test_absent_device_is_replaced_by_the_cpu(device: Any) -> None:
    with transload.patch():
        assert substitute(device) == torch.device("cpu")


@pytest.mark.usefixtures("no_cards")
@pytest.mark.parametrize(
    "device",
    ["cpu", "cpu:0", "meta", "nonsense", "cuda:x", "cuda:", "npu:0", "", None, -2, True, 1.5, torch.float16],
    ids=str,
)
def test_present_or_unknown_device_is_left_to_torch(device: Any) -> None:
    with transload.patch():
        assert substitute(device) is device


def test_tensor_is_not_a_device() -> None:
    tensor = torch.ones(2)
    with transload.patch():
        assert substitute(tensor) is tensor


def test_no_substitution_without_the_patch() -> None:
    assert substitute("cuda:7") == "cuda:7"


def test_existing_device_is_unchanged(cards: Cards) -> None:
    cards(2)
    with transload.patch():
        for device in ("cuda", "cuda:0", "cuda:1", 1, torch.device("cuda:1"), torch.device("cuda")):
            assert substitute(device) is device


@pytest.mark.parametrize(
    ("current", "rank", "expected"), [(0, "", 0), (1, "", 1), (0, "1", 1), (0, "3", 1), (1, "0", 1)]
)
def test_absent_index_is_replaced_by_the_gpu_of_this_process(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, current: int, rank: str, expected: int
) -> None:
    cards(2, current)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with (
        transload.patch(),
        pytest.warns(transload.LandingWarning, match=f"no cuda:5 here.* go to cuda:{expected} instead"),
    ):
        assert substitute("cuda:5") == torch.device("cuda", expected)


def test_substitute_stays_the_same_within_a_process(cards: Cards) -> None:
    """A model and its inputs must be on one device, whichever device became current in between."""
    cards(2, 0)
    with transload.patch():
        with pytest.warns(transload.LandingWarning):
            first = substitute("cuda:5")
        cards.monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert substitute("cuda:5") == first


def test_devices_are_counted_again_when_cuda_visible_devices_changes(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(2)
    with transload.patch():
        assert substitute("cuda:1") == "cuda:1"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert substitute("cuda:1") == "cuda:1"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with pytest.warns(transload.LandingWarning):
            assert substitute("cuda:1") == torch.device("cuda:0")


def test_devices_are_not_counted_again_once_cuda_is_initialized(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with transload.patch():
        assert substitute("cuda:1") == "cuda:1"
        monkeypatch.setattr(torch.cuda, "device_count", None)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert substitute("cuda:1") == "cuda:1"


def test_requested_device_replaces_absent_devices_only(cards: Cards) -> None:
    cards(2)
    with transload.patch("cpu"):
        assert substitute("cuda:1") == "cuda:1"
        with pytest.warns(transload.LandingWarning, match="go to cpu instead"):
            assert substitute("cuda:2") == torch.device("cpu")


def test_no_substitution_in_a_forked_process_that_cannot_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with transload.patch():
        assert substitute("cuda:1") == "cuda:1"


@pytest.mark.usefixtures("no_cards")
def test_all_absent_cuda_devices_give_one_warning_at_the_callers_line(data: Path) -> None:
    with transload.patch(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.nn.Linear(2, 2).to("cuda:1")
        torch.load(data / "h200" / "state_dict_cuda1.pt")
        torch.zeros(2, device="cuda:3").cuda()
    assert [(warning.category, warning.filename) for warning in caught] == [(transload.LandingWarning, __file__)]
    assert str(caught[0].message).startswith("there is no cuda:1 here; ")


def test_patch_with_a_device_that_is_missing_here_is_an_error(cards: Cards) -> None:
    cards(2)
    with pytest.raises(transload.NoDeviceError, match="there is no cuda:3 here, only cpu, cuda:0 and cuda:1"):
        transload.patch("cuda:3")
    assert devices.requested == ""
    cards.monkeypatch.setattr(torch.cuda, "current_device", None)  # CUDA is not initialized: the program may fork
    with transload.patch("cuda:1"):
        cards(0)
        with pytest.raises(transload.NoDeviceError):
            transload.patch("cuda")


@pytest.mark.parametrize("device", ["", ":", "cuda:", "cuda:x", "the gpu", 3, None])
def test_patch_with_an_invalid_device_is_an_error(device: Any) -> None:
    if device is None:
        device = ":1"
    with pytest.raises(transload.UsageError, match="is not a device"):
        transload.patch(device)


def test_warning_during_an_import_is_at_the_line_that_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "__name__ = 'torch.late'\nfrom transload.errors import LandingWarning, warn\nwarn('moved', LandingWarning)\n"
    (tmp_path / "imported_late.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    patching.when_imported("imported_late", lambda _: None)
    with pytest.warns(transload.LandingWarning, match="moved") as caught:
        __import__("imported_late")
    patching.undo()
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("no_cards")
def test_mps_takes_the_place_of_cuda_on_a_mac_and_what_it_lacks_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an mps that only says that it is there: no Mac was at hand."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1 << 34, raising=False)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 0)
    with warnings.catch_warnings(record=True) as said, transload.patch():
        warnings.simplefilter("always")
        for name in ("cuda:1", "cuda"):
            assert substitute(name) == torch.device("mps")
        assert substitute("mps") == "mps"
    (warning,) = said
    assert "It has no float64. PYTORCH_ENABLE_MPS_FALLBACK=1 lets the CPU run what else it lacks" in str(
        warning.message
    )
