"""The fuzzer repeats a case, goes on where it was, and notices what is wrong."""

import csv
import io
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from scripts import load_script

import adamerge
from adamerge.runtime import reference


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(load_script("reading").ROOT / "benchmarks"))
    return load_script("fuzz")


def rows(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_a_run_goes_on_after_its_last_case(fuzz, tmp_path, capsys, unchecked):
    path = tmp_path / "rows.csv"
    common = ["--kind", "files", "--seed", "5", "--rows", str(path)]
    assert fuzz.main([*common, "--cases", "20", "--chunk", "15"]) == 0
    assert fuzz.main([*common, "--cases", "5"]) == 0
    assert [(row["first"], row["cases"], row["failures"]) for row in rows(path)] == [
        ("0", "15", "0"),
        ("15", "5", "0"),
        ("20", "5", "0"),
    ]
    assert all(int(row["ran"]) + int(row["refused"]) == int(row["cases"]) for row in rows(path))
    assert "20 cases so far; going on with case 20" in capsys.readouterr().out


def test_a_case_is_the_same_every_time(fuzz):
    fuzz_cases = import_module("fuzz_cases")

    first, again, other = (fuzz_cases.draw_case(seed, 8) for seed in (0, 0, 1))
    assert repr(first) == repr(again) != repr(other)


@pytest.fixture
def case(fuzz):
    """A case with fixed counts on a ViT."""
    fuzz_cases = import_module("fuzz_cases")

    fields = dict(images="rich", seed=1, features=False, gradients=False, recipe=adamerge.methods.tome(2))
    return fuzz_cases.Case(0, "timm family vit", 48, torch.float32, 2, **fields)


def test_a_sound_case_has_no_problems(case):
    fuzz_checks = import_module("fuzz_checks")

    outcome = fuzz_checks.try_case(case)
    assert (outcome.kind, outcome.problems, outcome.near_tie) == ("ran", [], False)


def test_a_wrong_plan_a_bare_error_and_a_wrong_output_are_noticed(case, monkeypatch):
    fuzz_checks = import_module("fuzz_checks")

    decide, finish = adamerge.Recipe.decide, reference.finish

    def other(self, evidence, linked=None):
        return decide(adamerge.methods.tome(1), evidence, linked)

    def fails(self, evidence, linked=None):
        raise KeyError("broken")

    for name, replaced, text in (("decide", other, "plans of packed differ"), ("decide", fails, "bare KeyError")):
        with monkeypatch.context() as patched:
            patched.setattr(adamerge.Recipe, name, replaced)
            assert any(line.startswith(text) for line in fuzz_checks.try_case(case).problems), text
    monkeypatch.setattr(reference, "finish", lambda *a, **k: finish(*a, **k).roll(1, -1))
    assert any("packed and the reference differ by" in line for line in fuzz_checks.try_case(case).problems)


def test_only_noise_tells_a_tie_of_alike_tokens_from_a_wrong_plan(case, monkeypatch):
    fuzz_checks = import_module("fuzz_checks")

    def tied(case, dtype, ways=(), noise=0.0):
        return fuzz_checks.Outcome("ran", [] if noise else ["plans differ"])

    monkeypatch.setattr(fuzz_checks, "_try_in", tied)
    for images, dtype, tie in (
        ("zeros", torch.float64, True),
        ("constant", torch.float32, True),
        ("rich", torch.float64, False),
        ("rich", torch.float32, False),
    ):
        outcome = fuzz_checks.try_case(replace(case, images=images, dtype=dtype))
        assert (outcome.near_tie, bool(outcome.problems)) == (tie, not tie), images


def test_outputs_apart_by_rounding_are_no_failure_and_a_wrong_output_is(case, monkeypatch):
    """Large tokens without a norm before the first block: softmax turns their rounding into 1/1000 of the output."""
    fuzz_checks, fuzz_cases = (import_module(name) for name in ("fuzz_checks", "fuzz_cases"))
    rounded = fuzz_cases.draw_case(4, 6321)
    assert any(
        "packed and the reference differ by" in line for line in fuzz_checks._try_in(rounded, torch.float32).problems
    )
    outcome = fuzz_checks.try_case(rounded)
    assert (outcome.problems, outcome.near_tie) == ([], True)
    # Wrong in float32 alone, and by far more than its rounding.
    finish = reference.finish
    monkeypatch.setattr(
        reference, "finish", lambda *a, **k: (x := finish(*a, **k)).roll(int(x.dtype == torch.float32), -1)
    )
    outcome = fuzz_checks.try_case(case)
    assert outcome.problems and not outcome.near_tie


def test_an_image_that_spoils_another_is_noticed_unless_products_of_the_machine_do_so(case, monkeypatch):
    fuzz_checks = import_module("fuzz_checks")

    finish = reference.finish
    monkeypatch.setattr(reference, "finish", lambda *a, **k: finish(*a, **k).sum(0, keepdim=True).expand(2, -1, -1))
    spoilt = replace(case, images="one not finite", dtype=torch.bfloat16)
    assert "the output is not finite where the host's is" in fuzz_checks.try_case(spoilt).problems
    monkeypatch.setattr(fuzz_checks, "products_mix_rows", lambda dtype: True)
    assert not fuzz_checks.try_case(spoilt).problems
