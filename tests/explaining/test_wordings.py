"""Every known error in every wording is found: alone, at the end of a traceback, and between the lines of a log."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from tests.each import for_each
from tests.explaining.wordings import WORDINGS, Wording

import transload
from transload.cli.main import COMMANDS
from transload.diagnose.rules import BY_CODE as DOCTOR
from transload.explaining import Answer, hooks
from transload.explaining import _Errors as Errors
from transload.explaining.logs import FlatText, Line
from transload.explaining.matching import KnownError, Page, beginning, known_errors, variant
from transload.explaining.matching import _pages as pages
from transload.explaining.matching import _parsed as parsed

if TYPE_CHECKING:
    import pytest

KNOWN = [known for _, known in known_errors()]
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/run.py", line 3, in <module>\n    main()\n'


@functools.cache
def answers(text: str) -> tuple[Answer, ...]:
    return tuple(transload.explain(text, checks=False).answers)


def codes(text: str) -> list[str]:
    return [answer.code for answer in answers(text)]


def test_each_wording_gets_its_code() -> None:
    def check(wording: Wording) -> None:
        assert codes(wording.text) == [wording.code]

    for_each(WORDINGS, check)


def test_wording_is_found_without_its_last_full_stop() -> None:
    def check(wording: Wording) -> None:
        assert codes(wording.text.removesuffix(".")) == [wording.code]

    for_each([wording for wording in WORDINGS if wording.text.endswith(".")], check)


def is_exception(wording: Wording) -> bool:
    return re.match(r"[\w.]+(?:Error|Exception): ", wording.text) is not None


BEGINNINGS = {
    "CUDA out of memory": "gpu-memory-full",
    "RuntimeError: CUDA out of memory.": "gpu-memory-full",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate": "gpu-memory-full",
    "cuda out of memory. tried to allocate 2.00": "gpu-memory-full",
    "Watchdog caught collective operation timeout": "collective-timeout",
    "Missing key(s) in state_dict": "state-dict-keys",
    "Unexpected key(s) in state_dict:": "state-dict-keys",
    "size mismatch for fc.weight": "state-dict-shape",
    "no kernel image is available": "no-kernel-image",
    "weights only load failed": "weights-only",
    "'dict' object has no attribute 'to'": "state-dict-is-no-model",
    "'dict' object has no attribute 'cuda'": "state-dict-is-no-model",
    "AttributeError: 'dict' object has no attribute 'eval'": "state-dict-is-no-model",
    "AttributeError: 'dict' object has no attribute 'parameters'": "state-dict-is-no-model",
    "'dict' object has no attribute 'state_dict'": "state-dict-is-no-model",
}


def test_beginning_of_a_wording_is_found_as_the_whole_text() -> None:
    def check(text: str) -> None:
        (answer,) = answers(text)
        assert answer.code == BEGINNINGS[text]
        assert_complete(answer)

    for_each(BEGINNINGS, check)
    assert dict(answers("size mismatch for fc.weight")[0].values) == {"name": "fc.weight"}


def test_beginning_that_other_programs_print_too_is_not_found() -> None:
    general = ("No such file or directory", "'NoneType' object has no attribute", "Failed to import", "out of memory")
    for text in (*general, "CUDA out of", "step 1\nCUDA out of memory\nstep 2", "size mismatch"):
        assert codes(text) == [], text


def test_every_beginning_gets_a_complete_answer() -> None:
    """Also if it ends before the values that the answer names."""

    def check(text: str) -> None:
        words = text.split()
        for count in {3, len(words) // 2}:
            errors = Errors()
            errors.merge(beginning([], [FlatText([Line(1, " ".join(words[:count]))])]))
            for answer, _ in errors.answers():
                assert_complete(answer)

    for_each([known.says[0].shown for known in KNOWN], check)


def test_exception_is_found_at_the_end_of_a_traceback() -> None:
    before = "2026-01-02 03:04:05 INFO epoch 3, loss 0.12\n"

    def check(wording: Wording) -> None:
        assert codes(f"{before}{TRACEBACK}{wording.text}\n") == [wording.code]

    for_each([wording for wording in WORDINGS if is_exception(wording)], check)


def test_every_known_error_has_a_wording_or_only_wraps_others() -> None:
    worded = {wording.code for wording in WORDINGS}
    unworded = [known for known in KNOWN if known.code not in worded]
    assert [known.code for known in unworded if known.role != "frame" or known.fix] == []


def test_every_known_error_is_well_formed() -> None:
    def check(known: KnownError) -> None:
        assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", known.code)
        assert all(wording.weight >= 8 or wording.whole_line for wording in known.says)
        assert set(known.doctor) <= DOCTOR.keys()
        assert set(known.needs) <= {"file", "install", "machine"}
        assert known.role in ("cause", "frame", "remark")
        if known.context or known.unless:
            re.compile(known.context + known.unless)
        assert known.cause or known.hook
        assert not known.hook or callable(getattr(hooks, known.hook, None))

    for_each(KNOWN, check)


def test_codes_are_unique() -> None:
    codes = [known.code for known in KNOWN]
    assert len(set(codes)) == len(codes) > 190


LOADING = 'Traceback (most recent call last):\n  File "/env/torch/serialization.py", line 9, in load\n    x\n'
GLOBAL = "WeightsUnpickler error: Unsupported global: GLOBAL {} was not an allowed global by default. Please use"
OPERAND = "_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported operand {}"
KEYS = (
    "Error(s) in loading state_dict for N:\n"
    '\tMissing key(s) in state_dict: "{}". \n\tUnexpected key(s) in state_dict: "{}". '
)
TAG = "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with {})"
CARD = "X with CUDA capability sm_{} is not compatible with the current PyTorch installation."
SECTIONS = {
    "windows-dll/fbgemm": '[WinError 126] Modul fehlt. Error loading "C:\\torch\\lib\\fbgemm.dll" or one of its',
    "windows-dll/function": '[WinError 127] Fehlt. Error loading "C:\\torch\\lib\\torch_python.dll" or one of its',
    "windows-dll/start": '[WinError 1114] Start misslungen. Error loading "C:\\torch\\lib\\c10.dll" or one of its',
    "windows-dll/processor": '[WinError 193] Keine Anwendung. Error loading "C:\\torch\\lib\\c10.dll" or one of its',
    **{
        f"not-seekable/{name}": f"'{kind}' object has no attribute 'seek'. You can only torch.load from a file that is"
        " seekable."
        for name, kind in {"none": "NoneType", "loaded": "dict", "value": "list", "object": "Response"}.items()
    },
    **{
        f"state-dict-kind/{name}": f"TypeError: Expected state_dict to be dict-like, got <class '{kind}'>."
        for name, kind in {
            "path": "str",
            "none": "NoneType",
            "result": "torch.nn.modules.module._IncompatibleKeys",
            "pairs": "generator",
        }.items()
    },
    "shared-memory/denied": "NCCL WARN Call to shm_open failed : Permission denied",
    "write-system-error/no-room": "write(): fd 3 failed with No space left on device",
    "load-no-file/denied": f"{LOADING}PermissionError: [Errno 13] Permission denied: 'x.pt'",
    "transformers-no-weights/hub": (
        "OSError: stabilityai/stable-diffusion-2 does not appear to have a file named pytorch_model.bin, tf_model.h5"
    ),
    "numpy-of-a-gpu-tensor/meta": (
        "TypeError: can't convert meta device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory"
        " first."
    ),
    "label-out-of-range/probability": "Assertion `target_val >= zero && target_val <= one` failed.",
    "device-tag-unknown/misspelled": TAG.format("gpu"),
    "device-tag-unknown/package": TAG.format("npu:0"),
    "legacy-wrong-size/run-together": "RuntimeError: storage has wrong byte size: expected %ld got %ld39964000",
    "operand/newer-protocol": OPERAND.format(149),
    "operand/either": OPERAND.format(ord("i")),
    "operand/not-a-pickle": OPERAND.format(60),
    **{
        f"load-key/{name}": f"_pickle.UnpicklingError: invalid load key, '{key}'."
        for name, key in {
            "html": "<",
            "git-lfs": "v",
            "json": "{",
            "gzip": "\\x1f",
            "empty-line": "\\x0a",
            "zip": "P",
            "zeros": "\\x00",
            "letter": "%",
            "other": "\\x99",
        }.items()
    },
    "class-not-defined/cut-off": "AttributeError: Can't get attribute 'OrderedDic' on <module 'collections' from 'x'>",
    "class-not-defined/other-torch": "AttributeError: Can't get attribute '_new' on <module 'torch._utils' from 'x'>",
    "class-module-missing/numpy": f"{LOADING}ModuleNotFoundError: No module named 'numpy._core'",
    "class-module-missing/torchscript": f"{LOADING}ModuleNotFoundError: No module named '__torch__.net'",
    "python-2-text/damaged": (
        f"{LOADING}UnicodeDecodeError: 'ascii' codec can't decode byte 0x80 in position 0: ordinal not in range(128)"
    ),
    "name-not-allowed/getattr": GLOBAL.format("getattr"),
    "name-not-allowed/dangerous": GLOBAL.format("builtins.eval"),
    "name-not-allowed/not-data": GLOBAL.format("torch.some.thing.evaluate"),
    "name-not-allowed/cut-off": GLOBAL.format("collections.OrderedDic"),
    "state-dict-keys/prefix-in-file": KEYS.format("a", "module.a"),
    "state-dict-keys/prefix-in-model": KEYS.format("net.a", "a"),
    "state-dict-keys/whole": KEYS.format("a", "epoch"),
    "state-dict-keys/whole-named": KEYS.format("a", "state_dict"),
    "state-dict-keys/infix": KEYS.format("net.a", "net._orig_mod.a"),
    "state-dict-is-no-model/moved": "AttributeError: 'dict' object has no attribute 'to'",
    "gpu-memory-full/fragmented": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. Of the allocated memory 14.61 GiB is "
        "allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated."
    ),
    "safetensors-header-json/dtype": (
        "SafetensorError: Error while deserializing header: invalid JSON in header: unknown variant `F4`, expected"
    ),
    **{
        f"driver-too-old/{name}": f"The NVIDIA driver on your system is too old (found version {version})."
        for name, version in {"no-version": 0, "wheel": 12080, "no-wheel": 9020}.items()
    },
    "card-without-code/blackwell": CARD.format(120),
    "card-without-code/turing": CARD.format(89),
    "card-without-code/maxwell": CARD.format(61),
    "card-without-code/older": CARD.format(37),
    "app-no-gpu/device-index": (
        "ValueError: Invalid CUDA 'device=3' requested. Use 'device=cpu'\n\n"
        "torch.cuda.is_available(): True\ntorch.cuda.device_count(): 2\n"
    ),
    "app-no-gpu/skip-test": (
        "RuntimeError: Torch is not able to use GPU; add --skip-torch-cuda-test to COMMANDLINE_ARGS variable"
    ),
    "app-no-gpu/trainer": "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want",
    "app-no-gpu/lightning": "MisconfigurationException: No supported gpu backend found!",
    "transformers-no-weights/safetensors": "OSError: Error no file named model.safetensors found in directory ./model.",
    "transformers-no-weights/resume": "ValueError: Can't find a valid checkpoint at out/checkpoint-9",
    "package-missing/psutil": (
        'Traceback (most recent call last):\n  File "/env/deepspeed/utils.py", line 9, in see\n    x\n'
        "ImportError: Unable to import 'psutils', please install package"
    ),
    "lightning-checkpoint/on-instance": (
        "TypeError: The classmethod `Net.load_from_checkpoint` cannot be called on an instance. Please call it"
    ),
    "lightning-checkpoint/class-blocked": (
        "ValueError: The class a.B requested by the checkpoint does not resolve to an already imported subclass of c.D "
        "and was blocked to prevent arbitrary code execution"
    ),
    "vllm-tensor-parallel/no-pipeline": (
        "NotImplementedError: Pipeline parallelism is not supported for this model. "
        "Supported models implement the `SupportsPP` interface."
    ),
    "backend-not-built/nccl": "RuntimeError: Distributed package doesn't have NCCL built in",
    "forked-cuda/notebook": (
        "ValueError: To launch a multi-GPU training from your notebook, you need to avoid running any instruction "
        "using `torch.cuda` in any cell. Please restart your notebook"
    ),
    "toolkit-of-another-version/deepspeed": (
        "CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 11.5 does not match the version torch "
        "was compiled with 12.4, unable to compile cuda/cpp extensions without a matching cuda version."
    ),
    **{
        f"nccl-error/{name}": f"DistBackendError: NCCL error in: /x.cpp:1691, {words}, NCCL version 2.19.3"
        for name, words in {
            "system": "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "cuda": "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "internal": "internal error - please report this issue to the NCCL developers",
        }.items()
    },
    "port-in-use/certain": (
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    ),
    "library-missing/driver": "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
    **{
        f"container-start/{name}": f"nvidia-container-cli: initialization error: {why}: unknown"
        for name, why in {
            "driver-not-loaded": "nvml error: driver not loaded",
            "no-library": "load library failed: libnvidia-ml.so.1",
            "wsl": "WSL environment detected but no adapters were found",
            "version-mismatch": "nvml error: driver/library version mismatch",
            "unknown-error": "nvml error: unknown error",
            "permission": "permission denied",
        }.items()
    },
    "torch-not-found/offered": (
        "ERROR: Could not find a version that satisfies the requirement torch==1.4.0 (from versions: 2.5.0, 2.15.0)"
    ),
    "conda-conflict/python": (
        "LibMambaUnsatisfiableError: Encountered problems while solving:\n  - package "
        "pytorch-1.5.0-cpu_py37hd91cbb3_0 requires python >=3.7,<3.8.0a0, but none of the providers can be installed"
    ),
    "conda-conflict/system": (
        "UnsatisfiableError: The following specifications were found to be incompatible with your system:\n\n"
        "  - feature:/linux-64::__glibc==2.31=0\n  - pytorch==2.0.1 -> __cuda[version='>=11.8']"
    ),
    **{
        f"conda-not-found/{name}": (
            "PackagesNotFoundError: The following packages are not available from current channels:\n\n"
            f"  - {package}\n\nCurrent channels:\n\n  - https://conda.anaconda.org/pytorch/{platform}\n"
        )
        for name, package, platform in (
            ("name", "torch", "win-64"),
            ("32-bit", "pytorch", "win-32"),
            ("mac", "cudatoolkit=11.3", "osx-64"),
            ("cudatoolkit", "cudatoolkit=11.7", "win-64"),
        )
    },
    "install-proxy/password": (
        "Retrying (Retry(total=0)) after connection broken by 'OSError('Tunnel connection failed: 407 Proxy "
        "Authentication Required')': /simple/torch/"
    ),
}


def test_every_section_of_a_page_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def recorded(name: str) -> dict[str, Any]:
        used.append(name)
        return variant(name)

    monkeypatch.setattr("transload.explaining.matching.variant", recorded)
    for name, text in SECTIONS.items():
        used.clear()
        (answer,) = transload.explain(text, checks=False).answers
        assert name in used
        assert_complete(answer)
    assert SECTIONS.keys() == {name for known in KNOWN for name, _ in known.sections}


def test_sections_replace_only_fields_of_a_page() -> None:
    for known in KNOWN:
        for name, fields in known.sections:
            assert name.startswith(f"{known.code}/")
            assert known.hook or "where" in fields
            assert fields.keys() & {"cause", "fix", "wrong"}
            assert fields.keys() <= {"cause", "fix", "wrong", "doctor", "where"}
            assert set(fields.get("doctor", ())) <= DOCTOR.keys()


def test_patterns_of_a_page_refer_to_its_placeholders() -> None:
    for known in KNOWN:
        placeholders = {"text", *(name for wording in known.says for name in wording.pattern.groupindex)}
        for line in known.value:
            name, placeholder, pattern, _ = line.split(" ", 3)
            assert known.hook or placeholder in placeholders
            placeholders |= {name, *re.compile(pattern).groupindex}
        for _, fields in known.sections:
            placeholder, pattern = fields.get("where", "text .").split(" ", 1)
            assert known.hook or placeholder in placeholders
            re.compile(pattern)


def test_every_answer_is_complete() -> None:
    """Every placeholder is filled, and every error has a fix."""
    for_each(WORDINGS, assert_wording_complete)


def assert_wording_complete(wording: Wording) -> None:
    (answer,) = answers(wording.text)
    assert_complete(answer)


def assert_complete(answer: Answer) -> None:
    texts = (answer.cause, *answer.fix, answer.wrong)
    assert answer.cause.endswith((".", ")"))
    assert answer.fix
    for text in texts:
        assert not re.search(r"\{[a-z]+\}| \(\)|''|  |(?<!\()\bNone\b", text.removeprefix("| ").removeprefix("$ ")), (
            text
        )


def test_commands_in_fixes_exist() -> None:
    fixes = "\n".join(line for wording in WORDINGS for answer in answers(wording.text) for line in answer.fix)
    named = set(re.findall(r"\btransload ([a-z]+)\b", fixes))
    assert {"inspect", "check", "retag", "doctor"} <= named
    assert named <= COMMANDS.keys()


def test_python_in_fixes_compiles() -> None:
    lines = {(answer.code, line) for wording in WORDINGS for answer in answers(wording.text) for line in answer.fix}
    python = [(code, line[2:]) for code, line in lines if line.startswith("| ")]
    for_each(sorted(python), lambda case: compile(case[1], case[0], "exec"))


def test_short_wording_counts_only_in_frames_of_its_module() -> None:
    raised = 'Traceback (most recent call last):\n  File "{}", line 1, in call\n    raise\nValueError: {}\n'
    module, elsewhere = "C:\\env\\torch\\distributed\\checkpoint\\_nested_dict.py", "/env/flatten/nested.py"
    short, long = "duplicated flatten key a.b", "Non-blocking copy requires that the current accelerator is available."
    assert codes(raised.format(module, short)) == ["dcp-duplicate-name"]
    assert codes(raised.format(elsewhere, short)) == []
    assert codes(raised.format(elsewhere, long)) == ["dcp-staging"]


def test_error_raised_in_user_code_is_not_attributed_to_torch() -> None:
    raised = 'Traceback (most recent call last):\n  File "{}", line 1, in f\n  File "{}", line 2, in g\n    x\n'
    torch, own = "/env/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "/home/me/model.py"
    assert codes(f"{raised.format(own, torch)}AssertionError: Expected DTensor, got int\n") == ["fsdp-internal"]
    assert codes(f"{raised.format(torch, own)}AssertionError: Expected DTensor, got int\n") == []


def test_short_wording_in_a_log_needs_its_module_nearby() -> None:
    module, text, lines = "torch/distributed/checkpoint: saving", "duplicated flatten key a.b", "step 1 loss 0.1\n" * 50
    assert codes(f"{lines}{module}\n{text}\n{lines}") == ["dcp-duplicate-name"]
    assert codes(f"{module}\n{lines}{text}\n{lines}") == []


def test_every_wording_contains_a_hint_of_its_page() -> None:
    def check(page: Page) -> None:
        for wording in parsed(page).says:
            shown = wording.shown.replace("…", "7")
            assert any(hint in shown for hint in page.hints)

    for_each(list(pages()), check)
