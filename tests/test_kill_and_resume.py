"""The script that kills commands tells a whole result from half of one, and another result from another time."""

import pytest
import torch
from safetensors.torch import save_file
from scripts import load_script

script = load_script("kill_and_resume")
FILES = {
    "stats.json": '{"mean": [0.5], "seconds": 1.5}',
    "rows.csv": "method,top1,speedup\ntome,0.5,1.2\n",
    "journal.jsonl": '{"kl": 0.1, "date": "2026"}\n',
    "output.txt": "printed",
}


def folder(home, name, **changed):
    made = home / name
    made.mkdir()
    for file, text in (FILES | changed).items():
        (made / file).write_text(text)
    return made


def test_times_may_differ(tmp_path):
    changed = {
        "stats.json": '{"mean": [0.5], "seconds": 9}',
        "rows.csv": "method,top1,speedup\ntome,0.5,7\n",
        "journal.jsonl": '{"kl": 0.1, "date": "2027"}\n',
        "output.txt": "something else",
    }
    one, other = folder(tmp_path, "one"), folder(tmp_path, "other", **changed)
    assert script.half_files(other) == [] and script.differences(one, other) == []


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("stats.json", '{"mean": [0.6], "seconds": 1.5}', "stats.json: /mean/0: 0.6, undisturbed 0.5"),
        ("rows.csv", "method,top1,speedup\ntome,0.4,1.2\n", "rows.csv: /0/top1: 0.4, undisturbed 0.5"),
        ("rows.csv", FILES["rows.csv"] + "tome,0.5,1.2\n", "rows.csv: : "),
        ("journal.jsonl", "", "journal.jsonl: : []"),
        ("another.json", "{}", "files "),
    ],
)
def test_another_result_is_named(tmp_path, file, text, said):
    one, other = folder(tmp_path, "one"), folder(tmp_path, "other", **{file: text})
    (found,) = script.differences(one, other)
    assert found.startswith(said)


@pytest.mark.parametrize(
    "file, text", [("stats.json", '{"mean": ['), ("rows.csv", "method,top1\ntome"), ("rows.csv", "a,b\n1\n")]
)
def test_half_a_file_is_named(tmp_path, file, text):
    (found,) = script.half_files(folder(tmp_path, "one", **{file: text}))
    assert found.startswith(f"half a file: {file}")


def test_kept_tensors_may_differ_in_times_and_in_the_order_of_what_is_said_about_them_only(tmp_path):
    facts = {"facts": '{"top1": 0.5, "seconds": 1}', "settings": '{"seed": 0}'}
    kept = {"logits": torch.tensor([0.5, float("nan")], dtype=torch.bfloat16), "seconds": torch.ones(2)}
    same = ({"facts": '{"top1": 0.5, "seconds": 7}', "settings": '{"seed": 0}'}, kept | {"seconds": torch.zeros(2)})
    other_facts = (facts | {"facts": '{"top1": 0.6}'}, kept)
    other_values = (facts, kept | {"logits": torch.tensor([0.25, float("nan")], dtype=torch.bfloat16)})
    made = []
    for name, (about, tensors) in {"one": (facts, kept), "same": same, "a": other_facts, "b": other_values}.items():
        made.append(folder(tmp_path, name))
        save_file(tensors, made[-1] / "cell.safetensors", about)
    one, same, *others = made
    assert script.differences(one, same) == []
    assert [len(script.differences(one, other)) for other in others] == [1, 1]
