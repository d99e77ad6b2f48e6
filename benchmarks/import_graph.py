"""The import graph of the library, read from its source: which module and which room imports which.

`benchmarks/tables.py` writes it into docs/design.md, and tests/test_architecture.py checks it.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "adamerge"

Graph = dict[str, set[str]]


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path, known: Iterable[str] = ()) -> set[str]:
    """Every module that a file imports: at the top, inside functions, and for type checkers alone.

    `from a import b` imports `a.b` if that is one of the `known` modules, otherwise `a`.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{file}:{node.lineno} imports relatively; the graph needs absolute names")
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else module for name in names}
    return found


def module_graph(files: Mapping[str, Path]) -> Graph:
    """Module -> modules of the same package that it imports."""
    return {name: {other for other in imported(file, files) if other in files} for name, file in files.items()}


def room(module: str) -> str:
    """The room that a module is in: adamerge.core.plan -> core, adamerge.flops -> flops, adamerge -> ''."""
    return module.split(".")[1] if "." in module else ""


def room_graph(graph: Graph) -> Graph:
    """Room -> other rooms that it imports.  The package itself and `python -m adamerge` are no rooms."""
    found: Graph = {}
    for module, others in graph.items():
        here = room(module)
        found.setdefault(here, set()).update({room(other) for other in others} - {here, ""})
    return {here: others for here, others in found.items() if here not in ("", "__main__")}


def cycle(graph: Graph) -> list[str]:
    """The nodes of one cycle in order, or an empty list if there is none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            found = search(other, [*path, node])
            if found:
                return found
        done.add(node)
        return []

    for node in sorted(graph):
        found = search(node, [])
        if found:
            return found
    return []


def reachable(graph: Graph, node: str) -> set[str]:
    """Every node that a path of at least one arrow leads to."""
    found: set[str] = set()
    waiting = list(graph[node])
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += graph[other]
    return found


def reduced(graph: Graph) -> Graph:
    """The graph without the arrows that longer paths imply."""
    return {node: {other for other in others if not _implied(graph, others, other)} for node, others in graph.items()}


def _implied(graph: Graph, others: set[str], node: str) -> bool:
    """Whether another of `others` leads to `node`; two nodes of one cycle do not imply each other."""
    return any(node in reachable(graph, other) - {other} and other not in reachable(graph, node) for other in others)


def drawing() -> str:
    """The graph of the rooms for docs/design.md: a mermaid picture, and every import in a table."""
    graph = room_graph(module_graph(modules()))
    arrows = reduced(graph)
    picture = [f"    {node} --> {other}" for node in sorted(arrows) for other in sorted(arrows[node])]
    rows = [
        f"| `{node}` | {', '.join(f'`{other}`' for other in sorted(graph[node])) or '–'} |" for node in sorted(graph)
    ]
    return "\n".join(["```mermaid", "flowchart TD", *picture, "```", "", "| room | imports |", "| --- | --- |", *rows])
