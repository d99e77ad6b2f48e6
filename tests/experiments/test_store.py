"""A stored result comes back as it was, only for its own settings, and a damaged one is measured again."""

import logging

import pytest
import torch

from adamerge.digest import identify_model
from adamerge.experiments.store import ResultStore, StoredResult

RESULT = StoredResult({"seconds": 0.1, "name": "µ"}, {"kl": torch.tensor([0.5, 0.25]), "top1": torch.tensor([True])})


def test_a_result_comes_back_as_it_was(tmp_path):
    store = ResultStore(tmp_path / "deep" / "results")
    assert store.load({"a": 1}) is None
    store.save({"a": 1, "b": [2]}, RESULT)
    found = ResultStore(tmp_path / "deep" / "results").load({"b": [2], "a": 1})
    assert found is not None and found.facts == RESULT.facts and found.tensors.keys() == RESULT.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in RESULT.tensors.items())
    assert store.load({"a": 1, "b": [3]}) is None


def test_a_result_without_tensors_and_a_view_of_a_tensor_are_stored(tmp_path):
    store = ResultStore(tmp_path)
    store.save("facts", StoredResult({"recipe": "text"}))
    assert store.load("facts") == StoredResult({"recipe": "text"})
    both = torch.arange(6).view(3, 2).T
    store.save("views", StoredResult({}, {"first": both[0], "all": both}))
    found = store.load("views")
    assert found is not None and torch.equal(found.tensors["all"], both)


def test_a_file_with_other_settings_is_not_used(tmp_path):
    """The name of a file is a digest; what counts is the settings inside it."""
    store = ResultStore(tmp_path)
    store.save("mine", RESULT)
    (mine,) = tmp_path.iterdir()
    store.save("other", RESULT)
    (other,) = set(tmp_path.iterdir()) - {mine}
    mine.replace(other)
    assert store.load("other") is None


@pytest.mark.parametrize("damage", [b"", b"half a fi", None])
def test_a_damaged_result_is_measured_again_and_stored(tmp_path, damage):
    store = ResultStore(tmp_path)
    store.save("it", RESULT)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3] if damage is None else damage)
    calls: list[int] = []

    def measure() -> StoredResult:
        calls.append(1)
        return RESULT

    for _ in range(2):
        assert store.load_or_measure("it", measure).facts == RESULT.facts
    assert calls == [1] and [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_measurement_that_fails_stores_nothing(tmp_path):
    def measure() -> StoredResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ResultStore(tmp_path).load_or_measure("it", measure)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_identified_by_its_values_shapes_and_dtypes():
    model = torch.nn.Linear(2, 3)
    known = identify_model(model)
    assert identify_model(model) == known
    assert identify_model(model.double()) != known
    model.float()
    with torch.no_grad():
        model.bias[1] += 1
    assert identify_model(model) != known


def test_reading_an_earlier_result_is_logged(tmp_path, caplog):
    """A library logs to a logger of its name, which prints nothing by itself."""
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("adamerge").handlers)
    store = ResultStore(tmp_path)
    with caplog.at_level("INFO", "adamerge"):
        store.load_or_measure("it", lambda: RESULT)
        assert caplog.messages == []
        store.load_or_measure("it", lambda: RESULT)
    (message,) = caplog.messages
    assert message.startswith(f"read the result of an earlier run from {tmp_path}")
