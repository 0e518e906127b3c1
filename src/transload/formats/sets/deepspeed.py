"""DeepSpeed directories: the files of every rank, in the folder of a step, put together.

ZeRO keeps the float32 weights and the states of the optimizer in long vectors, one for each group of parameters, and
each rank has a run of every vector (stages 1 and 2), or a run of every parameter (stage 3). The files of the model say
which parameters a vector consists of, in order. That is how DeepSpeed itself joins them: ``utils/zero_to_fp32.py`` and
``checkpoint/ds_to_universal.py`` in https://github.com/deepspeedai/DeepSpeed.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod

from transload.checkpoint import Checkpoint, Key, Tensor
from transload.findings import join_names
from transload.formats.sets.merger import MAX_RANKS, STEP, Merger, listed, steps_in
from transload.formats.sets.pieces import (
    Composition,
    MixedError,
    RankFile,
    UnmergedError,
    Vector,
    assembled,
    entries,
    leaves_of,
    list_of,
    number_of,
    plain,
    shape_of,
)
from transload.frozen import NamedTuple
from transload.io.folder import Listing, relative_path
from transload.nodes import Dict
from transload.render.words import plural

_LATEST, _UNIVERSAL = "latest", "latest_universal"
# The kinds of files, and the numbers in their names: the data-parallel rank (dp), the tensor-parallel rank, counted
# through all stages of a pipeline (mp), the layer of a pipeline, the expert.
_FILES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("optimizer states", re.compile(r"(?:\w+_)?zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_optim_states\.pt")),
    ("partitioned model", re.compile(r"zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_model_states\.pt")),
    ("model states", re.compile(r"mp_rank_(?P<mp>\d{1,6})_model_states\.pt")),
    ("expert", re.compile(r"(?:layer_\d{1,6}_)?expert_\d{1,6}_mp_rank_(?P<mp>\d{1,6})_(?:model|optim)_states\.pt")),
    ("expert optimizer", re.compile(r"expp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_optim_states\.pt")),
    ("layer", re.compile(r"layer_(?P<layer>\d{1,6})(?:-model_(?P<mp>\d{1,6}))?-model_states\.pt")),
)
_OPTIMIZER = "optimizer_state_dict"
_VECTORS = "single_partition_of_fp32_groups"
_FROZEN = "frozen_param_fragments"
_CLASSES = ("deepspeed.",)
_EXPERT = re.compile(r"(?<=\.deepspeed_experts\.)\d{1,6}(?=\.)")
_SLICES = "tensor-parallel ranks have slices of each parameter, and no file says of which dimension"
# What the files have about the partition of their own rank, which means nothing in the whole.
_OF_A_RANK = frozenset({
    *("base_optimizer_state", "fp32_flat_groups", "group_paddings", "optimizer_state_dict", "param_alignment_paddings"),
    *("param_groups", "param_slice_mappings", "partition_count", _VECTORS, "zero_stage"),
})  # fmt: skip
_ONCE = frozenset({"module", "shared_params", _FROZEN})


def matches(listing: Listing) -> bool:
    """Whether a folder has DeepSpeed's script, its files, or those of its steps."""
    if "zero_to_fp32.py" in listing.files or steps_in(listing, "global_step") or _ranks(listing):
        return True
    # Not every file `latest` is DeepSpeed's.
    tags = (listing.text(name) for name in (_LATEST, _UNIVERSAL) if name in listing.files)
    tag = next(filter(None, tags), "")
    return bool(STEP.fullmatch(tag)) or relative_path(tag) in listing.folders


class _Place(NamedTuple):
    """A file, and the numbers in its name."""

    name: str
    kind: str
    dp: int
    mp: int
    layer: int


def _ranks(listing: Listing) -> list[_Place]:
    """DeepSpeed's files in a folder."""
    out = []
    for name in listing.files:
        for kind, form in _FILES:
            if match := form.fullmatch(name):
                numbers = match.groupdict()
                out.append(_Place(name, kind, *(int(numbers.get(key) or 0) for key in ("dp", "mp", "layer"))))
    return out


def read(merger: Merger) -> Checkpoint:
    """Merge the files of every rank from the latest step, and note missing ranks."""
    merger.format, merger.ranked = "deepspeed", True
    top = merger.listing
    latest = _LATEST if top.text(_LATEST) else _UNIVERSAL
    tag = "" if _ranks(top) else merger.enter_latest(top.text(latest), latest, "step")
    whole = Composition(merger)
    places = _ranks(merger.listing)
    if any(place.kind == "model states" for place in places):
        # Stage 3 needs such a file of the first rank to resume from a universal checkpoint; it has nothing of its own.
        places = [place for place in places if place.kind != "partitioned model"]
    files = [(place, file) for place in places if (file := whole.read(place.name, place.kind)) is not None]
    _note_ranks(merger, places, files)
    if "zero_to_fp32.py" in top.files:
        script = "zero_to_fp32.py joins the weights, and can do anything"
        merger.facts.append(("script", script))
    if tag == "checkpoint" or "checkpoint" in top.folders:  # what Lightning calls the step
        merger.flavour = "Lightning"
    if places:
        try:
            _compose(whole, files)
        except UnmergedError as why:
            whole.keep_apart(why, _CLASSES)
    return merger.merged()


def _note_ranks(merger: Merger, places: list[_Place], files: list[tuple[_Place, RankFile]]) -> None:
    """Note what the files are, and gaps among the data-parallel ranks. Their number is in the model states."""
    kinds: dict[str, set[int]] = {}
    for place in places:
        kinds.setdefault(place.kind, set()).add(place.mp if place.kind == "model states" else place.dp)
    recorded = [file.root.get("dp_world_size") for place, file in files if "model" in place.kind]
    recorded += [_partitions(_settings(file)) for place, file in files if place.kind == "optimizer states"]
    stated = max((number for number in recorded if type(number) is int), default=0)
    for kind in ("optimizer states", "partitioned model"):
        ranks = kinds.get(kind, set())
        world = min(max(stated, max(ranks) + 1), MAX_RANKS) if ranks else 0
        missing = [str(rank) for rank in range(world) if rank not in ranks]
        if missing:
            merger.note("rank-missing", f"{kind} of {len(missing):,} of {world:,} ranks: {join_names(missing, 8)}")
    if not kinds:
        merger.note("directory-unknown", "a DeepSpeed directory without any rank's file")
    stages = {number_of(_settings(file).get("zero_stage")) for place, file in files if place.kind == "optimizer states"}
    guess = "3" if "partitioned model" in kinds else "1 or 2" if "optimizer states" in kinds else "0"
    stage = ", ".join(sorted(str(stage) for stage in stages if stage is not None)) or guess
    found = kinds.get("optimizer states") or kinds.get("partitioned model") or kinds.get("model states", set())
    merger.facts += [("ZeRO stage", stage), ("ranks found", f"{len(found):,}")]


def _settings(file: RankFile) -> dict[Key, object]:
    """What the file of an optimizer says besides the configuration."""
    return entries(file.root.get(_OPTIMIZER))


def _shapes(file: RankFile) -> list[dict[str, tuple[int, ...]]]:
    """The names and shapes of the parameters in each group, in the order of their vectors."""
    groups = map(entries, list_of(file.root.get("param_shapes")))
    return [{str(name): shape_of(shape) for name, shape in group.items()} for group in groups]


def _partitions(settings: dict[Key, object]) -> int:
    """Into how many parts a vector is cut: as many as there are data-parallel ranks, except for those of experts."""
    count = settings.get("partition_count")
    numbers = [number for number in (count if type(count) is list else [count]) if type(number) is int]
    return max(numbers, default=0)


# -- the object


def _compose(whole: Composition, files: list[tuple[_Place, RankFile]]) -> None:
    """Form the object of all files; ``UnmergedError`` if they do not say how."""
    models: dict[int, dict[int, RankFile]] = {}
    optimizers: dict[int, dict[int, RankFile]] = {}
    partitioned = any(place.kind == "partitioned model" for place, _ in files)
    for place, file in sorted(files, key=lambda each: each[0].dp):
        if place.kind == ("partitioned model" if partitioned else "model states"):
            models.setdefault(place.mp, {})[place.dp] = file
        elif place.kind == "optimizer states":
            optimizers.setdefault(place.mp, {})[place.dp] = file
    if not models or not models.keys() >= optimizers.keys():
        whole.merger.note("rank-missing", "the model states, which list the parameters in their order")
        raise UnmergedError("nothing says which parameters the optimizer states are of")
    universal = {} if optimizers else _universal(whole)
    if universal:
        whole.merger.flavour = "universal checkpoint"
    numbers = sorted(models)[:1] if universal else sorted(models)  # which are merged there
    stages = [_Stage(whole, models[mp], optimizers.get(mp, {})) for mp in numbers]
    first = stages[0]
    if any(list_of(stage.model.root.get("ds_autoep_layers")) for stage in stages) and not universal:
        raise UnmergedError("AutoEP has split its experts in a way that only ds_to_universal joins")
    layers = _by_name([(f"{place.layer}.", file) for place, file in files if place.kind == "layer"])
    experts = _by_name([("", file) for place, file in files if place.kind == "expert" and "_model_" in place.name])
    for stage in stages:
        stage.gather({**layers, **experts}, universal, alone=not universal or len(models) == 1)
    # Files of several model-parallel ranks are the stages of a pipeline, which have different parameters, except for
    # tied ones; or each has a slice of every parameter.
    names = Counter(name for stage in stages for name in stage.module if not name.startswith("tied_modules."))
    if len(stages) > 1 and (repeated := [name for name, count in names.items() if count > 1]):
        raise UnmergedError(f"{_SLICES}: {join_names(repeated, 3)}")
    module: dict[str, Tensor] = {}
    for stage in stages:
        module |= {name: tensor for name, tensor in stage.module.items() if name not in module}
    unnamed = {} if optimizers else layers
    module |= {name: tensor for name, tensor in {**unnamed, **experts}.items() if name not in module}
    for name, tensor in module.items():
        whole.put(("module", name), tensor)
    for stage in stages:
        stage.add_states()
    count = max(len(stage.groups) for stage in stages)
    groups = [
        [name for stage in stages for group in stage.groups[at : at + 1] for name in group] for at in range(count)
    ]
    first.add_values(groups)
    for number, stage in zip(numbers[1:], stages[1:], strict=True):
        if not optimizers and stage.model.root.get("optimizer") is not None:
            whole.put_node((f"optimizer of mp_rank_{number:02d}",), stage.model, ("optimizer",))
    for place, file in files:
        if place.kind == "expert optimizer":
            whole.put_node(("optimizer of experts", place.name), file, ())
    whole.finish()


def _universal(whole: Composition) -> dict[str, dict[str, RankFile]]:
    """The files of each parameter in a universal checkpoint, which are whole: ``fp32``, ``exp_avg`` and so on."""
    merger, found = whole.merger, dict[str, dict[str, RankFile]]()
    if "zero" not in merger.listing.folders:
        return found
    inner = listed(merger.listing.folder, f"{merger.listing.prefix}zero", merger.noted)
    for name in inner.folders:
        files = listed(merger.listing.folder, f"{inner.prefix}{name}", merger.noted).files
        for file in (file for file in files if file.endswith(".pt")):
            if (one := whole.read(f"zero/{name}/{file}", "parameter")) is not None:
                found.setdefault(name, {})[file.removesuffix(".pt")] = one
    if "optimizer_state.pt" in inner.files and (one := whole.read("zero/optimizer_state.pt", "optimizer")) is not None:
        found[""] = {"": one}
    return found


def _by_name(files: list[tuple[str, RankFile]]) -> dict[str, Tensor]:
    """The weights of layers or experts that have files of their own, with the given prefix."""
    found: dict[str, Tensor] = {}
    for prefix, file in sorted(files, key=lambda each: each[1].name):
        for path, tensor in file.tensors.items():
            if len(path) == 1 and found.setdefault(f"{prefix}{path[0]}", tensor) is not tensor:
                raise UnmergedError(f"{_SLICES}: {prefix}{path[0]}")
    return found


_State = Tensor | tuple[RankFile, tuple[Key, ...]]
"""What an optimizer has for a parameter: a tensor, or something else at a path in a file."""


class _Group(NamedTuple):
    """What a rank has of a group of parameters: a run of the weights, runs of states by name, and other states."""

    weights: Tensor
    runs: dict[Key, Tensor]
    others: dict[Key, _State]


class _Stage:
    """What the data-parallel ranks of a stage of a pipeline, or of the whole model, have; files are by rank.

    ``module`` are its weights by name, ``states`` what the optimizer has for each parameter.
    ``groups`` are the names and shapes of parameters, by group.
    """

    def __init__(self, whole: Composition, models: dict[int, RankFile], optimizers: dict[int, RankFile]) -> None:
        self._whole = whole
        self._models, self._optimizers = models, optimizers
        self.model = next(iter(models.values()))
        if not self.model.root:
            raise UnmergedError(f"{self.model.name} does not contain a dictionary")
        self._settings = _settings(next(iter(optimizers.values()))) if optimizers else {}
        self._world = _partitions(self._settings)
        self.groups = _shapes(self.model)
        self.module: dict[str, Tensor] = {}
        self.states: dict[str, dict[Key, _State]] = {}
        # ZeRO 3 nests the state of the optimizer twice.
        self._base: tuple[Key, ...] = (_OPTIMIZER, "base_optimizer_state")
        if "fp32_flat_groups" in self._settings:
            self._base = (_OPTIMIZER, _OPTIMIZER)
        # The file with the settings of the optimizer, and where they and those of its groups are.
        self._common: tuple[RankFile, tuple[Key, ...], tuple[Key, ...]] | None = None
        if optimizers:
            self._common = next(iter(optimizers.values())), (_OPTIMIZER,), (*self._base, "param_groups")

    def gather(
        self, elsewhere: dict[str, Tensor], universal: dict[str, dict[str, RankFile]], *, alone: bool = True
    ) -> None:
        """Find all weights, in the order of ``zero_to_fp32.py``; ``elsewhere`` are those in files of their own.

        ``universal`` are the files of parameters that have several each. ``alone`` is whether there are no other files
        of the model, so that what is in this one is whole.
        """
        model, module = self.model, self.module
        for name in list_of(model.root.get("buffer_names")):
            tensor = model.tensors.get(("module", str(name))) or elsewhere.get(str(name))
            if tensor is not None:
                module[str(name)] = tensor
        self._add_frozen(elsewhere)
        if self._optimizers:
            self._check_ranks()
            if "fp32_flat_groups" in self._settings:
                self._add_partitioned()
            else:
                self._add_flattened(elsewhere)
        self._add_universal(universal)
        for name, other in entries(model.root.get("shared_params")).items():
            if type(other) is str and other in module:
                module[str(name)] = module[other]
        # Stage 1 has frozen parameters only here, and so has a model without ZeRO all of its weights.
        for path, tensor in model.tensors.items() if alone else ():
            if path[:-1] == ("module",) and path[1] not in module:
                if not tensor.numel and model.kind == "partitioned model":
                    self._whole.gaps.append((f"module/{path[1]}", "no file says where its elements are"))
                else:
                    module[str(path[1])] = tensor

    def _add_frozen(self, elsewhere: dict[str, Tensor]) -> None:
        """Add the parameters that are not trained: each rank has all of them, or a run of each (stage 3)."""
        world = self._world or max(self._models) + 1
        for key, node in entries(self.model.root.get("frozen_param_shapes")).items():
            name, shape = str(key), shape_of(node)
            tensor = self.model.tensors.get((_FROZEN, key)) or elsewhere.get(name)
            if tensor is None:
                continue  # it was left out of the checkpoint
            if tensor.shape == shape:
                self.module[name] = tensor
                continue
            size, parts = -(-prod(shape) // world), []
            for rank, file in self._models.items():
                vector = Vector()
                vector.add(0, file.run((_FROZEN, key)))
                parts += vector.cut(0, min(size, prod(shape) - rank * size), rank * size)
            self.module[name] = self._whole.assembled(("module", name), shape, parts)

    def _add_universal(self, universal: dict[str, dict[str, RankFile]]) -> None:
        """Add parameters that have files of their own.

        Such files of buffers, of frozen and of tied parameters are made from the model states, and less exact.
        """
        if not universal:
            return
        common = universal.get("", {}).get("")
        self._common = (common, (), ("param_groups",)) if common is not None else None
        shapes = {name: shape for group in self.groups for name, shape in group.items()}
        known = {*self.module, *map(str, entries(self.model.root.get("shared_params")))}
        known |= {str(path[1]) for path in self.model.tensors if path[:-1] == ("module",)}
        for name in [*shapes, *(name for name in universal if name and name not in known and name not in shapes)]:
            for key, file in universal.get(name, {}).items():
                tensor = file.tensors.get(()) or file.tensors.get(("param",))
                shape = shapes.get(name)
                is_run = tensor is not None and tensor.kind == "strided" and len(tensor.shape) == 1
                if tensor is not None and is_run and shape and tensor.numel == prod(shape):
                    # Stage 3 stores it as a vector.
                    tensor, _ = assembled(tensor.path, shape, (tensor._replace(start=(0,)),))
                if key == "fp32" and tensor is not None:
                    self.module[name] = tensor
                elif key != "fp32":
                    self.states.setdefault(name, {})[key] = tensor or (file, ())
            if name not in self.module:
                self._whole.gaps.append((f"module/{name}", f"zero/{name}/fp32.pt is missing"))
        # Stage 3 keeps the rest of the state in the common file, by group.
        for number, group in enumerate(self.groups):
            base = (_OPTIMIZER, "state", number)
            for step in entries(common.at(base)) if common is not None else ():
                state = common.tensors.get((*base, step)) if common is not None else None
                if common is not None and (state is None or not state.shape):
                    for name in group:
                        self.states.setdefault(name, {}).setdefault(step, state or (common, (*base, step)))

    def _check_ranks(self) -> None:
        """Raise if the files of the ranks do not belong together."""
        settings = {rank: _settings(file) for rank, file in self._optimizers.items()}
        self._agree("their partitions", {rank: str(_partitions(each)) for rank, each in settings.items()})
        self._agree("their stage", {rank: str(number_of(each.get("zero_stage"))) for rank, each in settings.items()})
        if not self._world:
            raise UnmergedError("the files of the optimizer do not say how many partitions there are")
        if max(self._optimizers) >= self._world:
            raise MixedError(f"{max(self._optimizers) + 1:,} ranks have files, which {self._world:,} wrote")
        for key in ("global_steps", "dp_world_size"):
            self._agree(key, {rank: str(number_of(file.root.get(key))) for rank, file in self._models.items()})
        for rank, file in self._models.items():
            if _shapes(file) != self.groups:
                raise MixedError(f"rank {rank} has other parameters than rank {min(self._models)}")
        if not any(self.groups):
            raise UnmergedError("its model states do not list the parameters (param_shapes)")

    def _agree(self, what: str, said: dict[int, str]) -> None:
        if len(set(said.values())) > 1:
            words = join_names([f"rank {rank}: {text}" for rank, text in said.items()], 4)
            raise MixedError(f"the ranks differ in {what} ({words})")

    def _group(self, file: RankFile, weights: tuple[Key, ...]) -> _Group:
        """What a rank has of the group whose weights are at a path, which ends with its number."""
        number, run = weights[-1], file.run(weights)
        base = (*self._base, "state", number)
        if type(file.at(self._base)) is list:  # of an "elastic" checkpoint
            base = (*self._base, number)
        out = _Group(run, {}, {})
        for key in entries(file.at(base)):
            state = file.tensors.get((*base, key))
            if state is not None and state.kind == "strided" and len(state.shape) == 1 and state.numel >= run.numel:
                out.runs[key] = state
            else:
                out.others[key] = (file, (*base, key)) if state is None else state
        return out

    def _add_flattened(self, elsewhere: dict[str, Tensor]) -> None:
        """Add the parameters of stages 1 and 2: each group is a vector, and each rank has a run of it."""
        counts, paddings = (self._settings.get(key) for key in ("partition_count", "param_alignment_paddings"))
        vectors = len(list_of(self._settings.get(_VECTORS)))
        if vectors != len(self.groups):
            raise UnmergedError(f"there are {plural(len(self.groups), 'group')} of parameters, and {vectors} vectors")
        for number, shapes in enumerate(self.groups):
            skipped = list_of(paddings)[number : number + 1] or [[0] * len(shapes)]
            if len(list_of(skipped[0])) != len(shapes):
                raise UnmergedError(f"group {number} has paddings for another number of parameters")
            numbers = [number_of(padding) or 0 for padding in list_of(skipped[0])]
            count = counts[number] if type(counts) is list and number < len(counts) else self._world
            if count == self._world:
                self._add_vector(number, range(self._world), shapes, numbers)
                continue
            # Experts: each of several sets of ranks has a vector, and the list has the names of the first set.
            named = self._experts(shapes, count, elsewhere)
            if not elsewhere:
                raise UnmergedError("its experts are in the vectors of some ranks, and have no files of their own")
            if not named:
                self._whole.merger.facts.append(("not merged", f"optimizer states of experts, group {number}"))
                continue
            for each, names in named:
                self._add_vector(number, each, names, numbers)
            self.groups[number] = {name: shape for _, names in named for name, shape in names.items()}

    def _experts(
        self, shapes: dict[str, tuple[int, ...]], count: object, elsewhere: dict[str, Tensor]
    ) -> list[tuple[range, dict[str, tuple[int, ...]]]]:
        """The ranks of each set, and the names and shapes of its experts; empty if the files do not confirm them."""
        if type(count) is not int or count < 1 or self._world % count or not all(map(_EXPERT.search, shapes)):
            return []
        sets = self._world // count
        local = 1 + max(int(match[0]) for match in map(_EXPERT.search, shapes) if match)
        data_first = entries(self.model.root.get("ds_config")).get("use_data_before_expert_parallelism") is True
        named = []
        for at in range(sets):
            ranks = range(at * count, (at + 1) * count) if data_first else range(at, self._world, sets)
            names = {
                _EXPERT.sub(lambda match, at=at: str(int(match[0]) + at * local), name): shape  # type: ignore[misc]
                for name, shape in shapes.items()
            }
            if any(elsewhere[name].shape != shape if name in elsewhere else True for name, shape in names.items()):
                return []
            named.append((ranks, names))
        return named

    def _add_vector(self, number: int, members: range, shapes: dict[str, tuple[int, ...]], skipped: list[int]) -> None:
        """Add the parameters of a group: some ranks have runs of the vector; padding follows each parameter."""
        files = {at: self._optimizers[rank] for at, rank in enumerate(members) if rank in self._optimizers}
        ranks = {at: self._group(file, (_OPTIMIZER, _VECTORS, number)) for at, file in files.items()}
        begins, end = _begins({rank: group.weights.numel for rank, group in ranks.items()}, len(members))
        first = next(iter(ranks.values()))
        weights, states = Vector(), {key: Vector() for key in first.runs}
        for rank, group in ranks.items():
            weights.add(begins[rank], group.weights)
            for key in states.keys() & group.runs.keys():
                states[key].add(begins[rank], group.runs[key])
        at = 0
        for (name, shape), padding in zip(shapes.items(), skipped, strict=True):
            size = prod(shape)
            self._add(name, shape, weights.cut(at, size), {key: states[key].cut(at, size) for key in states}, first)
            at += size + padding
        # More padding follows, to a multiple of twice the number of ranks.
        align = 2 * len(members)
        if end is not None and -(-at // align) != -(-end // align):
            why = f"the parameters of group {number} have {at:,} elements, the vectors of the ranks {end:,}"
            raise MixedError(why)

    def _add_partitioned(self) -> None:
        """Add the parameters of stage 3: each rank has a run of each parameter, in vectors of limited size."""
        config = entries(entries(self.model.root.get("ds_config")).get("zero_optimization"))
        shards = number_of(config.get("mics_shard_size")) or 0
        world = shards if 0 < shards <= self._world else self._world  # MiCS: each set of so many ranks has all
        files = {rank: file for rank, file in self._optimizers.items() if rank < world}
        weights: dict[int, Vector] = {}
        states: dict[Key, dict[int, Vector]] = {}
        ends: list[tuple[int, _Group]] = []
        sizes = {}
        for rank, file in files.items():
            at, weights[rank], here = 0, Vector(), []
            for number in range(len(list_of(_settings(file).get("fp32_flat_groups")))):
                group = self._group(file, (_OPTIMIZER, "fp32_flat_groups", number))
                weights[rank].add(at, group.weights)
                for key, run in group.runs.items():
                    states.setdefault(key, {}).setdefault(rank, Vector()).add(at, run)
                at += group.weights.numel
                here.append((at, group))
            sizes[rank] = at
            ends = ends or here
        at = 0
        for name, shape in (pair for shapes in self.groups for pair in shapes.items()):
            place = (at, -(-prod(shape) // world), prod(shape))
            group = next((group for end, group in ends if at < end), _NOTHING)
            self._add(name, shape, _runs(weights, *place), {key: _runs(states[key], *place) for key in states}, group)
            at += place[1]
        if any(size != at for size in sizes.values()):
            words = join_names([f"rank {rank}: {size:,}" for rank, size in sizes.items()], 4)
            raise MixedError(f"each rank should have {at:,} elements of the parameters ({words})")

    def _add(
        self, name: str, shape: tuple[int, ...], weights: list[Tensor], states: dict[Key, list[Tensor]], group: _Group
    ) -> None:
        """Add a parameter, and its states."""
        self.module[name] = self._whole.assembled(("module", name), shape, weights)
        inside: dict[Key, _State] = {**group.others}
        for key, parts in states.items():
            inside[key] = self._whole.assembled(("optimizer", "state", name, key), shape, parts)
        self.states[name] = inside

    def add_states(self) -> None:
        """Put what the optimizer has for each parameter into the object."""
        for name, states in self.states.items():
            for key, state in states.items():
                path = ("optimizer", "state", name, key)
                if isinstance(state, Tensor):
                    put = self._whole.put if state.path == path else self._whole.put_copy
                    put(path, state)
                else:
                    self._whole.put_node(path, *state)

    def add_values(self, groups: list[list[str]]) -> None:
        """Put everything else into the object; ``groups`` are the names of the parameters in each group."""
        whole, model = self._whole, self.model
        if self._common is not None:
            file, settings, listed_at = self._common
            for number, node in enumerate(list_of(file.at(listed_at))):
                items: list[object] = []
                for key, value in entries(node).items():
                    indices = [index for index in list_of(value) if type(index) is int and index < len(groups)]
                    names = [name for index in indices for name in groups[index]]
                    items += [key, names if key == "params" else value]
                whole.put_node(("optimizer", "param_groups", number), file, (*listed_at, number), Dict(items))
            for key, node in entries(file.at(settings)).items():
                if key not in _OF_A_RANK:
                    whole.put_node(("optimizer", key), file, (*settings, key), plain(node, _CLASSES))
        for key in entries(model.root.get("module")):
            if ("module", key) not in model.tensors:
                whole.put_node(("module", key), model, ("module", key))
        others = [leaves_of(file, _ONCE) for file in self._models.values()]
        if any(other != others[0] for other in others):
            keys = {str(path[0]) for other in others for path, _ in other.symmetric_difference(others[0])}
            whole.merger.facts.append(
                ("values", f"those of the first rank; others differ in {join_names(sorted(keys), 4)}")
            )
        for key, node in model.root.items():
            if key not in ("module", _FROZEN) and not (key == "optimizer" and self._common is not None):
                whole.put_node((key,), model, (key,), plain(node, _CLASSES))


_NOTHING = _Group(Tensor((), "", "float32", (0,), (1,), "cpu", None), {}, {})


def _runs(vectors: dict[int, Vector], at: int, size: int, numel: int) -> list[Tensor]:
    """The runs of a parameter, each of ``size`` elements, that begin at ``at`` in the vector of each rank."""
    cuts = (vector.cut(at, min(size, numel - rank * size), rank * size) for rank, vector in vectors.items())
    return [part for parts in cuts for part in parts]


def _begins(sizes: dict[int, int], world: int) -> tuple[dict[int, int], int | None]:
    """Where the run of each rank begins in a vector, and where it ends; ``None`` if some ranks are missing.

    All runs have the same size, except for the last one, which may be shorter.
    """
    if len(sizes) == world:
        begins, at = {}, 0
        for rank, size in sizes.items():
            begins[rank] = at
            at += size
        return begins, at
    before_last = {size for rank, size in sizes.items() if rank < world - 1}
    if len(before_last) != 1:
        raise UnmergedError("ranks are missing, and the others do not show how large their parts are")
    (size,) = before_last
    return {rank: rank * size for rank in sizes}, None
