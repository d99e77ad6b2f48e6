"""The numbers in README and docs are those of the result files, and what the README says about them holds."""

from scripts import load_script


def test_every_table_is_what_the_result_files_say():
    for path, text in load_script("tables").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python benchmarks/tables.py"


def test_what_the_readme_says_about_speed_is_in_the_result_files():
    """Under "Is it faster?": no slower at batch 1, faster from 8 on, and from 32 on as the ratio of costs says."""
    speed = load_script("speed_tables")
    found = [
        row for run in speed.runs(f"bench-{speed.BASE}") if any(row["cost"] == "paper" for row in run) for row in run
    ]
    merged = [row for row in found if row["way"] == "packed graph" and row["method"] != speed.ALONE]
    assert {int(row["batch"]) for row in merged} == {1, 8, 32, 128, 256}
    for row in merged:
        batch, speedup = int(row["batch"]), float(row["speedup"])
        assert speedup >= 1 and (batch < 8 or speedup > 1), row
        assert batch < 32 or speedup >= float(row["ideal_true"]), row
