"""Every command that takes a cost takes `--cost true` or `--cost paper`, `true` by default, and checks it first."""

import inspect

import pytest
from test_commands import call

from adamerge.cli.bench import bench
from adamerge.cli.compare import compare
from adamerge.cli.tune import tune

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("command", [bench, compare, tune])
def test_the_true_count_is_the_default_of_every_command(command):
    assert inspect.signature(command).parameters["cost"].default == "true"


# A model that does not exist: the cost has to be refused before the model is loaded.
@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--model", "nothing"],
        ["compare", "--model", "nothing", "--out", "out"],
        ["tune", "--model", "nothing"],
    ],
    ids=lambda words: words[0],
)
def test_a_count_that_does_not_exist_is_refused_by_the_name_of_the_option(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words, "--cost", "half") == 1
    assert "cost must be one of true, paper; got 'half'" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
