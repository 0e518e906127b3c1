from __future__ import annotations

from typing import Any

from transload.checkpoint import Checkpoint, Tensor
from transload.nodes import Big, Call, Dict, Extension, Global, Persistent, Pickle, Set
from transload.render.checkpoint import MAX_DEPTH, object_tree
from transload.render.lines import Style, layout, plain

ORDERED = Global("collections", "OrderedDict", 0)
REBUILD = Global("torch._utils", "_rebuild_tensor_v2", 0)


def drawn(root: object, *tensors: Tensor, max_lines: int = 2000) -> list[str]:
    pickle = Pickle("data.pkl")
    pickle.main, pickle.root = True, root
    checkpoint = Checkpoint("model.pt", "torch-zip", 0, tensors=tensors, pickles=(pickle,))
    lines = [plain(line) for line in layout(object_tree(checkpoint, max_lines), Style(width=200))]
    assert lines[:2] == ["", "structure"]
    return [line.removeprefix("  ") for line in lines[2:]]


def make_call(callee: Global, args: object = (), **fields: Any) -> Call:
    call = Call(callee, args, "reduce", 0)
    for name, value in fields.items():
        setattr(call, name, value)
    return call


def test_tensors_show_dtype_shape_and_device_and_short_tuples_are_inline() -> None:
    state = make_call(
        ORDERED, items=["w", make_call(REBUILD, (Persistent(("storage",), 0), 0, (4, 3), (3, 1)))], states=[Dict([])]
    )
    root = Dict(["model", state, "epoch", 3, "betas", (0.9, 0.999), "note", "a\nb", "none", None, 7, b"xyz"])
    weight = Tensor(("model", "w"), "model/w", "float32", (4, 3), (3, 1), "cuda:0", "0", cls="Parameter")
    assert drawn(root, weight) == [
        "dict of 6",
        "├─ model: collections.OrderedDict of 1",
        "│  └─ w: Parameter float32 [4, 3] on cuda:0",
        "├─ epoch: 3",
        "├─ betas: (0.9, 0.999)",
        "├─ note: 'a\\nb'",
        "├─ none: None",
        "└─ 7: bytes of 3 bytes",
    ]


def test_objects_show_their_arguments_and_state() -> None:
    state = (Dict(["lr", 0.1]), Dict(["slot", 1]))
    root = make_call(Global("my.mod", "Thing", 0), (1, "two", Dict([])), states=[state], appended=[5])
    assert drawn(root) == ["my.mod.Thing(1, 'two') of 1", "├─ [2]: dict of 0", "├─ lr: 0.1", "├─ slot: 1", "└─ [0]: 5"]
    assert drawn(make_call(Global("m", "N", 0), states=["odd"])) == ["m.N", "└─ state: 'odd'"]


def test_shared_objects_are_shown_once_and_cycles_end() -> None:
    inner = Dict(["x", 1])
    root = Dict(["a", inner, "b", inner])
    root.items += ["self", root]
    assert drawn(root) == ["dict of 3  #1", "├─ a: dict of 1  #2", "│  └─ x: 1", "├─ b: → #2", "└─ self: → #1"]


def test_every_kind_of_node_has_a_text() -> None:
    nodes = [
        Set([1]),
        Set([], frozen=True),
        Big(9),
        Extension(3),
        Persistent(1, 0),
        REBUILD,
        bytearray(b"x"),
        1 << 999,
    ]
    lines = drawn([*nodes, make_call(REBUILD)])
    assert lines[:3] == ["list of 9", "├─ [0]: set of 1", "│  └─ [0]: 1"]
    text = "\n".join(lines)
    for words in ("frozenset of 0", "a huge integer", "copyreg extension 3", "a storage", "bytearray of 1 byte"):
        assert words in text
    assert drawn(Call(3, None, "obj", 0)) == ["an object of a computed class"]


def test_depth_is_bounded() -> None:
    root: object = 1
    for _ in range(50_000):
        root = [root, [[]]]
    lines = drawn(root)
    assert f"… deeper than {MAX_DEPTH} levels" in "\n".join(lines)


def test_lines_are_bounded_and_the_rest_is_counted() -> None:
    lines = drawn(list(range(5000)), max_lines=10)
    assert len(lines) == 11
    assert lines[-1] == "… 4,991 more lines"


def test_nested_shared_pairs_are_not_expanded_exponentially() -> None:
    root: object = Dict(["end", 1])
    for _ in range(60):
        root = [root, root]
    assert len(drawn(root)) < 200


def test_a_format_without_a_pickle_says_so() -> None:
    lines = [plain(line) for line in layout(object_tree(Checkpoint("m", "safetensors", 0)), Style())]
    assert "has no pickled tree" in lines[-1]
