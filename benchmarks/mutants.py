"""Mutants of a Python file: copies with one small mistake each, for `benchmarks/mutation.py`."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_PAIRS = (
    ("argmax", "argmin"),
    ("amax", "amin"),
    ("max", "min"),
    ("maximum", "minimum"),
    ("clamp_max", "clamp_min"),
    ("ceil", "floor"),
    ("any", "all"),
    ("sum", "mean"),
)
NAMES = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}
# Arguments that only change what is shown; `strict` of a zip is an assertion.
SHOWN = {"desc", "total", "disable", "stacklevel", "indent", "progress", "leave", "encoding", "strict"}


@dataclass(frozen=True)
class Mutant:
    """A mistake: the place, the expression before and after, and the text of the whole file with it.

    `name` stays the same when other parts of the file change.
    """

    name: str
    line: int
    text: str


def mutants(source: str) -> list[Mutant]:
    """All mutants of a file, in reading order; the same text gives the same list."""
    tree = ast.parse(source)
    found: list[Mutant] = []
    seen: dict[str, int] = {}
    for scope, parent, field, index, node in _places(tree):
        for changed in _changes(node, parent):
            before = ast.unparse(node)
            _put(parent, field, index, changed)
            text = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, field, index, node)
            name = f"{scope}: {_short(before)} -> {_short(ast.unparse(changed)) or 'nothing'}"
            seen[name] = seen.get(name, 0) + 1
            name += f" ({seen[name]})" if seen[name] > 1 else ""
            found.append(Mutant(name, getattr(node, "lineno", 0), text))
    return found


Place = tuple[str, ast.AST, str, int | None, ast.AST]


def _places(tree: ast.AST, scope: str = "module") -> Iterator[Place]:
    """Every node that may be changed, with the function that it is in and where in its parent it is.

    Annotations, decorators, texts, error messages, assertions, imports and protocols are left alone.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        nodes = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, node in nodes:
            if not isinstance(node, ast.AST) or _left_alone(node):
                continue
            yield scope, tree, field, index, node
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            inner = node.name if named and scope == "module" else f"{scope}.{node.name}" if named else scope
            yield from _places(node, inner)


def _left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return any("Protocol" in ast.unparse(base) for base in node.bases)
    shown = isinstance(node, ast.keyword) and node.arg in SHOWN
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    left = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.Raise)
    return shown or text or isinstance(node, left)


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _changes(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    """What a node may become."""
    for kind, change in _KINDS:
        if isinstance(node, kind):
            yield from change(node, parent)


def _comparison(node: ast.Compare, parent: ast.AST) -> Iterator[ast.AST]:
    for at, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield ast.Compare(node.left, [*node.ops[:at], other(), *node.ops[at + 1 :]], node.comparators)


def _arithmetic(node: ast.BinOp, parent: ast.AST) -> Iterator[ast.AST]:
    if type(node.op) in ARITHMETIC:
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)


def _constant(node: ast.Constant, parent: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node.value, float):
        yield ast.Constant(2 * node.value or 1.0)


def _attribute(node: ast.Attribute, parent: ast.AST) -> Iterator[ast.AST]:
    if node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)


def _name(node: ast.Name, parent: ast.AST) -> Iterator[ast.AST]:
    if node.id in ("min", "max", "any", "all") and isinstance(parent, ast.Call) and parent.func is node:
        yield ast.Name(NAMES[node.id], node.ctx)


def _unary(node: ast.UnaryOp, parent: ast.AST) -> Iterator[ast.AST]:
    yield node.operand


def _logic(node: ast.BoolOp, parent: ast.AST) -> Iterator[ast.AST]:
    yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)


def _choice(node: ast.IfExp, parent: ast.AST) -> Iterator[ast.AST]:
    yield ast.IfExp(node.test, node.orelse, node.body)


def _branch(node: ast.If, parent: ast.AST) -> Iterator[ast.AST]:
    yield ast.If(ast.Constant(False), node.body, node.orelse)


def _call(node: ast.Call, parent: ast.AST) -> Iterator[ast.AST]:
    for at, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in SHOWN:
            yield ast.Call(node.func, node.args, [*node.keywords[:at], *node.keywords[at + 1 :]])


def _statement(node: ast.stmt, parent: ast.AST) -> Iterator[ast.AST]:
    yield ast.Pass()


def _returned(node: ast.Return, parent: ast.AST) -> Iterator[ast.AST]:
    if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        yield ast.Return(ast.Constant(None))


_KINDS: tuple[tuple[type | tuple[type, ...], Callable[..., Iterator[ast.AST]]], ...] = (
    (ast.Compare, _comparison),
    (ast.BinOp, _arithmetic),
    (ast.Constant, _constant),
    (ast.Attribute, _attribute),
    (ast.Name, _name),
    (ast.UnaryOp, _unary),
    (ast.BoolOp, _logic),
    (ast.IfExp, _choice),
    (ast.If, _branch),
    (ast.Call, _call),
    ((ast.Expr, ast.AugAssign, ast.Break, ast.Continue), _statement),
    (ast.Return, _returned),
)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:60]} … {line[-35:]}"
