"""What ``test_sharded_models.py`` runs on several ranks: each case is a function, and every rank runs all of them."""

from __future__ import annotations

import functools
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from transload.errors import CannotReadError, LoadError, MissingFileError
from transload.loading import handles
from transload.loading.dcp_reader import CheckpointReader
from transload.loading.into import MismatchError, load_into

try:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
except ImportError:  # before torch 2.6
    fully_shard = None
HAS_FSDP2 = fully_shard is not None
RUNS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
"""Whether this torch runs models of FSDP2 on the CPU; older ones only shard them there."""
FOLDER = Path()
FILES = ("model.pt", "model.safetensors", "sharded", "dcp")


class Net(nn.Module):
    """Rows that do not divide evenly, a parameter of one row, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.inner = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 9))
        self.norm = nn.BatchNorm1d(9)
        self.down = nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.norm(self.inner(self.up(x))))
        return y


class Tied(Net):
    """With a parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(9, 1)
        self.again.weight = self.down.weight


class Custom(nn.Linear):
    """With loading code of its own."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def seeded(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = kind()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(1, 2)
    return model.eval()


def write_files(folder: Path) -> None:
    """The checkpoints of ``seeded()``, once for all ranks."""
    from transload.converting import convert

    torch.save({"epoch": 1, "model": seeded().state_dict()}, folder / "model.pt")
    torch.save(seeded(Tied).state_dict(), folder / "tied.pt")
    torch.save(seeded(seed=1).state_dict(), folder / "other.pt")
    torch.save({"weight": torch.arange(24.0).view(6, 4)}, folder / "weight.pt")
    convert(folder / "model.pt", folder / "model.safetensors", key="model")
    (folder / "sharded").mkdir()
    convert(folder / "model.safetensors", folder / "sharded" / "model.safetensors", max_shard_size=400)
    write_dcp({"model": seeded().state_dict()}, folder / "dcp")
    if HAS_FSDP2:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        model, optimizer = trained()
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder / "trained.pt")
        named = get_optimizer_state_dict(model, optimizer)
        write_dcp({"model": model.state_dict(), "optim": named}, folder / "trained")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(0, 1, 12).view(2, 6)).sum().backward()
    optimizer.step()


def write_dcp(state: dict[str, Any], folder: Path) -> None:
    """Save a state dict as a directory, without a process group."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases prefer save, which 2.1 does not have
        dcp.save_state_dict(state, dcp.FileSystemWriter(folder, thread_count=1), no_dist=True)


# -- the cases


def rank() -> int:
    return dist.get_rank()


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with every DTensor gathered."""
    return {key: whole(value) for key, value in model.state_dict().items()}


def whole(tensor: Any) -> torch.Tensor:
    if not hasattr(tensor, "device_mesh"):
        return tensor
    if not hasattr(tensor, "full_tensor"):  # before torch 2.2
        from torch.distributed._tensor import Replicate

        return tensor.redistribute(tensor.device_mesh, [Replicate()]).to_local()
    return tensor.full_tensor()


def assert_filled(model: nn.Module, reference: nn.Module | None = None) -> None:
    reference = reference or seeded()
    found = wholes(model)
    assert set(found) == set(reference.state_dict())
    for key, value in reference.state_dict().items():
        assert torch.equal(found[key], value), key
    x = torch.linspace(0, 1, 12).view(2, 6)
    assert not RUNS or torch.allclose(model.eval()(x), reference(x), atol=1e-6), "forward"


def assert_close(model: nn.Module, reference: nn.Module) -> None:
    found = wholes(model)
    for key, value in reference.state_dict().items():
        assert torch.allclose(found[key], value, atol=1e-6), key


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        tensors = (*model.parameters(), *model.buffers())
        return [(t.to_local() if hasattr(t, "to_local") else t).clone() for t in tensors]


def sharded(kind: Callable[[], nn.Module] = Net, *, meta: bool = False, seed: int = 5, **options: Any) -> nn.Module:
    """A model in shards of FSDP2, with other values than the file."""
    with torch.device("meta" if meta else "cpu"):
        model = kind().eval() if meta else seeded(kind, seed)
    inner = getattr(model, "inner", None)
    if inner is not None:
        fully_shard(inner, **options)
    return fully_shard(model, **options)


def errors_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is what is tested
        return error
    return None


def case_fsdp2_every_format() -> None:
    for name in FILES:
        model = sharded()
        load_into(model, FOLDER / name)
        assert_filled(model)


def case_fsdp2_meta() -> None:
    model = sharded(meta=True)
    load_into(model, FOLDER / "model.pt")
    assert_filled(model)
    model = sharded(meta=True, offload_policy=CPUOffloadPolicy(pin_memory=False))
    load_into(model, FOLDER / "model.safetensors")
    assert_filled(model)


def case_fsdp2_gathered() -> None:
    model = sharded(reshard_after_forward=False)
    if RUNS:
        model(torch.zeros(2, 6))
    load_into(model, FOLDER / "model.pt")
    assert_filled(model)


def case_fsdp2_tied_and_wrapped() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = sharded(Tied)
    load_into(model, FOLDER / "tied.pt")
    assert_filled(model, seeded(Tied))
    assert model.again.weight is model.down.weight
    model = seeded(seed=5)
    model.inner = checkpoint_wrapper(model.inner)
    load_into(fully_shard(model), FOLDER / "model.pt")
    assert_filled(model)


def case_fsdp2_custom_code() -> None:
    for meta in (False, True):
        model = sharded(functools.partial(Custom, 4, 6, bias=False), meta=meta)
        load_into(model, FOLDER / "weight.pt")
        assert torch.equal(whole(model.weight), torch.arange(24.0).view(6, 4) * 2)


def case_fsdp2_options() -> None:
    model = sharded().double()
    load_into(model, FOLDER / "model.pt", cast=True, prefix="model", rename=[("^up", "up")])
    assert torch.equal(wholes(model)["up.weight"], seeded().up.weight.double())
    model = fully_shard(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)))
    error = errors_of(lambda: load_into(model, FOLDER / "model.pt", rename={"up.": "0.", "down.": "1."}))
    assert isinstance(error, MismatchError)
    assert [mismatch.key for mismatch in error.shapes] == ["1.weight", "1.bias"]
    loaded = load_into(
        model, FOLDER / "model.pt", rename={"up.": "0.", "down.": "1."}, ignore_mismatched_sizes=True, strict=False
    )
    assert torch.equal(whole(model[0].weight), seeded().up.weight)
    assert loaded.matched == "All other keys"


def case_tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh((2,))
    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"):
            model = Net().eval() if meta else seeded(seed=5)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model.inner, mesh, plan)
        for name in FILES[: 1 if meta else 4]:
            load_into(model, FOLDER / name)
            assert_filled(model)


def case_only_its_share_is_read() -> None:
    rows = {"weight": torch.randn(512, 4096)}  # 8 MiB
    if rank() == 0:
        torch.save(rows, FOLDER / "large.pt")
    dist.barrier()
    try:
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import Shard, distribute_module, distribute_tensor
    for dim, most in ((0, 1.05), (1, 1.05)):
        kind = functools.partial(nn.Linear, 4096, 512, bias=False)

        def split(_: str, module: nn.Module, mesh: Any, dim: int = dim) -> None:
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(dim)]))

        model = distribute_module(kind(), _mesh((2,)), split)
        before = bytes_read()
        load_into(model, FOLDER / "large.pt")
        ratio = (bytes_read() - before) / (4 << 20)
        assert torch.equal(whole(model.weight), torch.load(FOLDER / "large.pt")["weight"])
        assert ratio <= most, f"dim {dim}: {ratio:.3f} of its share"


def case_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
    for number, (orig, strategy) in enumerate(product((True, False), strategies)):
        kind, name = (Tied, "tied.pt") if number % 2 else (Net, FILES[number % 4])
        model = seeded(kind, seed=5)
        options = {"use_orig_params": orig, "sharding_strategy": strategy}
        model.inner = wrap(model.inner, **options)
        model = wrap(model, **options)
        if number % 3 and RUNS:
            model.eval()(torch.zeros(2, 6))
        load_into(model, FOLDER / name)
        if HAS_FSDP2:  # older releases do not run FSDP1 on the CPU, either
            assert_filled(model, seeded(kind))


def case_fsdp1_custom_code() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for orig in (True, False):
        model = FullyShardedDataParallel(Custom(4, 6, bias=False), device_id=torch.device("cpu"), use_orig_params=orig)
        error = errors_of(functools.partial(load_into, model, FOLDER / "weight.pt"))
        assert isinstance(error, LoadError), repr(error)
        assert "FSDP1 has flattened weight" in str(error)


def case_fsdp2_optimizer() -> None:
    for meta, name in product((False, True), ("trained.pt", "trained")):
        model = sharded(meta=meta)
        optimizer = torch.optim.AdamW(model.parameters())
        load_into(model, FOLDER / name, optimizer=optimizer)
        reference, expected = trained()
        assert optimizer.param_groups[0]["lr"] == 0.1
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            for state, value in expected.state[theirs].items():
                assert torch.allclose(whole(optimizer.state[mine][state]), value, atol=1e-6), state
        if RUNS:
            step(model, optimizer)
            step(reference, expected)
            assert_close(model, reference)


def case_fsdp1_optimizer() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for orig, name in product((True, False), ("trained.pt", "trained") if RUNS else ()):
        model = seeded(seed=5)
        wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=orig)
        model.inner = wrap(model.inner)
        model = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters())
        load_into(model, FOLDER / name, optimizer=optimizer)
        reference, expected = trained()
        step(model, optimizer)
        step(reference, expected)
        assert_close(model, reference)


def module_of(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module with these keys, all zeros; fractions are parameters."""
    root = nn.Module()
    for key, value in state.items():
        module = root
        *path, name = key.split(".")
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        if value.is_floating_point() and value.ndim and not name.startswith("running"):
            module.register_parameter(name, nn.Parameter(torch.zeros_like(value)))
        else:
            module.register_buffer(name, torch.zeros_like(value))
    return root


def case_fsdp2_files_of_other_ranks() -> None:
    data = Path(__file__).parents[1] / "data"
    files: dict[Path, Any] = {}
    for name in ("torch-2.13-ranks-4/fsdp2-tp", "torch-2.13-ranks-2/fsdp1", "torch-2.13-ranks-2/fsdp2"):
        files[data / "rank-files" / name] = torch.load(data / "rank-files" / f"{name}-whole.pt")
    zero = FOLDER / "zero"
    if rank() == 0:
        shutil.unpack_archive(data / "deepspeed" / "stage3-bf16.zip", zero)
    dist.barrier()
    with handles.open(zero) as opened:
        saved: dict[Any, Any] = {"model": {}, "optimizer": {"state": {}}}
        for name, tensor in opened.items():
            kind, _, key = name.partition("/")
            if kind == "module":
                saved["model"][key] = tensor
            elif kind == "optimizer":
                key, _, value = key.removeprefix("state/").partition("/")
                saved["optimizer"]["state"].setdefault(key, {})[value] = tensor
    files[zero] = saved
    for path, saved in files.items():
        model = fully_shard(module_of(saved.get("model", saved)))
        optimizer = torch.optim.AdamW(model.parameters()) if "optimizer" in saved else None
        load_into(model, path, optimizer=optimizer)
        for key, value in wholes(model).items():
            assert torch.equal(value, saved.get("model", saved)[key]), (path, key)
        for number, (key, parameter) in enumerate(model.named_parameters()):
            states = saved["optimizer"]["state"] if optimizer else {}
            for name, value in (states.get(key) or states.get(number) or {}).items():
                assert optimizer is not None
                assert torch.equal(whole(optimizer.state[parameter][name]), value), (path, key, name)


def case_one_rank_fails_before_anything_is_written() -> None:
    good, bad = FOLDER / "model.pt", FOLDER / "bad"
    if rank() == 1:
        bad.write_bytes(good.read_bytes()[:-3000])
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: FOLDER / ("none.pt" if rank() == 1 else "model.pt"), "no such file|No such file"),
        (lambda: bad if rank() == 1 else good, "bad"),
        (lambda: FOLDER / ("weight.pt" if rank() == 1 else "model.pt"), "does not fit"),
        (lambda: FOLDER / ("other.pt" if rank() == 1 else "model.pt"), "another file"),
    ]
    for path, words in cases:
        model = sharded()
        before = locals_of(model)
        error = errors_of(lambda path=path, model=model: load_into(model, path()))  # type: ignore[misc]
        assert isinstance(error, LoadError | MissingFileError), repr(error)
        if rank() == 0:
            assert "rank 1" in str(error), error
            assert any(word in str(error) for word in words.split("|")), error
        assert "Nothing was written to the model on any rank" in str(error), error
        assert all(map(torch.equal, before, locals_of(model)))
        load_into(model, good)  # the ranks are still in step
        assert_filled(model)


def case_one_rank_fails_while_it_reads() -> None:
    def fails(*_: Any) -> None:
        raise CannotReadError("the disk is gone", where="model.pt", errno=5)

    model = sharded()
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(handles, "fill", fails)
        error = errors_of(lambda: load_into(model, FOLDER / "model.pt"))
    assert isinstance(error, CannotReadError if rank() == 1 else LoadError), repr(error)
    assert "the disk is gone" in str(error)
    assert "The model on rank 1 may be partly filled; on all others it is filled" in str(error)
    if rank() == 0:
        assert "rank 1 of 2" in str(error)
    load_into(model, FOLDER / "model.pt")
    assert_filled(model)


def case_a_group_of_ranks() -> None:
    one = [dist.new_group([0]), dist.new_group([1])][rank()]
    model = seeded(seed=5)
    if rank() == 1:  # the other does not take part
        load_into(model, FOLDER / "model.pt", process_group=one)
        assert_filled(model)


def case_ranks_with_different_meshes_agree() -> None:
    try:
        from torch.distributed.tensor import DTensor, Replicate, Shard
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import DTensor, Replicate, Shard
    everyone, alone = _mesh((2,)), _mesh((1,), ranks=[1])
    weight = torch.zeros(3, 4) if rank() == 0 else torch.zeros(6, 4)
    mesh, placement = (everyone, Shard(0)) if rank() == 0 else (alone, Replicate())
    model = nn.Linear(4, 6, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(weight, mesh, [placement], run_check=False))
    load_into(model, FOLDER / "weight.pt")
    expected = torch.arange(24.0).view(6, 4)
    assert torch.equal(model.weight.to_local(), expected[: len(weight)])
    error = errors_of(lambda: load_into(model, FOLDER / ("none.pt" if rank() else "weight.pt")))
    assert isinstance(error, MissingFileError if rank() else LoadError), repr(error)


def case_what_several_ranks_read_goes_through_the_page_cache() -> None:
    """And their shards do not need to."""
    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import Replicate, Shard, distribute_tensor
    import torch.distributed.checkpoint as dcp

    used: list[bool | None] = []

    def noted(ranges: Any, address_of: Any, settings: Any, *args: Any) -> Any:
        used.append(settings.direct)
        return fill(ranges, address_of, settings, *args)

    fill = vars(handles)["fill"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handles, "fill", noted)
        for placement, direct in ((Replicate(), False), (Shard(0), None)):
            model = nn.Linear(4, 6, bias=False)
            model.weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), _mesh((2,)), [placement]))
            load_into(model, FOLDER / "weight.pt")
            state = {"weight": model.weight.detach()}
            dcp.load_state_dict(state, CheckpointReader(FOLDER / "weight.pt"))
            assert torch.equal(whole(model.weight), torch.arange(24.0).view(6, 4))
            assert used == [direct, direct], placement
            used.clear()
        load_into(seeded(seed=5), FOLDER / "model.pt", process_group=dist.group.WORLD)
        load_into(seeded(seed=5), FOLDER / "model.pt", process_group=dist.group.WORLD, direct=True)
        load_into(seeded(seed=5), FOLDER / "model.pt")  # alone
        assert used == [False, True, None]


def case_two_dimensions() -> None:
    """On four ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh((2, 2), ("dp", "tp"))
    for columns in (8, 10) if RUNS else (8,):  # older releases refuse uneven shards in two dimensions

        def kind(columns: int = columns) -> nn.Module:
            return nn.Sequential(nn.Linear(6, columns), nn.ReLU(), nn.Linear(columns, 9))

        reference = seeded(kind)
        if rank() == 0:
            torch.save(reference.state_dict(), FOLDER / f"{columns}.pt")
        dist.barrier()
        for meta in (False, True):
            with torch.device("meta" if meta else "cpu"):
                model = kind().eval() if meta else seeded(kind, 5)
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
            load_into(model, FOLDER / f"{columns}.pt")
            x = torch.linspace(0, 1, 12).view(2, 6)
            assert not RUNS or torch.allclose(model(x), reference(x), atol=1e-6), (columns, meta)


def case_hsdp() -> None:
    """On four ranks."""
    mesh = _mesh((2, 2), ("replicate", "shard"))
    model = sharded(mesh=mesh)
    load_into(model, FOLDER / "dcp")
    assert_filled(model)


def case_a_part_of_the_ranks() -> None:
    """On four ranks, of which two have the model: the others are not asked."""
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    if rank() < 2:
        model, group = sharded(mesh=meshes[0]), meshes[0].get_group()
        load_into(model, FOLDER / "model.pt", process_group=group)
        assert_filled(model)
        path = FOLDER / ("none.pt" if rank() else "model.pt")
        error = errors_of(lambda: load_into(model, path, process_group=group))
        assert isinstance(error, MissingFileError if rank() else LoadError)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None, ranks: list[int] | None = None) -> Any:
    try:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    except ImportError:  # before torch 2.2
        from torch.distributed._tensor import DeviceMesh

        return DeviceMesh("cpu", torch.tensor(ranks or range(dist.get_world_size())).view(shape))
    if ranks is not None:
        return DeviceMesh("cpu", ranks)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def main(cases: list[str]) -> dict[str, list[str]]:
    """Run cases; return the errors of all ranks, by case."""
    global FOLDER  # noqa: PLW0603 - one process, one folder
    FOLDER = Path.cwd()
    failures: dict[str, list[str]] = {}
    for case in cases:
        text = ""
        try:
            globals()[f"case_{case}"]()
        except Exception:  # noqa: BLE001 - it is reported
            text = f"rank {rank()}: {traceback.format_exc()}"
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        if any(texts):
            failures[case] = [each for each in texts if each]
    return failures
