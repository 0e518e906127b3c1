from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from transload.checkpoint import Checkpoint
from transload.errors import CannotReadError
from transload.render.json import error_to_dict, to_json


def text_of(*documents: dict[str, Any], several: bool = False) -> str:
    return "".join(to_json(documents, several=several))


def parse_strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_equals_to_dict(transformer: Checkpoint, training: Checkpoint, web_page: Checkpoint) -> None:
    for checkpoint in (transformer, training, web_page):
        assert parse_strictly(text_of(checkpoint.to_dict())) == checkpoint.to_dict()


def test_each_tensor_is_on_one_line(transformer: Checkpoint) -> None:
    lines = text_of(transformer.to_dict()).splitlines()
    assert sum(line.startswith('{"name": "model.layers.') for line in lines) == 288


def test_names_round_trip_exactly(hostile: Checkpoint) -> None:
    text = text_of(hostile.to_dict())
    assert text.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    names = [tensor["name"] for tensor in parse_strictly(text)["tensors"]]
    # A lone surrogate, which few parsers accept, is escaped.
    assert names == [tensor.name.encode("utf-8", "backslashreplace").decode() for tensor in hostile.tensors]
    assert "\\ud800" in names


def test_huge_numbers_stay_valid_json(hostile: Checkpoint) -> None:
    (tensor,) = [tensor for tensor in parse_strictly(text_of(hostile.to_dict()))["tensors"] if tensor["name"] == "long"]
    assert int(tensor["shape"][0], 16) == 10**6000


def test_values_that_json_cannot_express_become_strings() -> None:
    document = {"nan": float("nan"), "infinity": [float("-inf")], "tuple": (1, 2.5, None, True), "bytes": b"x"}
    expected = {"nan": "nan", "infinity": ["-inf"], "tuple": [1, 2.5, None, True], "bytes": "b'x'"}
    assert parse_strictly(text_of(document)) == expected


def test_several_files_are_an_array(web_page: Checkpoint) -> None:
    error = CannotReadError("no such file", where="x.pt", fix="look again", errno=2)
    documents = parse_strictly(text_of(web_page.to_dict(), error_to_dict("x.pt", error), several=True))
    assert documents[0]["format"] == "html"
    assert documents[1] == {
        "schema": 1,
        "path": "x.pt",
        "ok": False,
        "error": {"what": "no such file", "where": "x.pt", "fix": "look again", "errno": 2},
    }
    assert len(parse_strictly(text_of(replace(web_page, path="\udcff").to_dict(), several=True))) == 1
