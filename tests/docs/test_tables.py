"""The numbers in README and docs are those of the result files."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_table_is_what_the_result_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for path, text in tables.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python benchmarks/tables.py"
