"""Statistics are read back as they were saved; damaged files are refused with the reason."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adamerge.core.errors import AdamergeError, BadStats
from adamerge.core.files import write_atomically
from adamerge.core.stats import LayerStats

STATS = LayerStats(
    mean=(0.25, -0.5),
    std=(0.125, 0.0),
    threshold=(0.75, 0.5),
    images=7,
    how="sequential",
    passes=1,
    model={"class": "VisionTransformer", "sketch": [0.5, -1.25]},
    recipe={"part": "Recipe", "site": "before_block", "budget": {"part": "ZScore", "r_max": 9.0, "stats": None}},
)

numbers = st.floats(allow_nan=False, allow_infinity=False)


def edited(tmp_path, **changes):
    """A statistics file with fields changed; None deletes one."""
    path = tmp_path / "stats.json"
    STATS.save(path)
    content = json.loads(path.read_text())
    for name, value in changes.items():
        content[name] = value
        if value is None:
            del content[name]
    path.write_text(json.dumps(content))
    return path


def test_statistics_come_back_as_they_were_saved(tmp_path):
    STATS.save(tmp_path / "stats.json")
    assert LayerStats.load(tmp_path / "stats.json") == STATS


@given(pairs=st.lists(st.tuples(numbers, numbers.map(abs)), min_size=1, max_size=5))
def test_every_finite_number_survives_to_the_last_bit(tmp_path_factory, pairs):
    mean, std = zip(*pairs, strict=True)
    path = tmp_path_factory.mktemp("stats") / "stats.json"
    LayerStats(mean, std).save(path)
    back = LayerStats.load(path)
    assert [m.hex() for m in back.mean] == [m.hex() for m in mean]
    assert [s.hex() for s in back.std] == [s.hex() for s in std]


def test_statistics_know_their_depth():
    assert STATS.depth == 2


def test_saving_makes_the_folder_and_replaces_the_old_file(tmp_path):
    path = tmp_path / "new" / "folder" / "stats.json"
    STATS.save(path)
    LayerStats((9.0,), (1.0,)).save(str(path))
    assert LayerStats.load(str(path)).mean == (9.0,)
    assert os.listdir(path.parent) == ["stats.json"]


def test_a_file_gets_the_permissions_any_new_file_would_get(tmp_path):
    """mkstemp alone would leave it readable for its owner only."""
    path, plain = tmp_path / "stats.json", tmp_path / "plain"
    STATS.save(path)
    plain.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("broken", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken, failure):
    path = tmp_path / "stats.json"
    STATS.save(path)
    before = path.read_bytes()

    def fail(*_args):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(type(failure)):
            LayerStats((9.0,), (1.0,)).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["stats.json"]


def test_a_file_is_replaced_only_when_the_new_one_is_complete(tmp_path, monkeypatch):
    """A reader sees the old content during the write: the file changes by a single rename."""
    path, seen = tmp_path / "a.txt", []
    path.write_text("old")
    rename = os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: (seen.append((path.read_text(), Path(a).read_text())), rename(a, b))
    )
    write_atomically(path, "new")
    assert seen == [("old", "new")] and path.read_text() == "new"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BadStats, match=r"cannot read the statistics .*nowhere.json: .* Make them with `adamerge calib"):
        LayerStats.load(tmp_path / "nowhere.json")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(BadStats, match="cannot read the statistics"):
        LayerStats.load(tmp_path)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "stats.json").write_bytes(bytes(range(128, 256)))
    with pytest.raises(BadStats, match=r"cannot read the statistics .*stats\.json: 'utf-8' codec"):
        LayerStats.load(tmp_path / "stats.json")


@pytest.mark.parametrize("text", ["", "mean: 3", '{"schema": 1, "mean": [0.1'])
def test_a_file_that_is_not_json_is_refused(tmp_path, text):
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(BadStats, match=r"stats\.json: it is not JSON \(.*\)\. Make them with `adamerge calibrate`\."):
        LayerStats.load(tmp_path / "stats.json")


@pytest.mark.parametrize("text", ["[1, 2]", "3", '{"mean": [0.1]}', "null"])
def test_json_that_calibrate_did_not_write_is_refused(tmp_path, text):
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(BadStats, match="has no 'schema': it is not a file that `adamerge calibrate` wrote"):
        LayerStats.load(tmp_path / "stats.json")


@pytest.mark.parametrize("schema", [0, 2, "1", [1], True, 1.0])
def test_another_schema_is_refused(tmp_path, schema):
    with pytest.raises(
        BadStats, match=re.escape(f"has schema {schema!r}; this version reads schema 1. Run `adamerge calibrate` again")
    ):
        LayerStats.load(edited(tmp_path, schema=schema))


@pytest.mark.parametrize("name", ["mean", "std", "threshold", "how", "images", "passes", "model", "recipe"])
def test_a_missing_field_is_named(tmp_path, name):
    with pytest.raises(BadStats, match=re.escape(f"missing: ['{name}'], unknown: []")):
        LayerStats.load(edited(tmp_path, **{name: None}))


def test_an_unknown_field_is_named(tmp_path):
    with pytest.raises(BadStats, match=re.escape("missing: [], unknown: ['sigma']")):
        LayerStats.load(edited(tmp_path, sigma=[1]))


@pytest.mark.parametrize(
    "name, value, kind",
    [
        ("mean", 0.5, "list"),
        ("std", {"0": 1}, "list"),
        ("threshold", "none", "list"),
        ("how", 3, "str"),
        ("images", "7", "int"),
        ("images", 7.0, "int"),
        ("passes", [2], "int"),
        ("model", [], "dict"),
        ("recipe", "adamerge", "dict"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path, name, value, kind):
    message = f"the field {name!r} must be a {kind}; got {value!r}. Run `adamerge calibrate` again."
    with pytest.raises(BadStats, match=re.escape(message)):
        LayerStats.load(edited(tmp_path, **{name: value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5", True, None, [0.1]], ids=repr)
def test_a_mean_that_is_not_a_finite_number_is_named_with_its_layer(tmp_path, unchecked, value):
    message = f"mean of layer 1 must be a finite number; got {value!r}. Run `adamerge calibrate` again."
    with pytest.raises(BadStats, match=re.escape(message)):
        LayerStats.load(edited(tmp_path, mean=[0.5, value]))


@pytest.mark.parametrize("value", [float("nan"), -0.1, "0.5", False, None], ids=repr)
def test_a_std_that_is_not_a_finite_number_from_zero_up_is_named_with_its_layer(tmp_path, unchecked, value):
    message = f"std of layer 0 must be a finite number >= 0; got {value!r}. Run `adamerge calibrate` again."
    with pytest.raises(BadStats, match=re.escape(message)):
        LayerStats.load(edited(tmp_path, std=[value, 0.5]))


@pytest.mark.parametrize("value", [float("inf"), "x"], ids=repr)
def test_a_threshold_that_is_not_a_finite_number_is_named_with_its_layer(tmp_path, unchecked, value):
    with pytest.raises(BadStats, match=re.escape(f"threshold of layer 1 must be a finite number; got {value!r}")):
        LayerStats.load(edited(tmp_path, threshold=[0.5, value]))


def test_the_message_says_which_file_is_damaged(tmp_path):
    path = edited(tmp_path, std=[-1.0, 0.5])
    with pytest.raises(BadStats, match=re.escape(f"{path}: std of layer 0")):
        LayerStats.load(path)


def test_means_and_stds_must_be_as_many():
    with pytest.raises(BadStats, match="one mean and one std for each layer; got 2 means and 1 stds"):
        LayerStats((0.1, 0.2), (0.1,))
    with pytest.raises(BadStats, match="got 0 means and 0 stds"):
        LayerStats((), ())


def test_thresholds_must_be_as_many_as_layers_or_none():
    assert LayerStats((0.1, 0.2), (0.1, 0.1)).threshold == ()
    with pytest.raises(BadStats, match="one threshold for each of 2 layers, or none at all; got 1"):
        LayerStats((0.1, 0.2), (0.1, 0.1), (0.5,))


def test_bad_statistics_can_be_caught_as_a_value_error_or_as_ours():
    assert issubclass(BadStats, ValueError) and issubclass(BadStats, AdamergeError)
