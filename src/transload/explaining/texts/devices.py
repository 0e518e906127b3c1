"""Texts about devices: tags that lead nowhere here, names that are none, tensors that are apart."""

from __future__ import annotations

from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE"]

_TO_CPU = '| obj = torch.load(path, map_location="cpu")'
_RETAG = "Or change the file once, so that plain torch.load(path) works: transload retag FILE --to cpu."
_LAND = "transload.load(path) lands it on what is here, without a map_location."
_DTYPES_APART = (
    r"Input type \((?:torch\.cuda\.\w+\) and weight type \(torch\.cuda\.|"
    r"torch\.(?!cuda)\w+\) and weight type \(torch\.(?!cuda)|MPS\w+\) and weight type \(MPS|(?!torch|MPS))"
)
"""The same words where the two differ in dtype, not in device."""
_PACKAGES = {
    "npu": "torch_npu (Ascend)",
    "hpu": "habana_frameworks.torch (Gaudi)",
    "xla": "torch_xla",
    "ipu": "poptorch (Graphcore)",
    "mlu": "torch_mlu (Cambricon)",
    "dml": "torch_directml",
    "privateuseone": "the package of the device's maker",
}


def _beyond(values: Values, _: str) -> dict[str, Any]:
    """How many there are, counted from 0."""
    count = int(values["count"])
    name = values["kind"].lower()
    here = {0: "none", 1: f"one, {name}:0"}.get(
        count, f"{count}, {name}:0 {'and' if count == 2 else 'to'} {name}:{count - 1}"
    )
    target = f"{name}:0" if count else "cpu"
    return {"values": {"name": name, "here": here, "target": target}}


def _untaught(values: Values, _: str) -> dict[str, Any]:
    """Which package knows such a device; or that the word is no device at all."""
    tag = values["tag"]
    kind = tag.partition(":")[0]
    if kind in ("cpu", "gpu", "GPU", "CPU", "cuda0", "cuda1"):
        right = "cpu" if kind.lower() == "cpu" else "cuda:0"
        return {
            "cause": "'{tag}' is not a place that torch.load knows: it was given as map_location, or stands in the "
            "file.",
            "fix": (f'Write it as torch spells it: map_location="{right}".', _RETAG),
        }
    package = _PACKAGES.get(kind)
    if package is None:
        return {}
    return {
        "values": {"package": package},
        "fix": ("To use that device, import its package before torch.load: {package}.", "Or do without it:", _TO_CPU),
    }


TABLE: tuple[Known, ...] = (
    Known(
        "cuda-not-available",
        ("Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",),
        "Tensors of the file were to go to a CUDA device (the one they were saved on, if the program names no "
        "map_location), and torch has no CUDA here. The file is fine; it need not have been saved on the CPU to be "
        "loaded there.",
        ("Load it onto the CPU:", _TO_CPU, _LAND, _RETAG),
        torch="1.0 and later",
        needs=("machine", "file"),
    ),
    Known(
        "device-not-available",
        ("Attempting to deserialize object on a {kind:w} device but torch.{module:w}.is_available() is False.",),
        "Tensors of the file were to go to a device of the kind {kind} (the one they were saved on, if the program "
        "names no map_location), and torch has none here.",
        ("Load it onto the CPU:", _TO_CPU, _LAND, _RETAG),
        torch="2.4 and later",
        needs=("file",),
    ),
    Known(
        "device-index",
        (
            (
                "Attempting to deserialize object on {kind:w} device {index:d} but torch.{module:w}.device_count() is "
                "{count:d}."
            ),
        ),
        "Tensors of the file were to go to {kind} device {index} (where they were saved, if the program names no "
        "map_location), and this process has {here}; they are counted from 0.",
        (
            "Say where it shall go instead:",
            '| obj = torch.load(path, map_location="{target}")',
            _LAND,
            "If the machine has more, a variable (CUDA_VISIBLE_DEVICES), the container or the scheduler hides them.",
        ),
        torch="1.0 and later",
        needs=("file",),
        causes=("E01", "E02", "E08", "M02"),
        work=_beyond,
    ),
    Known(
        "device-module-missing",
        ("The {kind:w} device module is not registered.", "HPU device module is not loaded"),
        "Tensors of the file were to go to a device that only another package teaches to torch, and no such package "
        "was imported.",
        ("Import the package of that device before torch.load, or do without it:", _TO_CPU, _RETAG),
        torch="2.1 and later",
        needs=("file",),
    ),
    Known(
        "device-tag-unknown",
        ("don't know how to restore data location of {storage:w} (tagged with {tag:w})",),
        "Nothing in this torch restores a tensor to '{tag}'.",
        ("Load it onto the CPU:", _TO_CPU, _RETAG),
        torch="1.0 and later",
        needs=("file",),
        work=_untaught,
    ),
    Known(
        "device-tag-unsaveable",
        ("don't know how to determine data location of {storage:w}",),
        "The tensor to be saved is on a device that torch.save has no tag for: its package is not imported.",
        ("Import the package of that device first, or save a copy from the CPU: tensor.cpu().",),
        torch="1.0 and later",
    ),
    Known(
        "device-not-built-in",
        ("Storage device not recognized: {device:w}",),
        "Tensors of the file were to go to '{device}', and this torch is not built for that device.",
        ("Load it onto the CPU:", _TO_CPU, _LAND, _RETAG),
        torch="seen in 2.13",
        needs=("file",),
    ),
    Known(
        "device-string",
        ("Invalid device string: '{device}'", "device type at start of device string: {device:w}"),
        "'{device}' is not how torch writes a device: it is cpu, cuda, cuda:0, mps, xpu:0 and the like. It stands in "
        "the program, or as a tag in the file that is loaded.",
        (
            "In the program: write it so. In a file, tags do not matter where a map_location is given:",
            _TO_CPU,
        ),
        needs=("file",),
    ),
    Known(
        "mps-float64",
        (
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.",
            "as the MPS framework doesn't support float64",
            "Trying to convert {dtype:w} to the MPS backend but it does not have support for that dtype",
            "Trying to convert {dtype:w} to the MPS backend but there is no mapping for it",
        ),
        "Apple's GPU has no float64, and a tensor of it was to go there.",
        (
            "Load onto the CPU, and make it float32 before it goes to the GPU:",
            _TO_CPU,
            '| tensor = tensor.float().to("mps")',
        ),
        torch="1.12 and later",
    ),
    Known(
        "devices-apart",
        (
            "Expected all tensors to be on the same device, but found at least two devices, {one:w} and {other:w}!",
            (
                "Expected all tensors to be on the same device, but got {which} is on {one:w}, different from other "
                "tensors on {other:w}"
            ),
            "Expected all tensors to be on the same device",
            "Tensor on device {one:w} is not on the expected device {other:w}!",
            "expected device {one:w} but got device {other:w}",
            "Expected object of device type {one:w} but got device type {other:w}",
            "Input type ({one:w}) and weight type ({other:w}) should be the same",
        ),
        "One operation was given tensors of two devices. It is not the loading: a state dict may be loaded from any "
        "device into a model on any other. The model and its input are apart, or a tensor was made, or taken out of a "
        "checkpoint, on another device than the model's.",
        (
            "Bring both to one device: model.to(device), and every input and every tensor used beside it as well.",
            "A constant inside a TorchScript or exported program stays where it was: export it again for this device.",
        ),
        torch="1.0 and later, in several wordings",
        unless=_DTYPES_APART,
    ),
    Known(
        "rng-state-moved",
        ("RNG state must be a torch.ByteTensor", "expected a torch.ByteTensor, but got {kind:w}"),
        "The saved state of the random numbers must be a tensor of bytes on the CPU; most often a map_location has "
        "moved it to a GPU.",
        (
            "Move it back when it is restored:",
            '| torch.set_rng_state(checkpoint["rng_state"].cpu())',
            'Or load everything with map_location="cpu": load_state_dict moves the weights itself.',
        ),
    ),
    Known(
        "adam-steps-moved",
        ("If capturable=False, state_steps should not be CUDA tensors",),
        "The step counts of Adam are on the GPU. torch 1.12.0 moved them there itself whenever an optimizer's state "
        "was loaded; in any other release the program did.",
        (
            "With torch 1.12.0: install 1.12.1 or newer.",
            (
                "Else move only what is not called step when the optimizer's state is moved by hand; "
                "optimizer.load_state_dict does it right."
            ),
        ),
    ),
    Known(
        "device-ordinal",
        (
            "invalid device ordinal",
            "cudaErrorInvalidDevice",
        ),
        "A program asks for a GPU beyond those it has. They are counted from 0 among those that CUDA_VISIBLE_DEVICES "
        "leaves: with one, there is only cuda:0.",
        (
            "Use cuda:0, or give the process more GPUs. For a checkpoint:",
            _TO_CPU,
        ),
        needs=("machine",),
        causes=("E08", "E02", "E03", "M02"),
    ),
    Known(
        "mig-one-instance",
        ("device >= 0 && device < num_gpus INTERNAL ASSERT FAILED",),
        "A program counts on more GPUs than CUDA gives it: with MIG, a process sees one instance only, however many "
        "CUDA_VISIBLE_DEVICES names.",
        ("Start one process per instance, each with one MIG-<uuid> in CUDA_VISIBLE_DEVICES.",),
        needs=("machine",),
        causes=("M02", "E02"),
    ),
    Known(
        "forked-cuda",
        ("Cannot re-initialize CUDA in forked subprocess",),
        "The parent process has used CUDA, and CUDA does not survive a fork; torch.cuda.is_available() alone is a use. "
        "It has nothing to do with the checkpoint or the driver.",
        (
            "Start workers by spawn, before anything else:",
            '| torch.multiprocessing.set_start_method("spawn")',
            (
                "Or keep CUDA out of the parent, and of datasets that DataLoader workers use: load there with "
                'map_location="cpu".'
            ),
            "Where the parent only asks whether there is a GPU, PYTORCH_NVML_BASED_CUDA_CHECK=1 asks without CUDA.",
        ),
        causes=("X01",),
    ),
    Known(
        "device-of-cuda-wanted",
        ("Expected a cuda device, but got: {device:w}",),
        "A function of torch.cuda was given the device {device}: the program went on to ask about GPUs after it had "
        "chosen {device}.",
        ('Ask only where there is one: if device.type == "cuda".',),
        torch="1.0 and later",
    ),
    Known(
        "half-on-cpu",
        ("\"{operation:w}\" not implemented for 'Half'",),
        "The weights are of half precision (float16), as they are for a GPU, and torch cannot do this operation "
        "({operation}) with them on the CPU.",
        (
            "Make them float32 on the CPU: model.float(), or torch_dtype=torch.float32 in from_pretrained.",
            "Or bfloat16, where memory is short. Newer releases of torch can do more of it in float16, too.",
        ),
        unless=r'"\w*(?:cuda|_mps|xpu)\w*" not implemented',
    ),
    Known(
        "ranks-on-one-gpu",
        ("Duplicate GPU detected : rank {one:d} and rank {other:d} both on CUDA device {address:w}",),
        "The processes of rank {one} and {other} use the same GPU: there are more processes than GPUs, or the program "
        "does not choose one for each, or loads a checkpoint onto the GPU that another rank had saved it from.",
        (
            "Before anything else on the GPU:",
            '| torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            'Load with map_location="cpu", and start no more processes than there are GPUs.',
        ),
        needs=("machine",),
        causes=("E08", "E02", "M02"),
    ),
)
