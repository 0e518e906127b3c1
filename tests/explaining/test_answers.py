"""The numbers and names of a text are used, and advice that is wrong for the case is called so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transload
from transload.explaining import Answer
from transload.explaining.hooks import prefix_between


def answer(text: str) -> Answer:
    (found,) = transload.explain(text, checks=False).answers
    return found


def told(text: str) -> str:
    found = answer(text)
    return " ".join((found.cause, *found.fix, found.wrong))


@pytest.mark.parametrize(
    ("index", "count", "words", "target"),
    [(1, 1, "has one, cuda:0", "cuda:0"), (3, 2, "has 2, cuda:0 and cuda:1", "cuda:0"), (0, 0, "has none", "cpu")],
)
def test_devices_are_counted(index: int, count: int, words: str, target: str) -> None:
    found = answer(
        f"RuntimeError: Attempting to deserialize object on CUDA device {index} but "
        f"torch.cuda.device_count() is {count}."
    )
    assert f"CUDA device {index}" in found.cause
    assert words in found.cause
    assert f'map_location="{target}"' in " ".join(found.fix)
    assert dict(found.values)["index"] == str(index)


@pytest.mark.parametrize(
    ("number", "cuda", "index"),
    [
        (12080, "CUDA 12.8", "whl/cu126"),
        (11040, "CUDA 11.4", "whl/cu118"),
        (10010, "CUDA 10.1", "as the driver"),
    ],
)
def test_the_version_of_a_driver_is_read(number: int, cuda: str, index: str) -> None:
    text = told(f"RuntimeError: The NVIDIA driver on your system is too old (found version {number}). Please update")
    assert cuda in text
    assert index in text


def test_a_driver_that_tells_no_version() -> None:
    assert "did not report its version" in told("The NVIDIA driver on your system is too old (found version 0).")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X with CUDA capability sm_120 is not compatible with the current PyTorch installation.", "whl/cu128"),
        ("X with CUDA capability sm_61 is not compatible with the current PyTorch installation.", "whl/cu126"),
        ("X with CUDA capability sm_89 is not compatible with the current PyTorch installation.", "--upgrade torch"),
        (
            "Found GPU0 Tesla K80 which is of cuda capability 3.7. PyTorch no longer supports this GPU because",
            "torch 2.0",
        ),
        ("Found GPU0 GTX 1080 which is of compute capability (CC) 6.1.\nThe following list", "capability is 6.1"),
    ],
)
def test_a_card_without_code_gets_a_torch_that_has_some(text: str, words: str) -> None:
    assert words in told(f"UserWarning: {text}")


OPERAND = "_pickle.UnpicklingError: Weights only load failed. {}WeightsUnpickler error: Unsupported operand {}"
SUCCEED = "Re-running `torch.load` with `weights_only` set to `False` will likely succeed. "


@pytest.mark.parametrize(
    ("operand", "words"),
    [
        (60, "HTML"),
        (118, "Git LFS"),
        (123, "JSON"),
        (31, "gzip"),
        (80, "zip archive"),
        (64, "safetensors"),
        (37, "'%'"),
    ],
)
def test_what_is_no_pickle_is_named_and_torchs_advice_is_called_wrong(operand: int, words: str) -> None:
    found = answer(OPERAND.format(SUCCEED, operand))
    assert words in found.cause
    assert "weights_only=False does not help" in found.wrong


def test_a_newer_protocol_is_a_pickle() -> None:
    found = answer(OPERAND.format(SUCCEED, 149))
    assert "newer protocol" in found.cause
    assert not found.wrong


def test_a_letter_that_pickles_have_is_not_taken_for_a_beginning() -> None:
    assert "Either the pickle" in answer(OPERAND.format(SUCCEED, ord("i"))).cause


@pytest.mark.parametrize(
    ("key", "words"),
    [("<", "HTML"), ("v", "Git LFS"), ("\\x1f", "gzip"), ("{", "JSON"), ("\\x00", "GGUF"), ("E", "wrong name")],
)
def test_a_load_key_is_the_beginning_of_something(key: str, words: str) -> None:
    assert words in answer(f"_pickle.UnpicklingError: invalid load key, '{key}'.").cause


GLOBAL = "WeightsUnpickler error: Unsupported global: GLOBAL {} was not an allowed global by default. Please use"


def test_a_dangerous_name_is_never_to_be_allowed() -> None:
    found = answer(GLOBAL.format("builtins.eval"))
    assert "Do not load it" in found.fix[0]
    assert "would run the attack" in found.wrong
    assert not any("add_safe_globals" in line for line in found.fix)


def test_a_cut_name_is_a_cut_file() -> None:
    found = answer(GLOBAL.format("collections.OrderedDic"))
    assert "cut off" in found.cause
    assert "nothing to allow" in found.wrong


def test_another_name_can_be_allowed() -> None:
    found = answer(GLOBAL.format("argparse.Namespace"))
    assert "| torch.serialization.add_safe_globals([argparse.Namespace])" in found.fix
    assert "weights_only=False is not the fix" in found.wrong


def test_a_name_that_is_no_name_is_not_put_into_code() -> None:
    found = answer(GLOBAL.format("a.b]);evil([c"))
    assert "| torch.serialization.add_safe_globals([TheClass])" in found.fix


@pytest.mark.parametrize(
    ("missing", "unexpected", "prefix"),
    [
        (["weight", "bias"], ["module.weight", "module.bias"], ("module.", True)),
        (["net.0.weight"], ["0.weight"], ("net.", False)),
        (["weight"], ["_orig_mod.weight"], ("_orig_mod.", True)),
        (["a.weight"], ["b.weight"], ("", False)),
        (["weight", "bias"], ["module.weight", "extra"], ("", False)),
        (["a", "b", "new"], ["module.a", "module.b", "module.old", "loss"], ("", False)),
        (["a", "b", "c", "new"], ["module.a", "module.b", "module.c", "module.old", "loss"], ("module.", True)),
        (["bn.weight"], ["module.bn.weight", "module.bn.num_batches_tracked"], ("module.", True)),
        (["module.bn.weight"], ["bn.weight", "bn.num_batches_tracked"], ("module.", False)),
        ([], ["module.weight"], ("", False)),
        (["weight"], [], ("", False)),
    ],
)
def test_a_prefix_is_found(missing: list[str], unexpected: list[str], prefix: tuple[str, bool]) -> None:
    assert prefix_between(missing, unexpected) == prefix


def test_a_prefix_is_found_before_the_names_of_a_batch_norm() -> None:
    """torch does not name num_batches_tracked among the missing keys."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        model.load_state_dict(state)
    (found,) = transload.explain(caught.value, checks=False).answers
    assert "begin with 'module.'" in found.cause


def test_a_checkpoint_given_whole_is_told() -> None:
    text = (
        'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "fc.weight". \n\t'
        'Unexpected key(s) in state_dict: "epoch", "state_dict", "optimizer". '
    )
    found = answer(text)
    assert "a whole checkpoint" in found.cause
    assert '| model.load_state_dict(checkpoint["state_dict"])' in found.fix


def test_numbers_that_torch_runs_together_are_explained() -> None:
    found = answer("RuntimeError: storage has wrong byte size: expected %ld got %ld39964000")
    assert "39964000" in found.wrong
    assert "4000 where 3996" in answer("RuntimeError: storage has wrong byte size: expected 3996 got 4000").cause


def test_an_unknown_error_of_cuda_is_not_blamed_on_a_variable() -> None:
    text = "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    assert "hardly ever" in answer(f"{text}CUDA_VISIBLE_DEVICES after program start. Setting the available").wrong


def test_an_archive_of_another_kind_is_not_called_corrupt() -> None:
    assert (
        "need not be" in answer("RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found").wrong
    )


@pytest.mark.parametrize(
    ("library", "words"), [("libcuda.so.1", "NVIDIA driver"), ("libcudnn.so.9", "of NVIDIA's packages")]
)
def test_a_library_of_the_driver_is_not_one_of_torchs(library: str, words: str) -> None:
    assert words in answer(f"ImportError: {library}: cannot open shared object file: No such file or directory").cause


@pytest.mark.parametrize("hostile", ["{0}", "{name.__class__}", "%s", "{", "}", "{{}}", "\x1b[2J", "a" * 5000])
def test_what_stands_in_a_blank_is_only_text(hostile: str) -> None:
    found = transload.explain(f"RuntimeError: Invalid device string: '{hostile}'", checks=False)
    assert all("__class__" not in each.cause or "{name.__class__}" in each.cause for each in found.answers)
    assert "\x1b" not in str(found)


def test_a_full_gpu_is_neither_the_file_nor_the_driver() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
    found = told(text)
    assert "2.00 GiB did not fit" in found
    assert "Neither the file nor the driver" in found
    assert 'map_location="cpu"' in found
    assert "transload.load_into" in found
    assert "nvidia-smi" in found
    assert answer("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)").code


def test_getattr_is_not_called_an_attack() -> None:
    """Python itself writes it for a method, a class within a class, and an enumeration."""
    text = told(
        "WeightsUnpickler error: Unsupported global: GLOBAL getattr was not an allowed global by default. Please use "
        "`torch.serialization.add_safe_globals([getattr])`"
    )
    assert "many honest files" in text
    assert "Do not allow getattr itself" in text
    assert "transload check FILE" in text


def test_a_part_of_torch_that_is_missing_is_none_of_the_users_classes() -> None:
    text = told("AttributeError: Can't get attribute '_rebuild_parameter_v3' on <module 'torch._utils' from 'x.py'>")
    assert "saved by a newer one" in text
    assert "Define the class" not in text


def test_what_a_wrapper_puts_into_the_middle_of_names_is_seen() -> None:
    text = told(
        "RuntimeError: Error(s) in loading state_dict for Lit:\n"
        '\tMissing key(s) in state_dict: "net.a.weight", "net.a.bias". \n'
        '\tUnexpected key(s) in state_dict: "net._orig_mod.a.weight", "net._orig_mod.a.bias". '
    )
    assert "'_orig_mod.' in their middle" in text
    assert 'k.replace("_orig_mod.", "")' in text


@pytest.mark.parametrize(
    ("why", "words", "cause"),
    [
        ("nvml error: driver not loaded", "no NVIDIA driver loaded", "K01"),
        ("load library failed: libnvidia-ml.so.1", "no library of NVIDIA's driver", "U06"),
        ("WSL environment detected but no adapters were found", "from Windows", "U08"),
        ("nvml error: driver/library version mismatch", "was updated", "U01"),
        ("something new", "does not answer", "K01"),
    ],
)
def test_why_a_container_got_no_gpu(why: str, words: str, cause: str) -> None:
    found = answer(f"nvidia-container-cli: initialization error: {why}: unknown")
    assert words in found.cause
    assert cause in found.causes


@pytest.mark.parametrize(
    ("name", "release"), [("weights_only", "1.13"), ("add_safe_globals", "2.4"), ("get_default_mmap_options", "")]
)
def test_from_which_release_on_torch_has_something(name: str, release: str) -> None:
    text = told(f"AttributeError: module 'torch.serialization' has no attribute '{name}' (weights_only)")
    assert f"uses {name}" in text
    assert ("or newer has it" in text) == bool(release)
    assert release in text


def test_the_cuda_of_an_image_is_named() -> None:
    text = "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver to a"
    assert "made for cuda>=12.8, and" in told(text)


def test_a_program_that_asks_for_a_gpu_too_many_is_told_how_many_there_are() -> None:
    asked = "ValueError: Invalid CUDA 'device=3' requested. Use 'device=cpu'\n\ntorch.cuda.is_available(): {}\n"
    found = answer(f"{asked.format(True)}torch.cuda.device_count(): 2\n")
    assert "CUDA device 3, and torch sees 2 in all" in found.cause
    assert "sees no GPU" in answer(f"{asked.format(False)}torch.cuda.device_count(): 0\n").cause


def test_the_advice_not_to_test_is_only_called_wrong_where_it_is_given() -> None:
    advice = "Torch is not able to use GPU; add --skip-torch-cuda-test to COMMANDLINE_ARGS variable"
    assert "only hides the problem" in answer(f"RuntimeError: {advice}").wrong
    assert not answer("RuntimeError: CUDA is not available").wrong


def test_the_folder_without_weights_is_named_without_the_full_stop() -> None:
    text = "OSError: Error no file named model.safetensors found in directory out/last."
    assert dict(answer(text).values)["folder"] == "out/last"


WHOLE = Path(__file__).parent.parent / "data" / "h200" / "whole_custom_module_cuda0.pt"


def test_names_are_to_be_allowed_only_where_that_was_said() -> None:
    text = f'm = torch.load("{WHOLE}", weights_only=False)'
    error = "AttributeError: Can't get attribute 'Net' on <module '__main__' from 'x.py'>"
    told = transload.explain(
        f'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n    {text}\n{error}\n'
    )
    file = told.answers[0].file
    assert file is not None
    assert len(file.fix) == 2
    assert file.fix[1].startswith("$ transload convert ")
    said = f"_pickle.UnpicklingError: Weights only load failed. Unsupported global: GLOBAL __main__.Net in {WHOLE}"
    file = transload.explain(said).answers[0].file
    assert file is not None
    assert file.fix[0].startswith("| import torch")


def test_a_file_named_far_away_in_a_log_is_another_errors() -> None:
    error = "RuntimeError: PytorchStreamReader failed finding central directory"
    near = transload.explain(f"loading {WHOLE}\n{error}\n")
    far = transload.explain(f"loading {WHOLE}\n" + "step 7 of 100, all is well\n" * 40 + f"{error}\n")
    assert [answer.file is not None for told in (near, far) for answer in told.answers] == [True, False]
