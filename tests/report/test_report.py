"""A report has the numbers of its files, names what is missing, and refuses what is no run."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.reproduce.tiny_experiment import tiny
from hosts.families import build, pictures
from page_parts import Parts
from scripts import ROOT

import adamerge.experiments.compare as comparison
import adamerge.experiments.reproduce as reproduce
from adamerge.core.errors import BadOption, BadOutput
from adamerge.core.stats import LayerStats
from adamerge.experiments.benchmark import bench
from adamerge.experiments.benchmark.requests import note_request, requests_file
from adamerge.experiments.benchmark.turns import Turns
from adamerge.experiments.compare import compare
from adamerge.methods import tome
from adamerge.report import page, write_report
from adamerge.search.variants import Variant

RESULTS = ROOT / "benchmarks" / "results"
FILES = ROOT / "tests" / "files" / "0.1.0"
METHODS = {"tome": Variant("tome"), "adaptive": Variant("adamerge")}


@pytest.fixture(scope="module")
def model():
    return build("vit", patch_size=8, depth=4)


def run(model, out: Path, **options) -> None:
    """A small comparison, in which adaptive counts differ from image to image."""
    images = pictures(12, seed=2)
    data = list(zip(images.split(5), (torch.arange(12) % 10).split(5), strict=True))
    settings = dict(methods=METHODS, budgets=(0.2, 0.3), tolerance=0.05, name="tiny", progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_draw", lambda rows, path: None)
        compare(model, pictures(5, seed=1), data, out=out, **{**settings, **options})


@pytest.fixture(scope="module")
def compared(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("compared")
    run(model, out)
    return out


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shown_is_rounded(exact: str, shown: str) -> bool:
    """Whether what is shown is the exact number, rounded to as many digits as are shown."""
    if exact == shown:
        return True
    digits = re.sub(r"[^\d.eE+-]", "", shown)
    number = float(digits) / (100 if "%" in shown else 1)
    decimals = len(digits.partition(".")[2]) + (2 if "%" in shown else 0)
    significant = 0.5 * 10.0**-decimals if "e" not in digits else 0.01 * abs(float(exact))
    return abs(number - float(exact)) <= max(significant, 5e-4 * abs(float(exact))) * (1 + 1e-9)


def check(rows: list[dict[str, str]], table: list[dict[str, tuple[str, str]]]) -> int:
    """Compare every cell of a table with the rows of its file; gives the number of cells."""
    assert len(rows) == len(table)
    cells = 0
    for row, shown in zip(rows, table, strict=True):
        for key, (exact, text) in shown.items():
            assert exact == row[key], key
            assert shown_is_rounded(exact, text), (key, exact, text)
            cells += 1
    return cells


@pytest.mark.parametrize(
    "name", ["compare-vit_tiny_patch16_224.csv", "compare-deit_tiny_patch16_224.csv", "bench-vit_base_patch16_224.csv"]
)
def test_every_number_of_a_table_is_that_of_its_csv(name, tmp_path):
    found = Parts(write_report([RESULTS / name], tmp_path / "report.html").read_text())
    rows = read(RESULTS / name)
    assert check(rows, found.tables[name]) > 300
    values = {value for row in rows for value in row.values()}
    assert found.marks and all(x in values and y in values for x, y in found.marks)


def test_every_table_and_claim_of_a_reproduction_is_that_of_its_csv(tmp_path):
    folder = RESULTS / "reproduce-vit_tiny_patch16_224"
    found = Parts(write_report([folder], tmp_path / "report.html").read_text())
    names = {path.name for path in folder.glob("*.csv")}
    assert set(found.tables) == names
    for name in names - {"claims.csv"}:
        check(read(folder / name), found.tables[name])
    for claim, shown in zip(read(folder / "claims.csv"), found.tables["claims.csv"], strict=True):
        assert (shown["text"][0], shown["paper"][0], shown["verdict"][0]) == tuple(
            claim[key] for key in ("text", "paper", "verdict")
        )
        told = re.findall(r"[+-]?\d+\.\d+", claim["ours"])
        assert sorted(told) == sorted(re.findall(r"[+-]?\d+\.\d+", shown["here"][0] + " " + shown["interval"][0]))
        assert claim["decisive"] in shown["verdict"][1]


def test_a_comparison_is_reported_with_layers_tokens_and_images(compared):
    path = write_report([compared])
    assert path == compared / "report.html"
    text = path.read_text()
    found = Parts(text)
    check(read(compared / "results.csv"), found.tables["results.csv"])
    assert found.missing == []
    assert "E[r_l]" in text and "tokens kept of 64" in text and "Fewest tokens kept" in text
    assert found.images == 16
    assert len(text.encode()) < 5_000_000


def test_the_page_needs_no_other_file_and_no_network(compared):
    text = write_report([compared]).read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "url(" not in text.replace("url(#inside)", "") and "@import" not in text and "http://" not in text
    assert "default-src 'none'" in text


def test_a_comparison_that_was_killed_says_which_cells_are_missing(model, tmp_path, monkeypatch):
    inner = comparison.measure

    def stop_at_the_third(shared, cell):
        if cell.label == "adaptive":
            raise KeyboardInterrupt
        return inner(shared, cell)

    monkeypatch.setattr(comparison, "measure", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out")
    found = Parts(write_report([tmp_path / "out"]).read_text())
    assert found.missing[0] == "3 of 5 cells; the run was stopped before they were done"
    assert [text.partition(":")[0] for text in found.missing[1:]] == [
        "adaptive, cut 20 %",
        "tome, cut 30 %",
        "adaptive, cut 30 %",
    ]
    assert [row["method"][0] for row in found.tables["cells"]] == ["none", "tome"]
    monkeypatch.setattr(comparison, "measure", inner)
    run(model, tmp_path / "out")
    finished = read(tmp_path / "out" / "results.csv")
    assert [row["top1"][0] for row in found.tables["cells"]] == [row["top1"] for row in finished[:2]]
    assert Parts(write_report([tmp_path / "out"]).read_text()).missing == []


def test_a_later_run_that_was_killed_is_not_shown_as_the_earlier_one(model, compared, tmp_path, monkeypatch):
    out = tmp_path / "again"
    shutil.copytree(compared, out)

    def stop(shared, cell):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, out, budgets=(0.4,))
    found = Parts(write_report([out]).read_text())
    assert [row["method"][0] for row in found.tables["cells"]] == ["none"]
    assert len(found.missing) == 3


def test_a_method_that_was_left_out_is_named_with_the_reason(model, tmp_path):
    with pytest.warns(UserWarning, match="left out"):
        run(model, tmp_path / "out", methods={"tome": Variant("tome"), "dsm": Variant("dsm")}, budgets=(0.97,))
    missing = Parts(write_report([tmp_path / "out"]).read_text()).missing
    assert missing and all(re.match(r"(tome|dsm), cut 97 %: .+", text) for text in missing)


def test_a_reproduction_that_was_killed_says_which_parts_are_missing(tmp_path, monkeypatch):
    def stop(experiment, out):
        raise KeyboardInterrupt

    monkeypatch.setitem(reproduce.PARTS, "proposition", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce.run(["layers", "proposition"], tiny(), tmp_path)
    text = write_report([tmp_path]).read_text()
    found = Parts(text)
    assert [part.partition(":")[0] for part in found.missing] == ["proposition"]
    check(read(tmp_path / "layers-iterative.csv"), found.tables["layers-iterative.csv"])
    assert "Parts that nobody asked for: table1, table2, ablation, refinement." in text


def test_a_file_of_statistics_beside_a_run_is_passed_over(tmp_path):
    runs, page = tmp_path / "runs", tmp_path / "all.html"
    tome(2).save(runs / "recipe.json")
    alone = write_report([runs], page).read_text()
    LayerStats((0.3,), (0.1,), recipe={"part": "Recipe"}).save(runs / "stats.json")
    assert write_report([runs], page).read_text() == alone


def test_files_of_eval_bench_and_tune_are_read(tmp_path):
    figures = {
        "model": "m<script>", "method": "tome", "options": [], "images": 3, "top1": 0.5, "kl": 0.25,
        "r_per_layer": [1.0, 2.5], "patches": 16, "tokens_kept": "[10, 12, 12]", "unreadable": ["bad.png"],
        "versions": {"torch": "2"},
    }  # fmt: skip
    (tmp_path / "eval.json").write_text(json.dumps(figures))
    runs = [tmp_path / "eval.json", FILES / "recipe-tuned.json", FILES / "journal.jsonl"]
    text = write_report(runs, tmp_path / "all.html").read_text()
    found = Parts(text)
    assert "m<script>" not in text and "m&lt;script&gt;" in text
    assert ("0", "1.0") in found.marks and ("12", "2") in found.marks
    assert found.missing[0] == "bad.png: could not be read" and found.missing[1].startswith("the recipe: ")
    assert len(found.tables["journal.jsonl"]) == len((FILES / "journal.jsonl").read_text().splitlines()) - 1


def test_a_benchmark_that_was_stopped_says_which_sizes_are_missing(model, tmp_path, monkeypatch):
    out, take = tmp_path / "bench.csv", Turns.take

    def stopped(self, group):
        if self.label == "batch 3":
            raise KeyboardInterrupt
        return take(self, group)

    monkeypatch.setattr(Turns, "take", stopped)
    options: dict[str, Any] = dict(
        rounds=1, inner=1, merged=["packed"], unmerged=["eager"], out=out, name="tiny", progress=False
    )

    def missing() -> list[str]:
        return Parts(write_report([out], tmp_path / "report.html").read_text()).missing

    for sizes, left in (((3, 1), "3, 1"), ((1, 3, 2), "3, 2")):
        with pytest.raises(KeyboardInterrupt):
            bench(model, pictures(3), {"tome": tome(2)}, batch_sizes=sizes, **options)
        told = missing()
        assert told[-1].startswith(f"tiny, float32, batch {left}: asked for on 20"), told
    note_request(out, {"model": "tiny", "dtype": "bfloat16"}, [1])
    assert [line.partition(":")[0] for line in missing()][-1] == "tiny, bfloat16, batch 1"
    monkeypatch.undo()
    bench(model, pictures(3), {"tome": tome(2)}, batch_sizes=(1, 2, 3), **options)
    assert [line.partition(":")[0] for line in missing()] == ["tiny, bfloat16, batch 1"]
    requests_file(out).write_text("{", encoding="utf-8")
    assert missing() == []


def test_what_is_no_run_is_refused_with_what_a_run_is(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.jsonl").write_text("nothing\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    shutil.copy(FILES / "recipe-tuned.json", tmp_path / "recipe.json")
    for name in ("absent", "other.csv", "broken.json", "broken.jsonl", "empty", "picture.png"):
        with pytest.raises(BadOption, match=r"a run is a folder of `adamerge compare`"):
            write_report([tmp_path / name], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(BadOutput):
        write_report([tmp_path / "recipe.json"], tmp_path / "recipe.json" / "report.html")


def test_a_page_that_would_be_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_BYTES", 1000)
    with pytest.raises(BadOption, match="give fewer runs"):
        write_report([FILES / "recipe-tuned.json"], tmp_path / "report.html")
