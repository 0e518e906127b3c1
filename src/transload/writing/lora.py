"""Merge a LoRA adapter of peft into the weights of its base model, as peft's ``merge_and_unload`` does.

``Lora`` compares the adapter, its configuration and the names of the base model, and decides which tensors change. A
``Delta`` computes one of them with torch, in the order of peft's own steps, so that the result is equal bit by bit.
Whatever cannot be merged exactly is a ``ConvertError``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from transload.checkpoint import Tensor
from transload.contents import tie_of
from transload.errors import ConvertError, OverflowRefusedError
from transload.findings import join_names
from transload.formats.adapters import CONFIG, Pieces, adapter_in, pieces_of
from transload.io.memory import memory_at
from transload.opening.elements import ElementReader, swap_bytes
from transload.render.words import cut

if TYPE_CHECKING:
    import torch

_DTYPES = ("float64", "float32", "float16", "bfloat16")
_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to initialize an adapter that leave the base model as it is; others subtract something from its weights."""
_PLAIN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "megatron_core"),
        *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
        *("runtime_config", "target_modules", "task_type", "use_dora", "use_rslora"),
    }
)
"""What a configuration may say: handled here, or without meaning for the weights that are merged. Anything else changes
what the adapter computes."""
_SCALES = ("weight_scale", "weight_scale_inv", "SCB", "scales", "absmax", "weight.absmax", "weight.quant_state")
"""What quantized modules have beside their weights."""
_SHOWN = 6
_LONGEST = 200  # characters of the configuration in a message
_MOST_STEPS = 10**9  # of matching: ten seconds. A pattern of many or nested repeats takes years, on purpose


class Delta:
    """What is added to a weight: the product of two matrices times ``scaling``; with ``magnitude``, as DoRA does.

    ``transposed`` is whether the weight is stored as inputs by outputs, as in the Conv1D of GPT-2. ``bias`` is what is
    added to a bias instead.
    """

    def __init__(
        self,
        kind: Literal["linear", "embedding", "conv", "bias"],
        first: Tensor,
        second: Tensor | None,
        scaling: float,
        *,
        transposed: bool = False,
        magnitude: Tensor | None = None,
    ) -> None:
        self.kind, self.first, self.second, self.scaling = kind, first, second, scaling
        self.transposed, self.magnitude = transposed, magnitude

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the adapter that it is made of."""
        return [tensor for tensor in (self.first, self.second, self.magnitude) if tensor is not None]

    @property
    def is_square(self) -> bool:
        """Whether the weight of a linear module has as many inputs as outputs."""
        return self.second is not None and self.second.shape[0] == self.first.shape[-1]

    def chunks(self, reader: ElementReader, base: Tensor, size: int, *, allow_inf: bool) -> Iterator[memoryview]:
        """The bytes of the merged weight, in the dtype of the base model's; each chunk has at most ``size``."""
        import torch

        merged = self._merged(reader, base, allow_inf=allow_inf).contiguous()
        data = memory_at(merged.data_ptr(), merged.nbytes) if merged.numel() else memoryview(b"")
        if sys.byteorder == "big":
            data = memoryview(bytearray(data))
            swap_bytes(data, torch.empty((), dtype=merged.dtype).element_size())
        for at in range(0, len(data), size):
            yield data[at : at + size]

    def _merged(self, reader: ElementReader, base: Tensor, *, allow_inf: bool) -> torch.Tensor:
        import torch

        with torch.no_grad():
            weight = _read(reader, base)
            # peft keeps the matrices in float32, or in float64 if the base model is.
            dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
            first, *rest = (_read(reader, tensor).to(dtype) for tensor in (self.first, self.second) if tensor)
            if self.kind == "bias":
                weight += first * self.scaling
            else:
                delta = self._product(first, rest[0], weight)
                if self.magnitude is not None:
                    weight = self._dora(weight, delta, _read(reader, self.magnitude).to(dtype))
                else:
                    weight += delta.to(weight.dtype) if self.kind == "embedding" else delta
            if not (allow_inf or _is_finite(weight)) and _is_finite(_read(reader, base)):
                what = f"the merged {base.name} has values that are infinite or NaN in {base.dtype}"
                fix = "Choose a wider --dtype for the base model first, or add --allow-inf to store them."
                raise OverflowRefusedError(what, where=reader.checkpoint.path, fix=fix)
            return weight

    def _product(self, first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional

        if self.kind == "linear":
            product = second @ first
            return (product.T if self.transposed else product) * self.scaling
        if self.kind == "embedding":
            return (second @ first).T * self.scaling
        if tuple(weight.shape[2:]) == (1, 1):
            flat = second.squeeze(3).squeeze(2) @ first.squeeze(3).squeeze(2)
            return flat.unsqueeze(2).unsqueeze(3) * self.scaling
        convolve = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[weight.ndim]
        return convolve(first.transpose(0, 1), second).transpose(0, 1) * self.scaling

    def _dora(self, weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
        import torch

        base, change = (weight.T, delta.T) if self.transposed else (weight, delta)
        total = base + 1 * change
        norm = torch.linalg.norm(total, dim=1).to(total.dtype)
        factor = (magnitude / norm).view(-1, 1)
        new = (factor.T if self.transposed else factor) * (weight + delta)
        return new.to(weight.dtype)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is infinite or NaN."""
    import torch

    try:
        low, high = tensor.aminmax()  # thirty times as fast as to ask each number; NaN is either
    except RuntimeError:  # there are none, or this torch does not compare numbers of that dtype
        return bool(torch.isfinite(tensor).all())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _read(reader: ElementReader, tensor: Tensor) -> torch.Tensor:
    import torch

    data = bytearray(tensor.nbytes)
    at = 0
    for chunk in reader.chunks(tensor):
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    if sys.byteorder == "big":
        swap_bytes(memoryview(data), tensor.nbytes // max(1, tensor.numel))
    dtype: Any = getattr(torch, tensor.dtype)
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape) if data else torch.empty(tensor.shape, dtype=dtype)


class Lora:
    """What an adapter does to a base model.

    ``deltas`` are by the names of the base model's tensors; ``replaced`` are whole tensors of the adapter in the place
    of the base model's, or in addition to them; ``dtypes`` are those of the base model's that get replaced, which they
    take over, as in peft. ``notes`` say what else was done.
    """

    def __init__(
        self, config: Mapping[str, Any], adapter: list[tuple[str, Tensor]], base: list[tuple[str, Tensor]], path: str
    ) -> None:
        self._config, self._path = config, path
        self.deltas: dict[str, Delta] = {}
        self.replaced: dict[str, Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self.notes: list[str] = []
        self._base = dict(base)
        self._apart: set[str] = set()  # in modules that are replaced, and are tied to no other then
        self._refuse_config()
        try:
            import torch  # noqa: F401 - to fail before anything is written
        except ImportError as error:
            raise self._error(f"torch cannot be imported, which multiplies the matrices: {error}") from error
        pieces = pieces_of(adapter)
        if not pieces.modules:
            other = adapter_in(tensor for _, tensor in adapter) is not None
            what = "its names are not those of peft, but of another program" if other else "it has no LoRA matrices"
            raise self._error(what, "Convert it to the layout of peft with the program that wrote it.")
        whole = self._whole(pieces)
        strip, add = self._prefixes(pieces, whole)
        for module, tensors in pieces.modules.items():
            self._add_module(module, add + module.removeprefix(strip), tensors, whole)
        linear = [delta for delta in self.deltas.values() if delta.kind == "linear"]
        squares = [delta.first.name for delta in linear if delta.is_square]
        fan = bool(config.get("fan_in_fan_out"))
        if squares and any(delta.transposed != fan for delta in linear if not delta.is_square):
            # The class of the module would tell, and nothing else does.
            what = f"fan_in_fan_out={fan} is not true of all modules, and the shape of {squares[0]} does not tell"
            raise self._error(what)
        for name, tensor in whole.items():
            self._replace(name, add + name.removeprefix(strip), tensor)
        self._spread_over_ties()

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the adapter that are not written, but read."""
        for delta in {id(delta): delta for delta in self.deltas.values()}.values():
            yield from delta.tensors

    def _error(self, what: str, fix: str = "") -> ConvertError:
        return ConvertError(what, where=self._path, fix=fix or "Merge it with peft: PeftModel.merge_and_unload().")

    def _refuse_config(self) -> None:
        config = self._config
        kind = config.get("peft_type")
        if kind != "LORA":
            raise self._error(f"it is an adapter of the type {cut(repr(kind), _LONGEST)}; only LORA can be merged")
        unknown = sorted(key for key, value in config.items() if key not in _PLAIN and value)
        if unknown:
            said = cut(f"{unknown[0]}={config[unknown[0]]!r}", _LONGEST)
            raise self._error(f"its {CONFIG} says {said}, which cannot be merged here")
        if (init := config.get("init_lora_weights", True)) not in _INITS:
            fix = "Save it with peft's path_initial_model_for_weight_conversion, which makes a plain adapter of it."
            said = cut(f"init_lora_weights={init!r}", _LONGEST)
            raise self._error(f"{said} changes the weights of the base model", fix)
        for key in ("rank_pattern", "alpha_pattern"):
            if not isinstance(config.get(key) or {}, dict):
                raise self._error(f"its {CONFIG} has no table for {key}")
        if not isinstance(config.get("modules_to_save") or [], list):
            raise self._error(f"its {CONFIG} has no list for modules_to_save")

    def _of_module(self, module: str, key: str, pattern: str) -> float:
        """A number of the configuration, or the one that a pattern gives for a module, as peft matches them."""
        value = self._config.get(key)
        try:
            for text, other in (self._config.get(pattern) or {}).items():
                if not _is_quick(text, module):
                    raise self._error(f"{pattern} has {cut(repr(text), _LONGEST)}, which may take too long to match")
                if re.match(rf"(.*\.)?({text})$", module):
                    value = other
                    break
        except (re.error, OverflowError, RecursionError) as error:
            what = f"{pattern} has {cut(repr(text), _LONGEST)}, which is no regular expression: {error}"
            raise self._error(what) from error
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self._error(f"its {CONFIG} has no number for {key} of {module}")
        return value

    def _whole(self, pieces: Pieces) -> dict[str, Tensor]:
        """The whole tensors of an adapter, by the names they have in the base model."""
        whole: dict[str, Tensor] = {}
        for name, tensor in pieces.others.items():
            if ".original_module." not in name:  # peft saves it with bias="all", and does not use it
                plain = name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
                first = whole.setdefault(plain, tensor)
                if first is not tensor and (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                    raise self._error(f"it has two tensors for {plain}")
        return whole

    def _prefixes(self, pieces: Pieces, whole: Mapping[str, Tensor]) -> tuple[str, str]:
        """What to remove from the names of the adapter, and to put before them, to get those of the base model."""
        wanted = [f"{module}.weight" for module in pieces.modules]
        absent = [name for name in wanted if name not in self._base and name not in whole]
        if not absent:
            return "", ""
        first, found = absent[0], set()
        for dot in [0, *(match.end() for match in re.finditer(r"\.", first))][:-1]:
            strip, tail = first[:dot], first[dot:]
            for name in self._base:
                if name == tail or name.endswith(f".{tail}"):
                    add = name[: len(name) - len(tail)]
                    if all(each.startswith(strip) and add + each[len(strip) :] in self._base for each in wanted):
                        found.add((strip, add))
        # Of the same change, the shortest: a. → b. also explains a.x. → b.x.
        found = {(strip, add) for strip, add in found if not _is_longer(strip, add, found)}
        if len(found) == 1:
            strip, add = found.pop()
            self.notes.append(f"names of the adapter begin with {strip!r}, and those of the base model with {add!r}")
            return strip, add
        if found:
            raise self._error(f"the modules of the adapter fit the base model in several places: {sorted(found)}")
        what = f"the base model has no {join_names(absent, _SHOWN)}, which the adapter changes"
        fix = (
            "It may be the adapter of another model; or the base model is quantized, or the tensor is tied to another "
        )
        fix += "one and was not saved."
        raise self._error(what, fix)

    def _add_module(self, module: str, name: str, tensors: dict[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        weight = whole.get(f"{module}.weight", self._base.get(f"{name}.weight"))
        embedding = "lora_embedding_A" in tensors
        kinds = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        lacking = [kind for kind in kinds if kind not in tensors]
        extra = tensors.keys() - {*kinds, "lora_magnitude_vector", "lora_B.bias"}
        if lacking or extra or weight is None:
            raise self._error(f"{module} has {join_names([*tensors], _SHOWN)}, which peft does not write together")
        a, b = tensors[kinds[0]], tensors[kinds[1]]
        for tensor in (weight, *tensors.values()):
            if tensor.dtype not in _DTYPES or not tensor.is_dense:
                what = f"{tensor.name} is {tensor.dtype if tensor.is_dense else tensor.kind}: it cannot be added to"
                raise self._error(what, "Merge it into the weights before they were quantized.")
        if stored := next((f"{name}.{each}" for each in _SCALES if f"{name}.{each}" in self._base), ""):
            raise self._error(f"the base model is quantized: it has {stored}", "Merge it into the weights before that.")
        rank = self._of_module(module, "r", "rank_pattern")
        alpha = self._of_module(module, "lora_alpha", "alpha_pattern")
        if rank <= 0 or a.shape[:1] != (rank,):
            raise self._error(f"{a.name} has the shape {list(a.shape)}, and its rank is {rank} in {CONFIG}")
        scaling = alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank
        magnitude = tensors.get("lora_magnitude_vector")
        if bool(self._config.get("use_dora")) != (magnitude is not None):
            raise self._error(f"{module} {'has a' if magnitude else 'lacks the'} magnitude vector of DoRA")
        kind, transposed = self._kind(weight, a, b, embedding=embedding)
        if magnitude is not None and kind != "linear":
            raise self._error(f"{module} has a magnitude vector of DoRA, which is merged only for linear modules")
        self.deltas[f"{name}.weight"] = Delta(kind, a, b, scaling, transposed=transposed, magnitude=magnitude)
        if (bias := tensors.get("lora_B.bias")) is not None:
            if f"{name}.bias" not in self._base or magnitude is not None:
                raise self._error(f"{module} has a bias to add, and the base model has no {name}.bias")
            self.deltas[f"{name}.bias"] = Delta("bias", bias, None, scaling)

    def _kind(
        self, weight: Tensor, a: Tensor, b: Tensor, *, embedding: bool
    ) -> tuple[Literal["linear", "embedding", "conv"], bool]:
        """What the module is, and whether its weight is transposed."""
        shape, rank = weight.shape, a.shape[0]
        if embedding and (a.shape, b.shape) == ((rank, shape[0]), (*shape[1:], rank)):
            return "embedding", False
        if not embedding and len(shape) == 2 and len(a.shape) == len(b.shape) == 2 and b.shape[1] == rank:
            outputs, inputs = b.shape[0], a.shape[1]
            fan = bool(self._config.get("fan_in_fan_out"))
            if shape in ((outputs, inputs), (inputs, outputs)):
                return "linear", shape != (outputs, inputs) if outputs != inputs else fan
        if not embedding and len(shape) in (3, 4, 5) and a.shape[1:] == shape[1:]:
            if b.shape == (shape[0], rank, *(1 for _ in shape[2:])) and not (len(shape) == 5 and shape[2:4] == (1, 1)):
                return "conv", False
            raise self._error(f"{b.name} has the shape {list(b.shape)}, which cannot be merged into {weight.name}")
        words = f"{list(a.shape)} and {list(b.shape)}, and {weight.name} {list(shape)}"
        raise self._error(f"the matrices do not fit: {a.name} and {b.name} have the shapes {words}")

    def _replace(self, name: str, new: str, tensor: Tensor) -> None:
        old = self._base.get(new)
        is_saved = any(f".{each}." in f".{name}" for each in self._config.get("modules_to_save") or ())
        if old is None and not is_saved:
            raise self._error(f"the base model has no {new}, and the adapter has {name}")
        if old is not None and old.shape != tensor.shape:
            shapes = f"{list(old.shape)} in the base model, {list(tensor.shape)} in the adapter"
            self.notes.append(f"{new} has another shape: {shapes}")
        if new in self.deltas and old is not None and old.dtype != tensor.dtype:
            raise self._error(f"{new} is {tensor.dtype} in the adapter and {old.dtype} in the base model")
        self.replaced[new] = tensor
        self._apart |= {new} if is_saved else set()
        if old is not None:
            self.dtypes[new] = old.dtype

    def _spread_over_ties(self) -> None:
        """Tied tensors stay tied: peft changes their common memory, unless it replaces the module of one."""
        ties: dict[Any, list[str]] = {}
        for name, tensor in self._base.items():
            if (tie := tie_of(tensor)) is not None and name not in self._apart:
                ties.setdefault(tie, []).append(name)
        for names in ties.values():
            changed = [name for name in names if name in self.deltas]
            whole = [name for name in names if name in self.replaced]
            if len(changed) > 1:
                raise self._error(f"it changes {join_names(changed, _SHOWN)}, which are one tied tensor")
            if (changed or len(whole) == 1) and names[1:]:
                self.notes.append(f"tied, and changed together: {join_names(names, _SHOWN)}")
                self.deltas |= dict.fromkeys(names, self.deltas[changed[0]]) if changed else {}
                for name in names if len(whole) == 1 else ():
                    self.replaced[name] = self.replaced[whole[0]]
                    self.dtypes[name] = self.dtypes[whole[0]]


def _is_quick(pattern: str, name: str) -> bool:
    r"""Whether a pattern from a file can be matched with a name in time.

    Each repeat may be tried at each character, and each alternative doubles that. Repeated groups are refused, and
    everything that could hide them.

    >>> _is_quick(r".*\.(q|k|v)_proj", "layers.0.q_proj"), _is_quick("(a+)+b", "a"), _is_quick("a?" * 40, "a" * 40)
    (True, False, False)
    """
    plain = re.sub(r"(?s)\\.", "x", pattern)
    repeats, alternatives = len(re.findall(r"(?<!\()[*+?{]", plain)), plain.count("|")
    if repeats + alternatives > 30 or re.search(r"\)\s*[*+{]|\(\?[^:]", plain):
        return False
    steps: int = len(name) ** (1 + repeats) << alternatives
    return steps <= _MOST_STEPS


def _is_longer(strip: str, add: str, others: set[tuple[str, str]]) -> bool:
    """Whether another pair makes the same change with less: both end alike."""
    return any(
        (strip, add) != (less, to) and strip.startswith(less) and add == to + strip[len(less) :] for less, to in others
    )
