"""The script that times official code: it reads it from checkouts, and its rows stand beside ours."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from adamerge.experiments.benchmark import read_rows

pytestmark = pytest.mark.usefixtures("unchecked")

# Stand-ins with the interface of the official code, which is not kept here: nothing is merged.
TOME = """
def timm(model, trace_source, prop_attn):
    assert prop_attn and not trace_source
"""
PITOME = """
from .timm import check

def apply_patch(model, trace_source):
    print("using", "pitome")
    model._info = {}
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: check(model._info))
"""
PITOME_BLOCKS = """
from ..merge import spent

def check(info):
    spent.append((info["ratio"].pop(0), info["use_bsm_pitome"].pop(0)))
"""


@pytest.fixture
def main(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    for name in list(sys.modules):
        if name == "official" or name.split(".")[0] in ("tome", "official_pitome"):
            monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("official").main


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_checkout_it_says_what_to_give(main, capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "give --tome PATH or --pitome PATH, to checkouts of the official code" in capsys.readouterr().err


def test_official_code_is_timed_beside_ours_at_the_price_of_the_same_merges(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda run, dynamic: run)
    first = write(tmp_path / "ToMe", {"tome/__init__.py": "", "tome/patch/__init__.py": TOME})
    files = {"merge.py": "spent = []", "patch/timm.py": PITOME_BLOCKS, "patch/deit.py": PITOME}
    second = write(tmp_path / "PiToMe", {f"algo/pitome/{name}": text for name, text in files.items()})
    words = ["--model", "vit_tiny_patch16_224", "--tome", str(first), "--pitome", str(second), "--methods", ""]
    quick = ["--batch", "1", "--rounds", "1", "--images", "1", "--calibration-images", "1", "--unmerged", "eager"]
    main([*words, *quick, "--ways", "reference", "--out", "rows.csv"])
    rows = read_rows("rows.csv")
    assert not any(row.error for row in rows)
    assert [(row.method, row.way) for row in rows] == [
        ("none", "eager"),
        ("tome r=8", "reference"),
        ("pitome ratio=0.95", "reference"),
        ("tome r=8", "official"),
        ("tome r=8", "official compiled"),
        ("pitome ratio=0.95", "official"),
        ("pitome ratio=0.95", "official compiled"),
    ]
    assert rows[1].cut_true == rows[3].cut_true and rows[2].cut_true == rows[5].cut_true
    assert rows[1].options == rows[3].options and rows[2].options == rows[5].options
    spent = sys.modules["official_pitome.merge"].spent
    assert len(spent) % 12 == 0 and spent[:12] == [(0.95, True)] * 6 + [(0.95, False)] * 6
    assert "using pitome" not in capsys.readouterr().out
