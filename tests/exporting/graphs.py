"""The operators of exported graphs."""

from collections import Counter
from pathlib import Path


def onnx_operators(path: Path) -> Counter[str]:
    """How often each operator is in an ONNX file, functions and subgraphs included."""
    import onnx

    model = onnx.load(path)
    graphs = [model.graph, *model.functions]
    found: Counter[str] = Counter()
    while graphs:
        nodes = graphs.pop().node
        for node in nodes:
            found[node.op_type] += 1
            reduction = [each.s for each in node.attribute if each.name == "reduction"]
            found[f"reducing {node.op_type}"] += reduction not in ([], [b"none"])
            graphs += [each.g for each in node.attribute if each.HasField("g")]
    return +found


def openvino_operators(path: Path) -> Counter[str]:
    """How often each operator is in an OpenVINO file."""
    import openvino

    found: Counter[str] = Counter()
    for each in openvino.Core().read_model(str(path)).get_ops():
        found[each.get_type_name()] += 1
        found[f"reducing {each.get_type_name()}"] += each.get_attributes().get("reduction", "none") != "none"
    return +found


def scatters(operators: Counter[str]) -> dict[str, int]:
    """The scatters among operators."""
    return {name: number for name, number in operators.items() if "catter" in name}
