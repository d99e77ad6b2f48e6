"""Benchmarks add rows to their result files."""

import pytest
from scripts import load_script


def test_rows_are_added_below_one_header(tmp_path):
    reading, path = load_script("reading"), tmp_path / "rows.csv"
    reading.append(path, [{"model": "a", "ms": 1}])
    reading.append(path, [{"model": "b", "ms": None}, {"model": "c, d", "ms": 3}])
    assert path.read_bytes() == b'model,ms\na,1\nb,\n"c, d",3\n'


def test_rows_with_other_columns_are_refused_and_the_file_stays(tmp_path):
    reading, path = load_script("reading"), tmp_path / "rows.csv"
    reading.append(path, [{"model": "a", "ms": 1}])
    with pytest.raises(SystemExit, match=r"has the columns .*'ms'.*the new rows have .*'seconds'.*give another file"):
        reading.append(path, [{"model": "b", "seconds": 2}])
    assert path.read_bytes() == b"model,ms\na,1\n"
