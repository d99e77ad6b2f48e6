"""Imports go one way, files and functions stay small, names are used once, and the import is cheap and silent."""

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT, load_script

import adamerge
from adamerge.cli.app import app

imports = load_script("import_graph")
MODULES: dict[str, Path] = imports.modules()
GRAPH: dict[str, set[str]] = imports.module_graph(MODULES)
STDLIB = set(sys.stdlib_module_names)

LIBRARY = {
    "calibration",
    "core",
    "data",
    "embedded",
    "evaluation",
    "flops",
    "hosts",
    "methods",
    "patching",
    "presets",
}
LIBRARY |= {
    "distributed",
    "exporting",
    "prediction",
    "recipe_files",
    "runtime",
    "runtime.packed",
    "runtime.triton",
    "search",
    "timing",
    "digest",
}

# Room -> the other rooms it may import.  A module directly under the package is a room of its own.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "methods": {"core"},
    "embedded": {"core"},
    "timing": set(),
    "digest": set(),
    "distributed": {"core"},
    "runtime": {"core", "distributed", "runtime.packed", "runtime.triton"},
    "runtime.packed": {"core", "runtime"},
    "runtime.triton": {"core", "runtime", "runtime.packed"},
    "hosts": {"core", "runtime"},
    "data": {"core", "distributed", "embedded", "hosts"},
    "patching": {"core", "hosts", "runtime", "runtime.packed", "runtime.triton"},
    "recipe_files": {"core", "patching"},
    "flops": {"core", "hosts", "patching", "runtime"},
    "calibration": {"core", "data", "distributed", "hosts", "methods", "patching", "runtime"},
    "evaluation": {"core", "data", "distributed", "flops", "hosts", "patching", "runtime", "timing"},
    "search": LIBRARY - {"search", "presets", "embedded", "exporting", "prediction", "recipe_files"},
    "presets": LIBRARY - {"presets", "embedded", "exporting", "prediction", "recipe_files"},
    "exporting": {"core", "data", "evaluation", "hosts", "patching", "runtime"},
    "prediction": {"core", "data", "digest", "distributed", "embedded", "flops", "hosts", "patching", "runtime"},
    "repairing": (LIBRARY - {"presets", "embedded", "exporting", "prediction", "recipe_files"}) | {"training_file"},
    "training_file": {"core"},
    "finetuning": {"calibration", "core", "data", "digest", "hosts", "patching", "training_file"},
    "plots": LIBRARY,
    "experiments": LIBRARY | {"", "plots"},
    "report": {"", "core", "data", "experiments"},
    "explore": LIBRARY | {"plots"},
    "cli": LIBRARY | {"", "experiments", "explore", "plots", "repairing", "finetuning", "report"},
    "": LIBRARY | {"repairing", "finetuning"},
    "__main__": {"cli"},
}
# Room -> the libraries it may import, besides Python's own.
LIBRARIES: dict[str, set[str]] = {
    "core": {"torch", "jaxtyping", "safetensors"},
    "methods": {"torch", "jaxtyping"},
    "embedded": {"torch", "jaxtyping", "timm", "safetensors"},
    "timing": {"torch"},
    "digest": {"torch"},
    "distributed": {"torch"},
    "runtime": {"torch", "jaxtyping"},
    "runtime.packed": {"torch", "jaxtyping", "numpy"},
    "runtime.triton": {"torch", "jaxtyping", "triton"},
    "hosts": {"torch", "jaxtyping"},
    "data": {"torch", "jaxtyping", "timm", "torchvision", "PIL"},
    "patching": {"torch", "jaxtyping"},
    "recipe_files": {"torch", "huggingface_hub"},
    "flops": {"torch", "jaxtyping"},
    "calibration": {"torch", "jaxtyping", "tqdm"},
    "evaluation": {"torch", "jaxtyping", "tqdm"},
    "search": {"torch", "jaxtyping", "tqdm"},
    "presets": {"torch", "jaxtyping"},
    "exporting": {"torch", "timm"},
    "prediction": {"torch", "jaxtyping", "numpy", "tqdm", "timm", "PIL"},
    "repairing": {"torch", "jaxtyping", "tqdm"},
    "training_file": {"torch", "safetensors"},
    "finetuning": {"torch", "jaxtyping", "numpy", "tqdm", "timm", "safetensors"},
    "experiments": {"torch", "jaxtyping", "tqdm", "safetensors", "rich", "matplotlib"},
    "plots": {"torch", "jaxtyping", "matplotlib", "numpy", "PIL"},
    "report": {"torch"},
    "explore": {"torch", "numpy", "PIL", "timm", "gradio"},
    "cli": {"torch", "rich", "typer", "timm", "torchvision", "transformers", "safetensors"},
    "": set(),
    "__main__": set(),
}
# One host library, one file; a second file holds what would make the first too long.
HOSTS = {
    "adamerge.hosts.timm": {"timm"},
    "adamerge.hosts.transformers": {"transformers"},
    "adamerge.hosts.transformers_towers": {"transformers"},
    "adamerge.hosts.torchvision": {"torchvision"},
    "adamerge.hosts.open_clip": {"open_clip"},
}
HEAVY = {"timm", "matplotlib", "typer", "gradio", "triton", "transformers", "torchvision", "open_clip", "PIL", "rich"}
HEAVY |= {"huggingface_hub"}

LONGEST_FILE = 320
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 8

every_module = pytest.mark.parametrize("module", MODULES)


def room(module: str) -> str:
    """As in the graph, but with the two faster backends as rooms of their own."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:2] in (["runtime", "packed"], ["runtime", "triton"]) else imports.room(module)


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def test_the_rooms_of_the_tables_are_the_rooms_there_are():
    assert {room(module) for module in MODULES} - set(ROOMS) == set(), "give the new room a row in ROOMS"
    assert set(ROOMS) == set(LIBRARIES)


@every_module
def test_a_module_imports_only_the_rooms_below_its_own(module):
    here = room(module)
    assert {room(other) for other in GRAPH[module]} - {here} <= ROOMS[here]


def test_the_table_of_rooms_has_no_cycle():
    """The backends count as one room here: which file of them imports which is checked by the graph of modules."""
    folded: dict[str, set[str]] = {}
    for here, others in ROOMS.items():
        outer = here.partition(".")[0]
        folded.setdefault(outer, set()).update({other.partition(".")[0] for other in others} - {outer})
    assert imports.cycle(folded) == []


def test_no_modules_and_no_rooms_import_each_other_in_a_cycle():
    """This is what docs/design.md draws."""
    assert imports.cycle(GRAPH) == []
    assert imports.cycle(imports.room_graph(GRAPH)) == []


def test_a_cycle_is_found():
    assert imports.cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert imports.cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_packed_backend_never_reaches_triton():
    for module in MODULES:
        if room(module) == "runtime.packed":
            reached = {module, *imports.reachable(GRAPH, module)}
            assert not any(other.startswith("adamerge.runtime.triton") for other in reached), module
            assert not any("triton" in libraries(other) for other in reached), module


def libraries(module: str) -> set[str]:
    """The libraries that a module imports, Python's own and this one aside."""
    return {name.split(".")[0] for name in imports.imported(MODULES[module])} - STDLIB - {"adamerge"}


@every_module
def test_a_module_imports_only_the_libraries_of_its_room(module):
    assert libraries(module) <= LIBRARIES[room(module)] | HOSTS.get(module, set())


def fresh(code: str) -> dict:
    """Run code in a new interpreter that has imported torch, and take what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys, time, torch\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "src",
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def import_all() -> dict[str, Any]:
    """Import the library in a new interpreter: what was loaded, how long it took, whether a GPU was touched."""
    code = "t = time.perf_counter(); import adamerge; from adamerge import *; t = time.perf_counter() - t\n"
    code += "loaded = sorted({name.split('.')[0] for name in sys.modules})\n"
    return fresh(code + "print(json.dumps({'seconds': t, 'cuda': torch.cuda.is_initialized(), 'loaded': loaded}))")


def test_importing_the_library_is_cheap_and_loads_no_host_no_plotting_and_no_command_line():
    """The one promise about time: less than a second beside torch.  One of three times, for busy machines."""
    first = import_all()
    assert "adamerge" in first["loaded"]
    assert HEAVY.isdisjoint(first["loaded"])
    assert not first["cuda"], "the devices are left alone"
    assert first["seconds"] < 1 or any(import_all()["seconds"] < 1 for _ in range(2))


@pytest.mark.parametrize("name", adamerge.__all__)
def test_every_public_name_says_what_it_is(name):
    thing = getattr(adamerge, name)
    assert inspect.getdoc(thing), f"adamerge.{name} has no docstring"
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            if not method.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, (property, staticmethod))
            ):
                assert inspect.getdoc(value), f"adamerge.{name}.{method} has no docstring"


def test_every_method_says_what_it_is():
    for name in adamerge.methods.__all__:
        assert inspect.getdoc(getattr(adamerge.methods, name)) or name.isupper(), name


@every_module
def test_every_file_starts_with_a_sentence_or_a_short_paragraph(module):
    text = ast.get_docstring(tree(module))
    assert text, f"{module} has no docstring"
    first = text.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":")), "the first paragraph is a whole sentence"
    assert len(text) <= 700, "a file's docstring is a paragraph, not a chapter"


@every_module
def test_files_stay_small_enough_to_read_in_one_sitting(module):
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def test_the_version_and_the_names_are_there():
    assert adamerge.__version__.count(".") == 2
    assert sorted(adamerge.__all__) == adamerge.__all__
    assert all(hasattr(adamerge, name) for name in adamerge.__all__)
    assert set(adamerge.__all__) < set(dir(adamerge))
    assert {name for name, what in bound_names("adamerge").items() if ":" not in what} >= set(adamerge.__all__)


def test_a_module_is_an_attribute_of_the_package_and_other_names_are_not():
    assert adamerge.calibration.calibrate is adamerge.calibrate  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("nothing", "_nothing"):
        with pytest.raises(AttributeError, match=f"^module 'adamerge' has no attribute '{name}'$"):
            getattr(adamerge, name)


def bound_names(module: str) -> dict[str, str]:
    """What a package's own file binds: name -> the module or the name it stands for."""
    found: dict[str, str] = {}
    body = tree(module).body
    for node in [*body, *(one for branch in body if isinstance(branch, ast.If) for one in branch.body)]:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = f"{module}:{node.name}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id: f"{module}:{name.id}" for name in targets if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize("module", [name for name, file in MODULES.items() if file.stem == "__init__"])
def test_no_function_and_no_class_shadows_a_module(module):
    """Otherwise `package.name` is the one or the other, by what was imported last."""
    submodules = {name.removeprefix(f"{module}.") for name in MODULES if name.rpartition(".")[0] == module}
    shadows = {name: what for name, what in bound_names(module).items() if name in submodules}
    assert {name for name, what in shadows.items() if what != f"{module}.{name}"} == set()


def test_every_class_has_a_name_of_its_own():
    """A name that two classes share sends a reader to the wrong one."""
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


Function = tuple[str, ast.FunctionDef]


def functions(module: str) -> list[Function]:
    """Every function and method of a module by its dotted name."""
    found: list[Function] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}.{node.name}"
                if isinstance(node, ast.FunctionDef):
                    found.append((name, node))
                visit(node.body, name)

    visit(tree(module).body, module)
    return found


def is_kernel(node: ast.FunctionDef) -> bool:
    """Whether Triton compiles the function."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def public_functions() -> set[str]:
    """What the package exports, what code on the pages imports, and the commands: users read their signatures."""
    found: list[object] = [
        getattr(package, name) for package in (adamerge, adamerge.methods) for name in package.__all__
    ]
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("adamerge."):
                    found += [getattr(import_module(str(node.module)), alias.name) for alias in node.names]
    found += [command.callback for command in app.registered_commands]
    return {f"{one.__module__}.{one.__qualname__}" for one in found if inspect.isfunction(one)}


PUBLIC = public_functions()


def parameters(node: ast.FunctionDef) -> list[str]:
    """The names of the parameters, `self` aside."""
    given = node.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs) if one.arg not in ("self", "cls")]


def lines_of(node: ast.FunctionDef) -> int:
    """How long a function is, with its signature and its docstring."""
    return (node.end_lineno or 0) - node.lineno + 1


def test_public_functions_are_found():
    """Under the names they are defined by: a function that is missing would be held to the rule for internal ones."""
    assert {
        "adamerge.search.tuner.tune",
        "adamerge.methods.papers.adamerge.adamerge",
        "adamerge.cli.bench.bench",
    } <= PUBLIC
    assert "adamerge.runtime.reference.merge" not in PUBLIC


def test_functions_are_short():
    """Kernels aside: what Triton compiles as one cannot always be divided."""
    long = {
        name: lines_of(node)
        for module in MODULES
        for name, node in functions(module)
        if not is_kernel(node) and lines_of(node) > LONGEST_FUNCTION
    }
    assert long == {}, "divide it"


def test_internal_functions_have_few_parameters():
    many = {
        name: len(parameters(node))
        for module in MODULES
        for name, node in functions(module)
        if not is_kernel(node) and name not in PUBLIC and len(parameters(node)) > MOST_PARAMETERS
    }
    assert many == {}, "pass an object that holds what belongs together"


def unnamed_modes(code: str) -> list[str]:
    """Where a constant in capitals is compared with a bare number, as in `SCORE == 3`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Name)
        and node.left.id.isupper()
        and any(isinstance(sign, (ast.Eq, ast.NotEq)) for sign in node.ops)
        and any(isinstance(one, ast.Constant) and type(one.value) is int for one in node.comparators)
    ]


@pytest.mark.parametrize("module", [name for name in MODULES if ".kernels." in name])
def test_the_modes_of_a_kernel_have_names(module):
    assert unnamed_modes(MODULES[module].read_text(encoding="utf-8")) == []


def test_a_mode_without_a_name_is_found():
    assert unnamed_modes("if SCORE == 3 or WEIGHT != 0:\n    pass") == ["SCORE == 3", "WEIGHT != 0"]
    assert unnamed_modes("if SCORE == SCORE_PROTECT and COLUMNS > 384 and n == 1:\n    pass") == []
