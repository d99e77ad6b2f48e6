"""Engines in a benchmark: unknown and missing ones are refused before the work."""

import sys

import pytest

from adamerge.core.errors import BadOption, MissingPackage
from adamerge.experiments.benchmark.engines import read_engines


def test_engines_give_their_ways():
    assert read_engines(["torch", "openvino", "onnxruntime"]) == [
        "openvino",
        "openvino bf16",
        "onnxruntime",
        "onnxruntime int8",
    ]


def test_unknown_and_missing_engines_are_named(monkeypatch):
    with pytest.raises(BadOption, match="there is no engine 'tensorrt'; choose from torch, openvino"):
        read_engines(["tensorrt"])
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingPackage, match=r"pip install 'adamerge\[export\]'"):
        read_engines(["openvino"])
