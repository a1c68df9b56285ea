"""Rules of the source tree that no single module can keep by itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "drafters", "serving", "tools")
SOURCES = sorted(path for name in (*PACKAGES, "tests") for path in (ROOT / name).rglob("*.py"))
MODULES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]

# Imports go only to the left: a layer sees itself and those before it.
LAYERS = ("pipeline.core", "drafters", "serving", "pipeline", "tools")

MAX_FUNCTION_LINES = 80
# One linear train loop may be longer: its order is its documentation.
LONG_FUNCTIONS = {("pipeline/train.py", "train"): 200}
MAX_MODULE_LINES = 500

GIN_IMPORTER = "pipeline/core/config.py"


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer(module: str) -> int | None:
    """The position in `LAYERS` of a dotted name; None for what is not ours."""
    if module == "pipeline.core" or module.startswith("pipeline.core."):
        return 0
    top = module.split(".")[0]
    return LAYERS.index(top) if top in LAYERS else None


def imports(tree: ast.AST) -> set[str]:
    """All modules that a source imports, inside functions too; `from a import b` gives `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_to_the_right(module: str, source: str) -> list[str]:
    own = layer(module)
    assert own is not None
    return sorted(n for n in imports(ast.parse(source)) if (layer(n) or 0) > own)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_only_to_the_left(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert imports_to_the_right(module, path.read_text()) == []


def test_the_layer_rule_sees_a_violation():
    source = "def f():\n    from serving import plan\n"
    assert imports_to_the_right("drafters.mesh", source) == ["serving.plan"]
    assert imports_to_the_right("pipeline.core.config", "import drafters.mesh") == ["drafters.mesh"]
    assert imports_to_the_right("serving.sps", "from pipeline.core import config") == []
    assert imports_to_the_right("serving.sps", "from pipeline import data") == ["pipeline.data"]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_config_module_imports_gin(path):
    tops = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
    assert "gin" not in tops or relative(path) == GIN_IMPORTER


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_functions_and_modules_are_short(path):
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MAX_MODULE_LINES or relative(path).startswith("tests/"), f"{lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = LONG_FUNCTIONS.get((relative(path), node.name), MAX_FUNCTION_LINES)
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= limit, f"{node.name} has {length} lines"


def test_package_init_files_are_empty():
    for name in PACKAGES:
        for init in (ROOT / name).rglob("__init__.py"):
            assert init.read_text() == "", relative(init)


def test_no_python_below_gin():
    """A module there would shadow the gin-config package."""
    assert [p.name for p in (ROOT / "gin").rglob("*") if p.suffix in (".py", ".pyc")] == []


def test_every_package_is_listed_for_installation():
    text = (ROOT / "pyproject.toml").read_text()
    for name in PACKAGES:
        for init in (ROOT / name).rglob("__init__.py"):
            dotted = ".".join(init.parent.relative_to(ROOT).parts)
            assert f'"{dotted}"' in text, dotted


@pytest.mark.parametrize("package", ["pipeline.core", "drafters", "serving"])
def test_importing_does_not_load_tensorflow(package):
    """A server starts in seconds because nothing on its path imports TensorFlow or seqio."""
    folder = ROOT / package.replace(".", "/")
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__init__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "heavy = {'tensorflow', 'seqio', 'clu', 'torch', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def tracked_files() -> list[Path]:
    """What git knows and does not ignore; outside a clone, the sources alone."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return SOURCES
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_package_index():
    """Where packages come from is the installer's business: a mirror must be able to serve them."""
    needles = [
        b"pypi" + b".org",
        b"pythonhosted" + b".org",
        b"--index" + b"-url",
        b"index" + b"_url",
    ]
    found = [
        relative(path)
        for path in tracked_files()
        if any(needle in path.read_bytes() for needle in needles)
    ]
    assert found == []
