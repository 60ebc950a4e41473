"""The walls between the rooms: who imports whom, who owns which library, and the name `eval`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "data_pipeline": set(),
    "cluster": set(),
    "pretrain": {"data_pipeline", "cluster"},
    "eval": {"data_pipeline", "pretrain", "cluster"},
}
"""Package -> packages that it may import."""

OWNERS = {
    "deepspeed": {"pretrain/engine.py"},
    "mlflow": {"pretrain/tracking.py"},
    "webdataset": set(),
}
"""Library -> the files of the packages that may import it; shards are written without webdataset, only tests read with it."""

SLURM_COMMANDS = ("sbatch", "squeue", "scontrol", "sinfo", "scancel", "sacct")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(module, name that the import binds, line) for every absolute import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node.module, alias.asname or alias.name, node.lineno


def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def upward_imports(package: str, tree: ast.AST) -> list[str]:
    allowed = LAYERS[package] | {package}
    return [
        f"line {line}: {module}"
        for module, _, line in imports(tree)
        if module.split(".")[0] in LAYERS and module.split(".")[0] not in allowed
    ]


def eval_bindings(tree: ast.AST) -> list[str]:
    return [f"line {line}: {module}" for module, bound, line in imports(tree) if bound == "eval"]


@pytest.mark.parametrize("package", LAYERS)
def test_packages_import_only_those_below_them(package: str) -> None:
    files = sources(package)
    assert len(files) > 1
    assert {
        str(path.relative_to(ROOT)): found for path in files if (found := upward_imports(package, parse(path)))
    } == {}


def test_no_import_hides_the_builtin_eval() -> None:
    files = sources(*LAYERS, "tests", "benchmarks")
    assert {str(path.relative_to(ROOT)): found for path in files if (found := eval_bindings(parse(path)))} == {}


@pytest.mark.parametrize("library", OWNERS)
def test_one_file_owns_each_giant(library: str) -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in sources(*LAYERS)
        if any(module.split(".")[0] == library for module, _, _ in imports(parse(path)))
    }
    assert importers <= OWNERS[library]


def test_slurm_commands_are_named_in_one_file() -> None:
    """As a whole string, which is how an argument list names a program; messages and comments may speak of them."""
    named = {
        str(path.relative_to(ROOT))
        for path in sources(*LAYERS)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and node.value in SLURM_COMMANDS
    }
    assert named <= {"cluster/slurm.py"}


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """`deepspeed pretrain/run.py` puts a package's folder first on `sys.path`, where such a name would win."""
    import sys

    # `python -m` never puts data_pipeline/ on the path, and the name is the command that users type.
    allowed = {"data_pipeline/inspect.py"}
    taken = {
        str(path.relative_to(ROOT))
        for path in sources(*LAYERS)
        if path.stem in sys.stdlib_module_names and path.stem != "__init__"
    }
    assert taken <= allowed


def test_these_checks_can_fail() -> None:
    planted = ast.parse("def f():\n    from pretrain.config import TrainConfig\nimport eval.suite\nimport eval as e\n")
    assert upward_imports("data_pipeline", planted) == [
        "line 3: eval.suite",
        "line 4: eval",
        "line 2: pretrain.config",
    ]
    assert eval_bindings(planted) == ["line 3: eval.suite"]
