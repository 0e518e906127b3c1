"""Names of zip entries: looked at together, and one by one, they tell the same."""

from __future__ import annotations

from tests.each import each

from transload.findings import Problems
from transload.formats.zip import Entry, check_names, find_root, names_below

NAMES: dict[str, tuple[bytes, ...]] = {
    "plain": (b"a/data.pkl", b"a/data/0", b"a/version"),
    "one": (b"a/data.pkl",),
    "the same twice": (b"a/data/0", b"a/data/1", b"a/data/0"),
    "other letters": (b"a/data/x", b"a/data/X"),
    "a newline": (b"a/data/0", b"a/data/1\na/data/2"),
    "a newline and a double": (b"a/b", b"a/c\na/d", b"a/b"),
    "a newline for another folder": (b"a/b", b"c/d\na/e"),
    "NUL": (b"a/b", b"a/c\0d"),
    "backslash": (b"a/b", b"a\\c"),
    "from the root": (b"a/b", b"/a/c"),
    "upwards": (b"a/b", b"a/../c"),
    "two dots in a name": (b"a/b", b"a/c..d"),
    "no UTF-8": (b"a/b", b"a/\xff"),
    "UTF-8": (b"a/b", "a/ä".encode()),
    "half a letter": (b"a/b\xc3", b"a/c"),
    "empty": (b"a/b", b""),
    "two folders": (b"a/b", b"c/d"),
    "a folder that begins alike": (b"a/b", b"ab/c"),
    "an index elsewhere": (b"a/b", b"c/data.pkl"),
    "no folder": (b"b", b"c"),
    "code of a shared module": (b"a/code/x.py", b"a/code/x.py"),
}


def entries_of(names: tuple[bytes, ...]) -> list[Entry]:
    return [Entry(name, 0, 0, 1, 2, 2, 0) for name in names]


@each("case", list(NAMES))
def test_names_are_checked_as_if_one_by_one(case: str) -> None:
    together = Problems()
    apart = Problems()
    check_names(entries_of(NAMES[case]), together)
    check_names(entries_of((*NAMES[case], b"odd\\name")), apart)  # because of which each is looked at
    assert together == apart[:-1]
    assert apart[-1].where == "odd\\name"


@each("case", list(NAMES))
@each("prefix", ["", "a/", "c/"])
def test_names_below_a_folder_are_those_one_by_one(case: str, prefix: str) -> None:
    texts = [name.decode("utf-8", "backslashreplace") for name in NAMES[case]]
    below = [text.removeprefix(prefix) if text.startswith(prefix) else f"/{text}" for text in texts]
    assert names_below([*NAMES[case]], prefix) == below


@each(
    ("case", "root", "codes"),
    [
        ("plain", "a", []),
        ("a newline", "a", []),
        ("a newline for another folder", "a", ["zip-two-folders"]),
        ("a folder that begins alike", "a", ["zip-two-folders"]),
        ("an index elsewhere", "c", ["zip-two-folders"]),
        ("no folder", None, ["zip-no-folder"]),
    ],
)
def test_the_folder_of_the_first_entry_is_the_root(case: str, root: str | None, codes: list[str]) -> None:
    problems = Problems()
    assert find_root(entries_of(NAMES[case]), problems) == root
    assert [problem.code for problem in problems] == codes
