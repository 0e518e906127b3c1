from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from transload.checkpoint import Checkpoint, Tensor
from transload.render.checkpoint import Twig, tensor_tree, tree_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def tensor(name: str, shape: tuple[int, ...] = (2,), device: str = "cpu") -> Tensor:
    return Tensor((name,), name, "float32", shape, (1,), device, None)


def drawn(tensors: Iterable[Tensor], limit: int = 100) -> list[str]:
    """The tree as text: guide, name, and how many copies."""
    out = []
    for guide, twig in tree_rows(tensor_tree(tensors, limit)):
        if isinstance(twig, int):
            out.append(f"{guide}+{twig}")
        else:
            times = f" ×{twig.copies}" if twig.copies > 1 else ""
            closed = twig.tensor is None and not twig.children
            out.append(f"{guide}{twig.name}{times}{' (closed)' if closed else ''}")
    return out


def test_equal_numbered_branches_fold_into_one() -> None:
    names = [f"h.{layer}.{name}" for layer in range(12) for name in ("weight", "bias")]
    assert drawn(map(tensor, names)) == ["h.0 … 11 ×12", "├─ weight", "└─ bias"]


def test_branches_that_differ_in_shape_device_or_names_do_not_fold() -> None:
    tensors = [tensor("h.0.w"), tensor("h.1.w", (3,)), tensor("h.2.w", device="cuda:0"), tensor("h.3.v")]
    assert drawn(tensors) == ["h", "├─ 0.w", "├─ 1.w", "├─ 2.w", "└─ 3.v"]


def test_alternating_branches_fold_separately() -> None:
    tensors = [tensor(f"s.{index}.{'ab'[index % 2]}") for index in range(12)]
    assert drawn(tensors) == ["s", "├─ 0, 2, 4 … 10 ×6", "│  └─ a", "└─ 1, 3, 5 … 11 ×6", "   └─ b"]


def test_numbered_branches_are_sorted() -> None:
    names = sorted((f"h.{layer}.w" for layer in range(12)), key=str)
    assert drawn(map(tensor, names)) == ["h.0 … 11 ×12", "└─ w"]


def test_numbers_inside_names_fold_too() -> None:
    names = [f"layer{number}.conv.weight" for number in range(1, 5)]
    assert drawn(map(tensor, names)) == ["layer1 … layer4 ×4", "└─ conv.weight"]


def test_two_tensors_are_shown_and_three_equal_ones_fold() -> None:
    assert drawn([tensor("p.0"), tensor("p.1")]) == ["p", "├─ 0", "└─ 1"]
    assert drawn([tensor("p.0"), tensor("p.1"), tensor("p.2")]) == ["p.0 … 2 ×3"]


def test_branch_and_tensor_may_have_the_same_name() -> None:
    assert drawn([tensor("a"), tensor("a.b"), tensor("a.c")]) == ["a", "a", "├─ b", "└─ c"]


def test_tensors_with_the_same_name_are_both_shown() -> None:
    assert drawn([tensor("1"), tensor("1")]) == ["1", "1"]


def test_upper_levels_are_shown_first_under_a_line_limit() -> None:
    tensors = [tensor(f"{top}.{index}.{low}", (index,)) for top in "ab" for index in range(9) for low in "xyz"]
    lines = drawn(tensors, limit=12)
    assert lines[0] == "a"
    assert lines[-1] == "b (closed)"
    assert len(lines) == 11


def test_list_longer_than_the_limit_counts_the_rest() -> None:
    assert drawn([tensor(f"n{i}x", (i,)) for i in range(100)], limit=10)[-1] == "+90"


def test_totals_count_every_copy(transformer: Checkpoint) -> None:
    tree = tensor_tree(transformer.tensors, 999)
    assert (tree.tensors, tree.nbytes) == (291, transformer.tensor_nbytes)
    assert sum(twig.nbytes for twig in tree.children) == tree.nbytes


def twigs(twig: Twig) -> Iterator[Twig]:
    yield twig
    for child in twig.children:
        yield from twigs(child)


@given(st.lists(st.text(alphabet="ab01./", max_size=9)))
def test_tree_counts_every_tensor_whatever_the_names(names: list[str]) -> None:
    tree = tensor_tree(map(tensor, names), 999)
    assert tree.tensors == len(names)
    assert tree.nbytes == 8 * len(names)
    for twig in twigs(tree):
        is_tensor = twig.tensor is not None
        assert twig.tensors == twig.copies * (is_tensor + sum(child.tensors for child in twig.children)) or twig is tree


def test_name_with_very_many_dots_does_not_make_a_deep_tree() -> None:
    ((_, twig),) = tree_rows(tensor_tree([tensor("." * 100_000)], 10))
    assert isinstance(twig, Twig)
    assert twig.tensors == 1
