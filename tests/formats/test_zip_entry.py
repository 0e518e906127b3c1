"""Names of zip entries: checking them all at once gives the same result as one by one."""

from __future__ import annotations

from tests.each import each

from transload.findings import Problems
from transload.formats.zip import DirectoryEntry, check_names, find_root, names_below

NAMES: dict[str, tuple[bytes, ...]] = {
    "plain": (b"a/data.pkl", b"a/data/0", b"a/version"),
    "one": (b"a/data.pkl",),
    "duplicate": (b"a/data/0", b"a/data/1", b"a/data/0"),
    "differ in case": (b"a/data/x", b"a/data/X"),
    "a newline": (b"a/data/0", b"a/data/1\na/data/2"),
    "a newline and a duplicate": (b"a/b", b"a/c\na/d", b"a/b"),
    "a newline and another folder": (b"a/b", b"c/d\na/e"),
    "NUL": (b"a/b", b"a/c\0d"),
    "backslash": (b"a/b", b"a\\c"),
    "absolute path": (b"a/b", b"/a/c"),
    "parent folder": (b"a/b", b"a/../c"),
    "two dots in a name": (b"a/b", b"a/c..d"),
    "not UTF-8": (b"a/b", b"a/\xff"),
    "UTF-8": (b"a/b", "a/ä".encode()),
    "half a UTF-8 character": (b"a/b\xc3", b"a/c"),
    "empty": (b"a/b", b""),
    "two folders": (b"a/b", b"c/d"),
    "a folder with the same prefix": (b"a/b", b"ab/c"),
    "an index in another folder": (b"a/b", b"c/data.pkl"),
    "no folder": (b"b", b"c"),
    "code of a shared module": (b"a/code/x.py", b"a/code/x.py"),
}


def entries_of(names: tuple[bytes, ...]) -> list[DirectoryEntry]:
    return [DirectoryEntry(name, 0, 0, 1, 2, 2, 0) for name in names]


@each("case", list(NAMES))
def test_names_checked_together_give_the_same_problems_as_one_by_one(case: str) -> None:
    together = Problems()
    apart = Problems()
    check_names(entries_of(NAMES[case]), together)
    check_names(entries_of((*NAMES[case], b"odd\\name")), apart)  # forces the slow path: one by one
    assert together == apart[:-1]
    assert apart[-1].where == "odd\\name"


@each("case", list(NAMES))
@each("prefix", ["", "a/", "c/"])
def test_names_below_a_folder(case: str, prefix: str) -> None:
    texts = [name.decode("utf-8", "backslashreplace") for name in NAMES[case]]
    below = [text.removeprefix(prefix) if text.startswith(prefix) else f"/{text}" for text in texts]
    assert names_below([*NAMES[case]], prefix) == below


@each(
    ("case", "root", "codes"),
    [
        ("plain", "a", []),
        ("a newline", "a", []),
        ("a newline and another folder", "a", ["zip-two-folders"]),
        ("a folder with the same prefix", "a", ["zip-two-folders"]),
        ("an index in another folder", "c", ["zip-two-folders"]),
        ("no folder", None, ["zip-no-folder"]),
    ],
)
def test_find_root_and_its_problems(case: str, root: str | None, codes: list[str]) -> None:
    problems = Problems()
    assert find_root(entries_of(NAMES[case]), problems) == root
    assert [problem.code for problem in problems] == codes
