"""The tuner's options: `tune` and the command take the same ones, and all are checked before anything runs."""

import inspect
import re
from dataclasses import fields

import pytest
from hosts.families import build, pictures

import adamerge
from adamerge import presets
from adamerge.cli.tune import tune as command
from adamerge.core.errors import BadOption
from adamerge.search.options import TuningOptions

DEFAULTS = {field.name: field.default for field in fields(TuningOptions)}
pytestmark = pytest.mark.usefixtures("unchecked")


def defaults(function) -> dict[str, object]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def test_tune_takes_every_option_with_its_default():
    given = defaults(adamerge.tune)
    assert {name: given[name] for name in given if name not in ("model", "images")} == DEFAULTS


def test_the_command_takes_every_option_but_the_progress_bar_with_its_default():
    given = defaults(command)
    assert {name: given[name] for name in DEFAULTS if name != "progress"} == {
        name: default for name, default in DEFAULTS.items() if name != "progress"
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(cut=0.3, latency_ratio=0.7), "give one of cut, gmacs and latency_ratio, to say what it may cost"),
        (dict(cut="much"), "cut must be a finite number; got 'much'"),
        (dict(gmacs=0), "gmacs is a cost and must be above 0; got 0"),
        (dict(latency_ratio=0), "latency_ratio is a share of the unmerged time and must be between 0 and 1; got 0"),
        (dict(cost=None), "cost must be one of true, paper; got None"),
        (dict(loss="l2"), "loss must be one of kl, features; got 'l2'"),
        (dict(loss=["kl"]), "loss must be one of kl, features; got ['kl']"),
        (dict(seed=0.5), "seed must be a whole number; got 0.5"),
        (dict(seed=None), "seed must be a whole number; got None"),
        (dict(tries=True), "tries must be a whole number >= 1; got True"),
        (dict(tries=2.0), "tries must be a whole number >= 1; got 2.0"),
        (dict(time_limit="soon"), "time_limit must be a finite number; got 'soon'"),
    ],
    ids=str,
)
def test_an_option_that_means_nothing_is_refused_by_its_name(options, text):
    with pytest.raises(BadOption, match=f"^{re.escape(text)}$"):
        TuningOptions(**options)


def test_the_preset_refuses_what_is_no_loss_before_the_model_runs(monkeypatch):
    model = build("vit")
    monkeypatch.setattr(model, "forward", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(BadOption, match=r"^loss must be one of kl, features; got 'l2'$"):
        presets.best(model, pictures(2), loss="l2")  # pyright: ignore[reportArgumentType]
