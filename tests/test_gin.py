"""Every shipped config parses, is fully used, and builds its objects."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core import config
from pipeline.core.checks import STAGES

FILES = sorted(config.GIN_ROOT.rglob("*.gin"))
# Whole runs lie directly in gin/; those in its folders are made to be included.
RUNS = [path for path in FILES if path.parent == config.GIN_ROOT]
FRAGMENTS = [path for path in FILES if path.parent != config.GIN_ROOT]

# Modules whose frozen dataclasses a config may build, beside the `SETTINGS` of every stage.
SETTINGS_MODULES = ("drafters.shapes", "drafters.mesh")


def relative(path: Path) -> str:
    return path.relative_to(config.GIN_ROOT).as_posix()


def stages() -> dict[str, tuple[Callable, tuple[type, ...]]]:
    """The stages that exist: their function and the settings that their entry point registers."""
    found = {}
    for name, module_name in STAGES.items():
        if importlib.util.find_spec(module_name) is not None:
            module = importlib.import_module(module_name)
            found[name] = (getattr(module, name), module.SETTINGS)
    return found


def all_settings() -> tuple[type, ...]:
    classes = {cls for _, settings in stages().values() for cls in settings}
    for name in SETTINGS_MODULES:
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            classes |= {
                value
                for value in vars(module).values()
                if isinstance(value, type)
                and dataclasses.is_dataclass(value)
                and value.__module__ == name
            }
    return tuple(sorted(classes, key=lambda cls: cls.__name__))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Configs are found from any working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", FRAGMENTS, ids=relative)
def test_a_fragment_builds_what_it_names(path):
    functions = [function for function, _ in stages().values()]
    config.check_fragment(relative(path), functions, all_settings())


@pytest.mark.parametrize("path", RUNS, ids=relative)
def test_a_run_configures_its_stages(path):
    named = config.configured_stages(relative(path))
    assert named, f"{relative(path)} configures no stage"
    for name, (function, settings) in stages().items():
        if name in named:
            configured = config.load(function, settings, files=[relative(path)])
            assert name in configured.config_str
