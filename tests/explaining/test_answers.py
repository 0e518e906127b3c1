"""Answers use the numbers and names in a text, and say when advice in it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transload
from transload.explaining import Answer
from transload.explaining.hooks import prefix_between


def answer(text: str) -> Answer:
    (result,) = transload.explain(text, checks=False).answers
    return result


def full_text(text: str) -> str:
    result = answer(text)
    return " ".join((result.cause, *result.fix, result.wrong))


@pytest.mark.parametrize(
    ("index", "count", "expected", "target"),
    [(1, 1, "has one, cuda:0", "cuda:0"), (3, 2, "has 2, cuda:0 and cuda:1", "cuda:0"), (0, 0, "has none", "cpu")],
)
def test_device_index_error_names_the_existing_devices(index: int, count: int, expected: str, target: str) -> None:
    result = answer(
        f"RuntimeError: Attempting to deserialize object on CUDA device {index} but "
        f"torch.cuda.device_count() is {count}."
    )
    assert f"CUDA device {index}" in result.cause
    assert expected in result.cause
    assert f'map_location="{target}"' in " ".join(result.fix)
    assert dict(result.values)["index"] == str(index)


@pytest.mark.parametrize(
    ("number", "cuda", "index"),
    [
        (12080, "CUDA 12.8", "whl/cu126"),
        (11040, "CUDA 11.4", "whl/cu118"),
        (10010, "CUDA 10.1", "as the driver"),
    ],
)
def test_driver_version_selects_the_wheel_index(number: int, cuda: str, index: str) -> None:
    text = full_text(
        f"RuntimeError: The NVIDIA driver on your system is too old (found version {number}). Please update"
    )
    assert cuda in text
    assert index in text


def test_driver_version_0_means_not_reported() -> None:
    assert "did not report its version" in full_text("The NVIDIA driver on your system is too old (found version 0).")


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_unsupported_card_gets_a_torch_that_supports_it(text: str, expected: str) -> None:
    assert expected in full_text(f"UserWarning: {text}")


OPERAND = "_pickle.UnpicklingError: Weights only load failed. {}WeightsUnpickler error: Unsupported operand {}"
SUCCEED = "Re-running `torch.load` with `weights_only` set to `False` will likely succeed. "


@pytest.mark.parametrize(
    ("operand", "expected"),
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
def test_operand_names_the_format_and_weights_only_false_is_called_wrong(operand: int, expected: str) -> None:
    result = answer(OPERAND.format(SUCCEED, operand))
    assert expected in result.cause
    assert "weights_only=False does not help" in result.wrong


def test_operand_of_a_newer_pickle_protocol_is_recognized() -> None:
    result = answer(OPERAND.format(SUCCEED, 149))
    assert "newer protocol" in result.cause
    assert not result.wrong


def test_operand_that_is_a_pickle_opcode_is_ambiguous() -> None:
    assert "Either the pickle" in answer(OPERAND.format(SUCCEED, ord("i"))).cause


@pytest.mark.parametrize(
    ("key", "expected"),
    [("<", "HTML"), ("v", "Git LFS"), ("\\x1f", "gzip"), ("{", "JSON"), ("\\x00", "GGUF"), ("E", "wrong name")],
)
def test_load_key_names_the_format(key: str, expected: str) -> None:
    assert expected in answer(f"_pickle.UnpicklingError: invalid load key, '{key}'.").cause


GLOBAL = "WeightsUnpickler error: Unsupported global: GLOBAL {} was not an allowed global by default. Please use"


def test_dangerous_global_must_not_be_allowed() -> None:
    result = answer(GLOBAL.format("builtins.eval"))
    assert "Do not load it" in result.fix[0]
    assert "would run the attack" in result.wrong
    assert not any("add_safe_globals" in line for line in result.fix)


def test_truncated_global_means_a_truncated_file() -> None:
    result = answer(GLOBAL.format("collections.OrderedDic"))
    assert "cut off" in result.cause
    assert "nothing to allow" in result.wrong


def test_harmless_global_can_be_allowed() -> None:
    result = answer(GLOBAL.format("argparse.Namespace"))
    assert "| torch.serialization.add_safe_globals([argparse.Namespace])" in result.fix
    assert "weights_only=False is not the fix" in result.wrong


def test_numpy_1_global_is_allowed_under_both_names() -> None:
    """numpy 2 has it in ``numpy._core``, and torch looks for the name in the file."""
    old = "numpy.core.multiarray.scalar"
    result = answer(GLOBAL.format(old))
    assert f'| torch.serialization.add_safe_globals([(numpy._core.multiarray.scalar, "{old}")])' in result.fix


@pytest.mark.parametrize(("name", "itself"), [("numpy._core.multiarray.scalar", True), ("__main__.Config", False)])
def test_name_that_transload_makes_itself_needs_no_trust(name: str, itself: bool) -> None:
    text = full_text(GLOBAL.format(name))
    assert ("this class is one of them" in text) == itself
    assert "transload inspect FILE lists all such names" in text
    assert "transload check FILE" not in text


def test_invalid_identifier_is_not_put_into_code() -> None:
    result = answer(GLOBAL.format("a.b]);evil([c"))
    assert "| torch.serialization.add_safe_globals([TheClass])" in result.fix
    assert not any("evil" in line for line in answer(GLOBAL.format("numpy.core.multiarray.B]);evil([C")).fix)


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
def test_prefix_between_missing_and_unexpected_keys(
    missing: list[str], unexpected: list[str], prefix: tuple[str, bool]
) -> None:
    assert prefix_between(missing, unexpected) == prefix


def test_prefix_is_found_in_a_model_with_batch_norm() -> None:
    """torch does not list num_batches_tracked among the missing keys."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        model.load_state_dict(state)
    (result,) = transload.explain(caught.value, checks=False).answers
    assert "begin with 'module.'" in result.cause


def test_complete_checkpoint_given_as_state_dict_is_recognized() -> None:
    text = (
        'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "fc.weight". \n\t'
        'Unexpected key(s) in state_dict: "epoch", "state_dict", "optimizer". '
    )
    result = answer(text)
    assert "a whole checkpoint" in result.cause
    assert '| model.load_state_dict(checkpoint["state_dict"])' in result.fix


def test_byte_sizes_that_torch_runs_together_are_explained() -> None:
    result = answer("RuntimeError: storage has wrong byte size: expected %ld got %ld39964000")
    assert "39964000" in result.wrong
    assert "4000 where 3996" in answer("RuntimeError: storage has wrong byte size: expected 3996 got 4000").cause


def test_cuda_unknown_error_is_not_blamed_on_cuda_visible_devices() -> None:
    text = "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    assert "hardly ever" in answer(f"{text}CUDA_VISIBLE_DEVICES after program start. Setting the available").wrong


def test_an_archive_of_another_kind_is_not_called_corrupt() -> None:
    assert (
        "need not be" in answer("RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found").wrong
    )


@pytest.mark.parametrize(
    ("library", "expected"), [("libcuda.so.1", "NVIDIA driver"), ("libcudnn.so.9", "of NVIDIA's packages")]
)
def test_missing_library_of_the_driver_or_of_nvidia_packages(library: str, expected: str) -> None:
    assert (
        expected in answer(f"ImportError: {library}: cannot open shared object file: No such file or directory").cause
    )


@pytest.mark.parametrize("hostile", ["{0}", "{name.__class__}", "%s", "{", "}", "{{}}", "\x1b[2J", "a" * 5000])
def test_hostile_values_are_neither_formatted_nor_printed_raw(hostile: str) -> None:
    explanation = transload.explain(f"RuntimeError: Invalid device string: '{hostile}'", checks=False)
    assert all("__class__" not in item.cause or "{name.__class__}" in item.cause for item in explanation.answers)
    assert "\x1b" not in str(explanation)


def test_out_of_memory_blames_neither_the_file_nor_the_driver() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
    shown = full_text(text)
    assert "2.00 GiB did not fit" in shown
    assert "Neither the file nor the driver" in shown
    assert 'map_location="cpu"' in shown
    assert "transload.load_into" in shown
    assert "nvidia-smi" in shown
    assert answer("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)").code


MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 15.77 GiB of "
    "which 9.88 MiB is free. {}Of the allocated memory 12.61 GiB is allocated by PyTorch, and {} is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
HERE = "Including non-PyTorch memory, this process has 15.75 GiB memory in use. "


@pytest.mark.parametrize(
    ("wanted", "reserved", "fragmented"),
    [
        ("20.00 MiB", "29.58 MiB", False),
        ("512.00 MiB", "3.02 GiB", True),
        ("2.00 GiB", "2.00 GiB", True),
        ("2.00 GiB", "900.00 MiB", False),
        ("2.00 MiB", "512 bytes", False),
        ("1.2.3 GiB", "1..2 GiB", False),
    ],
)
def test_unused_reserved_memory_is_called_fragmented(wanted: str, reserved: str, fragmented: bool) -> None:
    result = answer(MEMORY.format(wanted, HERE, reserved))
    assert ("fragmented" in result.cause) == fragmented
    assert any("PYTORCH_CUDA_ALLOC_CONF" in line and "expandable_segments" in line for line in result.fix) == fragmented
    assert wanted in result.cause


def test_memory_of_another_process_is_named() -> None:
    other = "Process 4242 has 9.62 GiB memory in use. "
    assert "another process holds memory" in answer(MEMORY.format("2.00 GiB", other + HERE, "1.00 GiB")).cause
    assert "another process" not in answer(MEMORY.format("2.00 GiB", HERE, "1.00 GiB")).cause
    # In a container this process has another number than the driver reports.
    assert "in a container" in answer(MEMORY.format("2.00 GiB", other, "1.00 GiB")).cause
    texts = MEMORY.format("2.00 GiB", HERE, "1.00 GiB"), MEMORY.format("3.00 GiB", other + HERE, "4.00 GiB")
    first, second = transload.explain(("\n" + "step 1\n" * 200).join(texts), checks=False).answers
    assert "another process" not in first.cause
    assert "fragmented" in second.cause
    assert "another process" in second.cause


def test_getattr_is_not_called_an_attack() -> None:
    """Python itself uses it to pickle methods, nested classes and enumerations."""
    text = full_text(
        "WeightsUnpickler error: Unsupported global: GLOBAL getattr was not an allowed global by default. Please use "
        "`torch.serialization.add_safe_globals([getattr])`"
    )
    assert "many honest files" in text
    assert "Do not allow getattr itself" in text
    assert "transload check FILE" in text


def test_missing_name_in_torch_means_a_newer_torch_saved_the_file() -> None:
    text = full_text(
        "AttributeError: Can't get attribute '_rebuild_parameter_v3' on <module 'torch._utils' from 'x.py'>"
    )
    assert "saved by a newer one" in text
    assert "Define the class" not in text


def test_orig_mod_in_the_middle_of_keys_is_recognized() -> None:
    text = full_text(
        "RuntimeError: Error(s) in loading state_dict for Lit:\n"
        '\tMissing key(s) in state_dict: "net.a.weight", "net.a.bias". \n'
        '\tUnexpected key(s) in state_dict: "net._orig_mod.a.weight", "net._orig_mod.a.bias". '
    )
    assert "'_orig_mod.' in their middle" in text
    assert 'k.replace("_orig_mod.", "")' in text


SHAPES = "\tsize mismatch for {}: copying a param with shape torch.Size([2]) from checkpoint, the shape in current "
KEYS = (
    "RuntimeError: Error(s) in loading state_dict for Net:\n"
    '\tMissing key(s) in state_dict: "a.weight". \n\tUnexpected key(s) in state_dict: "{}a.weight". \n'
)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_prefix_and_other_shapes_are_both_reported(prefix: str) -> None:
    alone, both = KEYS.format(prefix), KEYS.format(prefix) + SHAPES.format("b.weight") + "\n" + SHAPES.format("b.bias")
    assert f"begin with '{prefix}'" in answer(both).cause
    assert "tensors of another shape: 2" in answer(both).cause
    assert "transload.load_into(model, path, ignore_mismatched_sizes=True)" in full_text(both)
    assert "shape" not in full_text(alone)
    assert "transload.load_into(model, path) finds prefixes" in full_text(alone)


@pytest.mark.parametrize("start", ["Error(s) in loading state_dict for Net:\n\t", "RuntimeError: "])
def test_other_shapes_can_be_ignored_by_load_into(start: str) -> None:
    text = f"{start}{SHAPES.format('fc.weight').strip()} model is torch.Size([3])."
    assert "transload.load_into(model, path, ignore_mismatched_sizes=True)" in full_text(text)


@pytest.mark.parametrize(
    ("message", "expected", "cause"),
    [
        ("nvml error: driver not loaded", "no NVIDIA driver loaded", "K01"),
        ("load library failed: libnvidia-ml.so.1", "no library of NVIDIA's driver", "U06"),
        ("WSL environment detected but no adapters were found", "from Windows", "U08"),
        ("nvml error: driver/library version mismatch", "was updated", "U01"),
        ("something new", "does not answer", "K01"),
    ],
)
def test_container_error_names_its_cause(message: str, expected: str, cause: str) -> None:
    result = answer(f"nvidia-container-cli: initialization error: {message}: unknown")
    assert expected in result.cause
    assert cause in result.causes


@pytest.mark.parametrize(
    ("name", "release"), [("weights_only", "1.13"), ("add_safe_globals", "2.4"), ("get_default_mmap_options", "")]
)
def test_missing_feature_names_the_torch_release_that_has_it(name: str, release: str) -> None:
    text = full_text(f"AttributeError: module 'torch.serialization' has no attribute '{name}' (weights_only)")
    assert f"uses {name}" in text
    assert ("or newer has it" in text) == bool(release)
    assert release in text


def test_cuda_requirement_of_an_image_is_named() -> None:
    text = "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver to a"
    assert "made for cuda>=12.8, and" in full_text(text)


def test_invalid_device_number_shows_how_many_gpus_there_are() -> None:
    message = "ValueError: Invalid CUDA 'device=3' requested. Use 'device=cpu'\n\ntorch.cuda.is_available(): {}\n"
    result = answer(f"{message.format(True)}torch.cuda.device_count(): 2\n")
    assert "CUDA device 3, and torch sees 2 in all" in result.cause
    assert "sees no GPU" in answer(f"{message.format(False)}torch.cuda.device_count(): 0\n").cause


def test_skip_torch_cuda_test_is_called_wrong_only_where_it_is_advised() -> None:
    advice = "Torch is not able to use GPU; add --skip-torch-cuda-test to COMMANDLINE_ARGS variable"
    assert "only hides the problem" in answer(f"RuntimeError: {advice}").wrong
    assert not answer("RuntimeError: CUDA is not available").wrong


def test_folder_without_weights_is_named_without_the_full_stop() -> None:
    text = "OSError: Error no file named model.safetensors found in directory out/last."
    assert dict(answer(text).values)["folder"] == "out/last"


MODULE_FILE = Path(__file__).parent.parent / "data" / "h200" / "whole_custom_module_cuda0.pt"


def test_safe_globals_are_suggested_only_for_a_weights_only_error() -> None:
    statement = f'm = torch.load("{MODULE_FILE}", weights_only=False)'
    error = "AttributeError: Can't get attribute 'Net' on <module '__main__' from 'x.py'>"
    explanation = transload.explain(
        f'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n    {statement}\n{error}\n'
    )
    file = explanation.answers[0].file
    assert file is not None
    assert len(file.fix) == 2
    assert file.fix[1].startswith("$ transload convert ")
    weights_only_error = (
        f"_pickle.UnpicklingError: Weights only load failed. Unsupported global: GLOBAL __main__.Net in {MODULE_FILE}"
    )
    file = transload.explain(weights_only_error).answers[0].file
    assert file is not None
    assert file.fix[0].startswith("| import torch")


def test_file_named_far_from_an_error_is_not_checked_for_it() -> None:
    error = "RuntimeError: PytorchStreamReader failed finding central directory"
    near = transload.explain(f"loading {MODULE_FILE}\n{error}\n")
    far = transload.explain(f"loading {MODULE_FILE}\n" + "step 7 of 100, all is well\n" * 40 + f"{error}\n")
    assert [answer.file is not None for explanation in (near, far) for answer in explanation.answers] == [True, False]


SEEK = "AttributeError: '{}' object has no attribute 'seek'. You can only torch.load from a file that is seekable."


@pytest.mark.parametrize(
    ("kind", "expected", "stream"),
    [("dict", "it is already loaded", False), ("NoneType", "no path", False), ("HTTPResponse", "neither a path", True)],
)
def test_what_torch_load_was_given_is_named(kind: str, expected: str, stream: bool) -> None:
    text = full_text(SEEK.format(kind))
    assert expected in text
    assert ("BytesIO" in text) == stream


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("<class 'str'>", "Load the file first"),
        ("<class 'pathlib.PosixPath'>", "Load the file first"),
        ("<class 'NoneType'>", "given nothing"),
        ("<class 'generator'>", "a sequence (generator)"),
        ("<class 'torch.nn.modules.module._IncompatibleKeys'>", "Do not assign its result"),
        ("<class '__main__.Net'>", "an object of the class Net"),
    ],
)
def test_what_load_state_dict_was_given_is_named(kind: str, expected: str) -> None:
    assert expected in full_text(f"TypeError: Expected state_dict to be dict-like, got {kind}.")


def test_shared_memory_without_permission_is_not_called_full() -> None:
    denied = (
        "n1:1:1 [0] NCCL WARN Call to shm_open failed : Permission denied\n"
        "n1:1:1 [0] NCCL WARN Error while creating shared memory segment nccl-shm-recv-3f (size 9637888)\n"
    )
    outer = "RuntimeError: NCCL error in ProcessGroupNCCL.cpp:290, unhandled system error"
    for text in (denied, denied + outer):
        assert "is not full" in answer(text).cause
        assert "--shm-size" not in full_text(text)
    assert "is full" in answer(denied.partition("\n")[2]).cause


ASSERTION = (
    "../aten/src/ATen/native/cuda/{}: kernel: block: [0,0,0], thread: [{},0,0] Assertion `{}` failed.\n"
    "RuntimeError: CUDA error: device-side assert triggered\n"
)


@pytest.mark.parametrize(
    ("file", "check", "expected"),
    [
        ("Loss.cu:242", "t >= 0 && t < n_classes", "A label is outside [0, n_classes)"),
        ("Indexing.cu:1141", "srcIndex < srcSelectDimSize", "An index is larger"),
        ("Loss.cu:94", "input_val >= zero && input_val <= one", "outside [0, 1]"),
        ("MyKernel.cu:7", "rows < limit", "failed on the GPU: rows < limit"),
    ],
)
def test_assertion_of_a_kernel_names_the_cause(file: str, check: str, expected: str) -> None:
    assert expected in answer(ASSERTION.format(file, 5, check)).cause


def test_device_side_assert_without_its_assertion_gets_the_general_answer() -> None:
    assert answer("RuntimeError: CUDA error: device-side assert triggered").code == "kernel-died"


@pytest.mark.parametrize("name", ["_orig_mod.a.weight", "module.a.weight", "net._orig_mod.a.weight"])
def test_prefix_of_a_wrapper_is_found_without_the_missing_keys(name: str) -> None:
    text = f'RuntimeError: Error(s) in loading state_dict for Net:\n\tUnexpected key(s) in state_dict: "{name}". '
    assert "Remove it" in full_text(text)
    assert "Remove it" not in full_text(text.replace(name, "a.weight"))


def test_id_of_the_hub_is_not_called_a_folder() -> None:
    text = "OSError: {} does not appear to have a file named pytorch_model.bin, tf_model.h5 or flax_model.msgpack."
    hub = full_text(text.format("stabilityai/stable-diffusion-2"))
    assert "The repository stabilityai/stable-diffusion-2 on the Hugging Face Hub" in hub
    assert "transload inspect FOLDER" not in hub
    for folder in ("./model", "/data/model", "out/checkpoint-500"):
        assert "transload inspect FOLDER" in full_text(text.format(folder))
