"""Imports go one way, the import is cheap and silent, and every file and public name says what it is."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import adamerge

ROOT = Path(adamerge.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
STDLIB = set(sys.stdlib_module_names)

# Room -> the rooms of ours it may import.  Anything directly under the package is a room of its own.
ROOMS = {
    "core": {"core"},
    "methods": {"methods", "core"},
    "runtime": {"runtime", "core"},
    "models": {"models", "runtime", "core"},
    "embedded": {"embedded", "core"},
    "images": {"core"},
}
# The outside libraries a low room may import.  The rest may use what pyproject lists.
OUTSIDE = {
    "core": {"torch", "jaxtyping"},
    "methods": {"torch", "jaxtyping"},
    "runtime": {"torch", "jaxtyping", "triton"},
    "models": {"torch", "jaxtyping"},
}
HEAVY = {"timm", "matplotlib", "typer", "gradio", "triton", "transformers", "torchvision", "open_clip", "PIL", "rich"}
HEAVY |= {"huggingface_hub"}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)


def room(module: str) -> str:
    """adamerge.core.plan -> core; adamerge.flops -> flops; adamerge -> ''."""
    return module.split(".")[1] if "." in module else ""


def imports(file: Path) -> set[str]:
    """Every module a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            module = node.module or ""
            # `from adamerge import flops` imports a room, `from adamerge.core import x` one of its files.
            found |= {f"adamerge.{alias.name}" for alias in node.names} if module == "adamerge" else {module}
    return found


def test_every_file_is_looked_at():
    assert {name_of(f) for f in FILES} >= {"adamerge.core.plan", "adamerge.runtime.reference", "adamerge.hosts.timm"}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_one_way(file):
    here = room(name_of(file))
    ours = {room(module) for module in imports(file) if module.split(".")[0] == "adamerge"}
    if here in ROOMS:
        assert ours <= ROOMS[here]
    if here not in ("cli", "__main__"):
        assert "cli" not in ours, "nobody imports the command line"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_low_rooms_know_few_libraries(file):
    here = room(name_of(file))
    outside = {module.split(".")[0] for module in imports(file)} - STDLIB - {"adamerge"}
    allowed = OUTSIDE.get(here)
    if here == "models":
        # One host library, one file, of the same name.
        allowed = OUTSIDE["models"] | {file.stem}
    if allowed is not None:
        assert outside <= allowed


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_timm_is_imported_where_it_is_the_host_and_where_a_model_is_built(file):
    if "timm" in {module.split(".")[0] for module in imports(file)}:
        assert name_of(file) == "adamerge.hosts.timm" or room(name_of(file)) in {"embedded", "cli", "data"}


def fresh(code: str) -> dict:
    """Run code in a new interpreter that has imported torch, and take what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys, time, torch\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_the_library_loads_no_host_no_plotting_and_no_command_line():
    loaded = fresh("import adamerge; print(json.dumps({m.split('.')[0]: 1 for m in sys.modules}))")
    assert "adamerge" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_importing_the_library_is_cheap_and_leaves_the_devices_alone():
    """The one promise about time: less than a second beside torch.  The best of three, for busy machines."""
    code = "t = time.perf_counter(); import adamerge; t = time.perf_counter() - t\n"
    code += "print(json.dumps({'seconds': t, 'cuda': torch.cuda.is_initialized()}))"
    runs = [fresh(code) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 1
    assert not any(run["cuda"] for run in runs)


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


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_file_starts_with_a_sentence_or_a_short_paragraph(file):
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert text, f"{file} has no docstring"
    first = text.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":")), "the first paragraph is a whole sentence"
    assert len(text) <= 700, "a file's docstring is a paragraph, not a chapter"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_stay_small_enough_to_read_in_one_sitting(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 320


def test_the_version_and_the_names_are_there():
    assert adamerge.__version__.count(".") == 2
    assert sorted(adamerge.__all__) == adamerge.__all__
    assert all(hasattr(adamerge, name) for name in adamerge.__all__)
