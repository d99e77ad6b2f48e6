"""The numbers in README and docs are those of the result files."""

from scripts import load_script


def test_every_table_is_what_the_result_files_say():
    for path, text in load_script("tables").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python benchmarks/tables.py"
