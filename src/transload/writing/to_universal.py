"""Write a universal checkpoint of DeepSpeed, from which any number of ranks can resume; DeepSpeed is not needed.

Each trained parameter has a directory with the whole of its float32 weight and of each state of the optimizer. The
files are those of ``checkpoint/ds_to_universal.py`` in https://github.com/deepspeedai/DeepSpeed, with what the loaders
of all stages need: they read the weights from these directories only.
"""

from __future__ import annotations

import os
import re
from typing import Any

from transload.contents import tie_of
from transload.errors import ConvertError, UsageError
from transload.findings import join_names
from transload.io.atomic import DescriptorFile, refused_by_windows
from transload.nodes import Call, Dict, Global
from transload.writing.objects import Omission, Path
from transload.writing.to_dcp import mapping, read_back_folder, tensors_in, write_value
from transload.writing.transfer import ConversionJob, TargetTensor

_VERSION = "0.19.8"
"""The release of DeepSpeed whose files these are like."""

# Where training scripts put the weights and the optimizer, most specific first.
_WEIGHTS = ("module", "model", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_WIDER = {"float16": "float32", "bfloat16": "float32"}
_STATE = re.compile(r"\w{1,64}")
_MAX_NAME = 255  # bytes of a name on most file systems
# DeepSpeed fills as many groups of its optimizer as the file has. If we know none, this is more than anybody has.
_GROUPS = 64


class Universal:
    """An object as a universal checkpoint: ``files`` are the values by path below the directory.

    ``tag`` is the name of the directory below, ``entries`` are the tensors in the files, and ``expected`` those that a
    reader must find, by name. ``omitted`` are tensors that are left out, ``aliases`` further names of tensors that are
    stored once, ``dropped`` is what else is left out; ``versions`` is whether a state dict comes with the versions of
    its modules, which are not kept. ``ConvertError`` if the object has no weights.
    """

    def __init__(self, root: Any, strip: tuple[str, ...] = ()) -> None:
        self.omitted: list[Omission] = []
        self.aliases: list[tuple[str, str]] = []
        self.dropped: list[tuple[Path, Any]] = []
        self.notes: list[str] = []
        self._optimizer_key = ""
        self.files: dict[str, Any] = {}
        self.expected: dict[str, TargetTensor] = {}
        top = dict(mapping(root) or ())
        if strip and "param_shapes" in top:
            raise UsageError("prefixes cannot be stripped here: other parts of the checkpoint have the names, too")
        self._take_weights(root, top)
        optimizer = self._take_optimizer(top)
        config = dict(mapping(top.get("ds_config")) or ())
        zero = dict(mapping(config.get("zero_optimization")) or ())
        self._is_flat = zero.get("stage") == 3
        groups = self._groups(optimizer, strip)
        self._take_tied(groups)
        self._write_parameters(groups)
        self._write_settings(optimizer, top)
        self._write_model(top, groups)
        self.entries = [*dict.fromkeys(entry for node in self.files.values() for entry in tensors_in(node))]

    # -- the parts of the object

    def _take_weights(self, root: Any, top: dict[Any, Any]) -> None:
        """Take the weights out of the object; ``_others`` is what is between them."""
        key = next((key for key in _WEIGHTS if mapping(top.get(key))), None)
        node = top.pop(key) if key else root
        self.versions = type(node) is Call and bool(node.states)
        inside = dict(mapping(node) or ()) if key else top
        self._weights: dict[str, TargetTensor] = {
            name: node for name, node in inside.items() if type(node) is TargetTensor and type(name) is str
        }
        if not self._weights:
            what = f"there are no weights at the top, nor below {join_names(_WEIGHTS)}"
            fix = "--key names what contains them; --list shows what there is.\n"
            raise ConvertError(what, fix=f"{fix}Of a checkpoint with one file for each rank, name the folder.")
        for name in self._weights:
            del inside[name]
        self._others = inside if key else {}

    def _take_optimizer(self, top: dict[Any, Any]) -> dict[Any, Any]:
        """Take the state of the optimizer out of the object; empty if there is none."""
        for key in _OPTIMIZERS:
            node = top.get(key)
            if type(node) is list and len(node) == 1:
                node = node[0]
            inside = dict(mapping(node) or ())
            if mapping(inside.get("state")) is not None and type(inside.get("param_groups")) is list:
                del top[key]
                self._optimizer_key = key
                return inside
            if node is None:  # ZeRO keeps the optimizer elsewhere
                top.pop(key, None)
        return {}

    def _groups(self, optimizer: dict[Any, Any], strip: tuple[str, ...]) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer; sets ``_states`` to its states by name."""
        states = {key: dict(mapping(node) or ()) for key, node in mapping(optimizer.pop("state", None)) or ()}
        listed = [dict(mapping(group) or ()) for group in optimizer.get("param_groups", ())]
        ids, seen = [], set[Any]()
        for group in listed:
            keys = [key for key in _list(group.get("params")) if type(key) in (int, str) and key not in seen]
            ids.append([*dict.fromkeys(keys)])
            seen.update(keys)
        names = self._names(ids, [_list(group.get("param_names")) for group in listed], states, strip)
        groups = [[names[key] for key in group if key in names] for group in ids]
        for key, state in states.items():
            if key not in names:
                for inner, node in state.items():
                    self._leave_out((key, inner), node, f"no weight is known to be what the optimizer calls {key!r}")
        self._states = {names[key]: state for key, state in states.items() if key in names}
        if not any(groups):
            self.dropped += [((self._optimizer_key, str(key)), node) for key, node in optimizer.items()]
            optimizer.clear()
            self.notes.append("there is no state of the optimizer: DeepSpeed needs load_module_only=True to load it")
            return [self._trained()]
        if bare := [name for group in groups for name in group if name not in self._states]:
            self.notes.append(f"the optimizer has no state for these, which DeepSpeed may refuse: {join_names(bare)}")
        return groups

    def _leave_out(self, path: Path, node: Any, why: str) -> None:
        """Leave out a state of the optimizer."""
        entries = [*tensors_in(node)]
        self.omitted += [Omission(entry.name, why, lost=True) for entry in entries]
        if not entries:
            self.dropped.append(((self._optimizer_key, "state", *map(str, path)), node))

    def _names(
        self, groups: list[list[Any]], named: list[list[Any]], states: dict[Any, Any], strip: tuple[str, ...]
    ) -> dict[Any, str]:
        """The names of weights by what the optimizer calls them: a name, or a number and one of ``named``."""
        out: dict[Any, str] = {}
        left = {*self._weights}
        for ids, known in zip(groups, named, strict=True):
            for key, name in zip(ids, known if len(known) == len(ids) else ids, strict=True):
                prefix = next((each for each in strip if type(name) is str and name.startswith(each)), "")
                if type(name) is str and name[len(prefix) :] in left and key not in out:
                    out[key] = name[len(prefix) :]
                    left.remove(out[key])
        if out or len(groups) != 1:
            return out
        # Optimizers count the parameters that they were given: nearly always those of the model, in order.
        trained = self._trained()
        if len(groups[0]) != len(trained):
            return {}
        for key, name in zip(groups[0], trained, strict=True):
            for state in states.get(key, {}).values():
                if type(state) is TargetTensor and state.tensor.shape not in ((), self._weights[name].tensor.shape):
                    return {}
        self.notes.append("the optimizer numbers its parameters: these are taken to be those of the model, in order")
        return dict(zip(groups[0], trained, strict=True))

    def _trained(self) -> list[str]:
        """The weights that are trained parameters, as far as dtypes and names tell; of tied ones the first."""
        by_tie: dict[Any, str] = {}
        for name, entry in self._weights.items():
            if "float" in entry.dtype and name.rpartition(".")[2] not in _BUFFERS:
                by_tie.setdefault(tie_of(entry.tensor) or name, name)
        return [*by_tie.values()]

    def _take_tied(self, groups: list[list[str]]) -> None:
        """Take further names of trained parameters out of the weights."""
        trained = {name for group in groups for name in group}
        first = {tie_of(self._weights[name].tensor) or name: name for name in trained}
        for name in [name for name in self._weights if name not in trained]:
            kept = first.get(tie_of(self._weights[name].tensor))
            if kept is not None:
                self.aliases.append((name, kept))
                del self._weights[name]

    # -- the files

    def _write_parameters(self, groups: list[list[str]]) -> None:
        for group in groups:
            for name in [*group]:
                entry = self._weights.pop(name)
                states = self._states.get(name, {})
                if why := _why_no_folder(name):
                    group.remove(name)
                    for lost in (entry, *tensors_in([*states.values()])):
                        self.omitted.append(Omission(lost.name, why, lost=True))
                    continue
                wide = TargetTensor(entry.name, entry.tensor, _WIDER.get(entry.dtype, entry.dtype))
                self._write(f"zero/{name}/fp32.pt", wide)
                self.expected[f"module/{name}"] = wide
                for key, state in states.items():
                    self._write_state(name, key, state, entry)

    def _write_state(self, name: str, key: Any, state: Any, weight: TargetTensor) -> None:
        path = f"zero/{name}/{key}.pt"
        if key == "step":
            self.files[path] = state
        elif type(state) is TargetTensor and state.tensor.numel == weight.tensor.numel and _is_state(key):
            self._write(path, state)
        else:
            why = "DeepSpeed expects a state to have as many elements as the parameter"
            self._leave_out((name, key), state, why)
            return
        if type(state) is TargetTensor:
            self.expected[f"optimizer/state/{name}/{key}"] = state

    def _write(self, path: str, entry: TargetTensor) -> None:
        # The loader of stage 3 took only tensors for a long time, those of the others take only dictionaries.
        self.files[path] = entry if self._is_flat else Dict(["cat_dim", 0, "param", entry])

    def _write_settings(self, optimizer: dict[Any, Any], top: dict[Any, Any]) -> None:
        """Write what the optimizer has in common for all parameters."""
        settings = {key: node for key, node in optimizer.items() if key != "param_groups"}
        if scaler := settings.pop("loss_scaler", None):
            self.dropped.append(((self._optimizer_key, "loss_scaler"), scaler))
            if dict(mapping(scaler) or ()).get("cur_scale", 1.0) != 1.0:
                self.notes.append("DeepSpeed starts with a new loss scale: that is an object of its own")
        listed = []
        for number, node in enumerate(optimizer.get("param_groups", ())):
            group = {key: value for key, value in mapping(node) or () if key not in ("params", "param_names")}
            listed.append(Dict.of({**group, "params": [number]}.items()))
        if not listed:
            listed = [Dict(["params", [0] if not number else []]) for number in range(_GROUPS)]
        settings["param_groups"] = listed
        settings.setdefault("ds_version", top.get("ds_version", _VERSION))
        # Stage 3 has no step.pt.
        steps = (state["step"] for state in self._states.values() if "step" in state)
        first = [Dict(["step", step]) for step in [*steps][:1]]
        settings["optimizer_state_dict"] = Dict(["state", Dict.of(enumerate(first)), "param_groups", listed])
        self.files["zero/optimizer_state.pt"] = Dict.of(settings.items())

    def _write_model(self, top: dict[Any, Any], groups: list[list[str]]) -> None:
        """Write everything else: weights that are not trained, and what the training script saved."""
        weights = dict(self._others)
        for name, entry in self._weights.items():
            self.expected[f"module/{name}"] = entry
            weights[name] = entry
        size, ordered = Global("torch", "Size", 0), Global("collections", "OrderedDict", 0)
        shapes = []
        for group in groups:
            shape = Call(ordered, (), "reduce", 0)
            shape.items = []
            for name in group:
                whole = self.expected[f"module/{name}"].tensor.shape
                shape.items += [name, Call(size, (whole,), "reduce", 0)]
            shapes.append(shape)
        steps = top.get("global_steps", top.get("global_step"))
        steps = steps if type(steps) is int and 0 <= steps < 1 << 63 else 0
        self.tag = f"global_step{steps}_universal"
        model = {
            "dp_world_size": 1,
            "mp_world_size": 1,
            "skipped_steps": 0,
            "ds_version": _VERSION,
            "buffer_names": [],
            **top,
            "global_steps": steps,
            "param_shapes": shapes,
            "shared_params": Dict.of(dict(self.aliases).items()),
        }
        self.files["mp_rank_00_model_states.pt"] = Dict.of({"module": Dict.of(weights.items()), **model}.items())
        # For stage 3, which reads no weights from it.
        self.files["zero_pp_rank_0_mp_rank_00_model_states.pt"] = Dict.of({"module": Dict([]), **model}.items())


def _is_state(key: Any) -> bool:
    return type(key) is str and key != "fp32" and bool(_STATE.fullmatch(key))


def _why_no_folder(name: str) -> str:
    """Why no directory can have the name of a parameter, which DeepSpeed looks for; empty if one can.

    >>> _why_no_folder("fc.weight"), _why_no_folder("../a")
    ('', "its name, '../a', cannot be that of a directory")
    """
    unsafe = re.search(r'[/\\:\x00-\x1f\x7f*?"<>|\ud800-\udfff]', name) or name in ("", ".", "..", "optimizer_state.pt")
    if os.name == "nt" and refused_by_windows(name):
        unsafe = True
    if unsafe or len(name.encode(errors="replace")) > _MAX_NAME:
        return f"its name, {name[:80]!r}, cannot be that of a directory"
    return ""


def _list(node: Any) -> list[Any]:
    return node if type(node) is list else []


def write_universal(job: ConversionJob, universal: Universal) -> None:
    """Write the directory, and check that our reader finds the same in it."""
    folder = job.bundle.add_folder(job.dst).hidden
    below = os.path.join(folder, universal.tag)
    os.makedirs(os.path.join(below, "zero"))
    made = {"", "zero"}
    for path, node in universal.files.items():
        parent = os.path.dirname(path)
        if parent not in made:
            made.add(parent)
            try:
                os.mkdir(os.path.join(below, parent))
            except FileExistsError:
                what = f"this file system cannot tell {parent.removeprefix('zero/')!r} from another parameter's name"
                raise ConvertError(what, where=job.dst, fix="Write it to a disk that distinguishes a and A.") from None
        with open(os.path.join(below, path), "xb", buffering=0) as file:
            write_value(job, DescriptorFile(file.fileno()), node)
            os.fsync(file.fileno())
    with open(os.path.join(folder, "latest_universal"), "xb") as latest:
        latest.write(universal.tag.encode())
        latest.flush()
        os.fsync(latest.fileno())
    read_back_folder(job, folder, universal.expected)
