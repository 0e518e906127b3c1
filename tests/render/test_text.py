from __future__ import annotations

import io
from dataclasses import replace

import pytest

from transload.checkpoint import Checkpoint, Part, Tensor
from transload.findings import INTEGRITY, SAFETY, Finding
from transload.render.checkpoint import INTEGRITY as INTEGRITY_WORDS
from transload.render.checkpoint import SAFETY as SAFETY_WORDS
from transload.render.checkpoint import elements, files, globals_by_verdict, report, summary_lines, tensors_listed
from transload.render.lines import Style, emit, layout, plain

TRANSFORMER = """\
pytorch_model.bin
  format      torch.save zip archive
  written by  torch 2.1 to 2.6
  size        13.5 GB · 291 tensors of 13.5 GB · 6.74 billion parameters
  devices     cuda:0 291 tensors, 13.5 GB
  dtypes      bfloat16 291 tensors, 13.5 GB
  safety      data-only: loading it runs no code
  integrity   unchecked: every tensor has its bytes; there are no checksums to compare
  loading     Without CUDA torch.load fails; map_location="cpu" loads it.

· every tensor is tagged cuda:0  [cuda-tags]
    291 tensors
  → do this

tensors  291
  model                                                           13.2 GB
  ├─ embed_tokens.weight                 bfloat16  [32000, 4096]   262 MB
  ├─ layers.0 … 31  ×32                            405 MB each    13.0 GB
  │  ├─ self_attn                                                  134 MB
  │  │  ├─ q_proj.weight                 bfloat16  [4096, 4096]   33.6 MB
  │  │  ├─ k_proj.weight                 bfloat16  [4096, 4096]   33.6 MB
  │  │  ├─ v_proj.weight                 bfloat16  [4096, 4096]   33.6 MB
  │  │  └─ o_proj.weight                 bfloat16  [4096, 4096]   33.6 MB
  │  ├─ mlp                                                        271 MB
  │  │  ├─ gate_proj.weight              bfloat16  [11008, 4096]  90.2 MB
  │  │  ├─ up_proj.weight                bfloat16  [11008, 4096]  90.2 MB
  │  │  └─ down_proj.weight              bfloat16  [4096, 11008]  90.2 MB
  │  ├─ input_layernorm.weight           bfloat16  [4096]         8.19 kB
  │  └─ post_attention_layernorm.weight  bfloat16  [4096]         8.19 kB
  └─ norm.weight                         bfloat16  [4096]         8.19 kB
  lm_head.weight                         bfloat16  [32000, 4096]   262 MB
"""


def rendered(checkpoint: Checkpoint, width: int = 100, *, cut: bool = False) -> str:
    style = Style(width=width, cut=cut)
    return "".join(f"{plain(line)}\n" for line in layout(report(checkpoint), style))


def test_tables_of_tensors_and_files_fit_a_narrow_terminal(transformer: Checkpoint, hostile: Checkpoint) -> None:
    for blocks in (tensors_listed(transformer), files([transformer, replace(hostile, path="x" * 50)], 2)):
        lines = [plain(line) for line in layout(blocks, Style(width=40, cut=True))]
        assert max(map(len, lines)) <= 40, lines


def test_report_on_a_transformer(transformer: Checkpoint) -> None:
    assert rendered(transformer) == TRANSFORMER


def test_optimizer_is_counted_separately_and_values_near_the_root_are_shown(training: Checkpoint) -> None:
    text = rendered(training, 140)
    assert "667 million parameters · 433 million in the optimizer" in text
    assert "  values      epoch 12 · global_step 34000 · 1 more\n" in text
    assert "Lightning" in text
    assert "needs-trust: it asks for what torch does not load by default (argparse.Namespace)" in text
    assert "  ├─ 0, 3, 6 … 18  ×7" in text


def test_shared_tensors_count_once(transformer: Checkpoint) -> None:
    count, _, _ = elements(transformer.tensors)
    assert elements(transformer.tensors * 2) == (count, 0, 0)


def test_ema_copies_are_counted_separately() -> None:
    def tensor(*path: str, size: int = 4) -> Tensor:
        return Tensor(path, "/".join(path), "float32", (size,), (1,), "cpu", "/".join(path))

    model = tensor("state_dict", "schema.weight")
    copies = [tensor("state_dict_ema", "fc.weight"), tensor("model_ema.fc.weight"), tensor("EMA", "w")]
    assert elements([model, *copies, tensor("optimizer", "0")]) == (4, 12, 4)
    assert elements(copies) == (12, 0, 0)


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_report_fits_the_terminal_width(transformer: Checkpoint, training: Checkpoint, width: int) -> None:
    for checkpoint in (transformer, training):
        assert max(map(len, rendered(checkpoint, width, cut=True).splitlines())) <= width


def test_report_on_a_web_page(web_page: Checkpoint) -> None:
    text = rendered(web_page)
    assert "not-a-checkpoint" in text
    assert "✗ this is a web page  [html-page]\n    <!DOCTYPE html>\n  → Download it again.\n" in text
    assert "tensors" not in text


def test_long_evidence_and_further_findings_are_cut_and_counted(web_page: Checkpoint) -> None:
    finding = Finding("many", "warning", "many", tuple(f"fact {n}" for n in range(100)))
    text = rendered(replace(web_page, findings=(finding,) * 50))
    assert "… and 92 more" in text
    assert "30 further findings; --json lists all of them" in text


def test_errors_come_before_warnings_and_notes(web_page: Checkpoint) -> None:
    mixed = (Finding("n", "note", "a note"), Finding("w", "warning", "a warning"), Finding("e", "error", "an error"))
    text = rendered(replace(web_page, findings=mixed))
    assert text.index("an error") < text.index("a warning") < text.index("a note")


def test_parts_are_shown_as_a_table(web_page: Checkpoint) -> None:
    parts = (Part("one.bin", "shard", 9_976_620_122, (("tensors", "200"),)), Part("index.json", "index", 26788))
    text = rendered(replace(web_page, parts=parts * 30))
    assert "  one.bin     shard  9.98 GB  tensors 200\n  index.json  index  26.8 kB\n" in text
    assert "… and 20 more" in text


def test_every_verdict_has_a_text() -> None:
    assert set(SAFETY_WORDS) == set(SAFETY)
    assert set(INTEGRITY_WORDS) == set(INTEGRITY)


def test_control_characters_of_a_hostile_file_are_escaped(hostile: Checkpoint) -> None:
    stream = io.StringIO()
    for blocks in (report(hostile), tensors_listed(hostile), globals_by_verdict(hostile), files([hostile, hostile], 2)):
        emit(blocks, stream)
    text = stream.getvalue() + repr(hostile)
    assert all(char.isprintable() or char == "\n" for char in text)
    text.encode()


def test_repr_has_at_most_ten_lines(
    transformer: Checkpoint, training: Checkpoint, hostile: Checkpoint, web_page: Checkpoint
) -> None:
    for checkpoint in (transformer, training, hostile, web_page):
        lines = summary_lines(checkpoint)
        assert len(lines) <= 10
        assert repr(checkpoint) == "\n".join(lines)
    assert summary_lines(web_page)[-1] == "  findings    error: this is a web page"
    assert repr(transformer).isascii()


def test_list_of_tensors_is_not_cut_in_a_pipe(training: Checkpoint) -> None:
    stream = io.StringIO()
    emit(tensors_listed(training), stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(training.tensors) + 2
    assert lines[2].split() == [
        *("state_dict/model.embed_tokens.weight", "bfloat16", "[32000,", "4096]", "cuda:0", "262", "MB", "storage", "0")
    ]


def test_list_of_tensors_shows_their_flags(training: Checkpoint) -> None:
    first, second = training.tensors[:2]
    storage = training.storages[0]._replace(tensors=(first.name, second.name), stored=1)
    special = first._replace(requires_grad=True, kind="sparse_coo", cls="Parameter")
    stream = io.StringIO()
    emit(tensors_listed(replace(training, tensors=(special,), storages=(storage,))), stream)
    assert stream.getvalue().rstrip().endswith("sparse_coo, Parameter, requires_grad, shared, incomplete")


def test_globals_are_sorted_by_verdict_worst_first(training: Checkpoint, hostile: Checkpoint) -> None:
    stream = io.StringIO()
    emit(globals_by_verdict(replace(training, globals=(*training.globals, *hostile.globals))), stream)
    text = stream.getvalue()
    order = [text.index(name) for name in ("os.system", "e\\n.<b>", "argparse.Namespace", "_rebuild_tensor_v2")]
    assert order == sorted(order)
    assert "called 60×" in text


def test_several_files_in_one_table(transformer: Checkpoint, web_page: Checkpoint) -> None:
    stream = io.StringIO()
    emit(files([transformer, web_page], 3), stream)
    text = stream.getvalue()
    rows = [line.split("  ")[0] for line in text.splitlines()[:3]]
    assert rows == ["file", "pytorch_model.bin", "model.pt"]
    assert text.endswith("\n3 files: 1 fine, 1 with a problem, 1 could not be read\n")
    assert "✗ this is a web page" in text
    assert "every tensor is tagged" not in text  # notes on files without problems are left out
