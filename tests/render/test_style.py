from __future__ import annotations

import io

from tests.each import each

from transload.render.lines import PIPE_WIDTH, Style, style_of


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@each(
    ("flag", "environ", "terminal", "colour"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "0"}, True, False),
        ("auto", {"FORCE_COLOR": ""}, False, False),
        ("auto", {"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("always", {"NO_COLOR": "1", "TERM": "dumb"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour_precedence_is_flag_no_color_force_color_terminal(
    flag: str, environ: dict[str, str], terminal: bool, colour: bool
) -> None:
    assert style_of(Terminal() if terminal else io.StringIO(), flag, environ).colour is colour


def test_pipe_is_not_cut_and_has_a_fixed_width() -> None:
    style = style_of(io.StringIO(), environ={})
    assert (style.colour, style.cut, style.width) == (False, False, PIPE_WIDTH)


@each(
    ("columns", "width"),
    [("72", 72), ("1", 40), ("0", PIPE_WIDTH), ("wide", PIPE_WIDTH), ("-80", PIPE_WIDTH), ("9" * 5000, 999_999)],
)
def test_columns_variable_sets_the_width(columns: str, width: int) -> None:
    assert style_of(Terminal(), environ={"COLUMNS": columns}).width == width


@each("encoding", ["ascii", "cp1252", "latin-1", "koi8-r", "no-such-encoding"])
def test_text_becomes_ascii_if_the_stream_encoding_lacks_its_symbols(encoding: str) -> None:
    stream = Terminal()
    stream.encoding = encoding
    style = style_of(stream, environ={})
    assert style.encoding == "ascii"
    assert style.text("├─ a … ×3 → ok") == "|- a ... x3 -> ok"
    assert style.text("重") == "\\u91cd"


def test_lone_surrogate_is_escaped() -> None:
    assert Style().text("\ud800") == "\\ud800"


def test_closed_stream_is_not_a_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    assert not style_of(stream, environ={}).cut
