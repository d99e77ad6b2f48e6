"""Types and shapes in the library's annotations are checked while tests run, by beartype and jaxtyping.

jaxtyping has an import hook and a decorator of its own.  That decorator checks the arguments of a function twice and
binds them once more: half of the time of the tests.  Here every function is checked once.  Only functions that have
shapes in their annotations get a context in which the axes of one name must have one length.
"""

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

# Whole numbers are accepted as real ones.
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its arguments and its result checked, unless jaxtyping is disabled."""
    if not function.__annotations__:
        return function
    strict = _beartype(function)
    if any(map(_has_shapes, function.__annotations__.values())):

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if jaxtyping.config.jaxtyping_disable:
                return function(*args, **kwargs)
            with jaxtyping.jaxtyped("context"):
                return strict(*args, **kwargs)

    else:

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if jaxtyping.config.jaxtyping_disable else strict)(*args, **kwargs)

    return call


def checked_class(cls: type) -> type:
    """The class; if it is a dataclass, the values of its fields are checked."""
    if is_dataclass(cls) and "__init__" in vars(cls):
        cls.__init__ = checked(cls.__init__)
    return cls


def _has_shapes(hint: Any) -> bool:
    """Whether an annotation has, or may have, a shape in it."""
    if isinstance(hint, (list, tuple)):
        return any(map(_has_shapes, hint))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return isinstance(hint, str) or _has_shapes(get_args(hint))


class _TypeOfAnything(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return True

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_TypeOfAnything):
    """A type that everything is an instance of, and so are its attributes."""


class _Decorate(ast.NodeTransformer):
    """Decorates functions innermost and classes outermost, except those with `no_type_check`."""

    def __init__(self, package: bool):
        self.package = package

    def visit_If(self, node: ast.If) -> ast.AST:
        """Names that are imported for other checkers only are types of anything; packages load them when asked."""
        if not self.package and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            imports = [each for each in node.body if isinstance(each, (ast.Import, ast.ImportFrom))]
            names = [alias.asname or alias.name for each in imports for alias in each.names]
            node.orelse += ast.parse("\n".join(f"{name} = __import__('typecheck').Anything" for name in names)).body
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if _unchecked(node):
            return node
        node.decorator_list.append(_decorator(node, "checked"))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if _unchecked(node):
            return node
        node.decorator_list.insert(0, _decorator(node, "checked_class"))
        return self.generic_visit(node)


def _unchecked(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "no_type_check" for each in node.decorator_list)


def _decorator(node: ast.AST, name: str) -> ast.expr:
    found = ast.parse(f"__import__('typecheck').{name}", mode="eval").body
    return ast.copy_location(found, node)


class _Loader(SourceFileLoader):
    """Loads a module with every function decorated.  It neither reads nor writes bytecode files."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(
            _Decorate(self.is_package(fullname)).visit(ast.parse(self.get_data(path), path))
        )
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, package: str):
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.package and not fullname.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def check_package(package: str) -> None:
    """Check all functions and dataclasses of a package that is imported later."""
    assert package not in sys.modules, f"{package} is imported already"
    sys.meta_path.insert(0, _Finder(package))
