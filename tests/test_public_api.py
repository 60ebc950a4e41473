"""The public names of each package, frozen; and that importing a package is cheap."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {
    "data_pipeline": ["Batch", "Document", "Tokenizer", "build_loader"],
    "pretrain": ["BertForPreTraining", "EncoderConfig", "TrainConfig", "export_to_hf", "load_config"],
    "cluster": ["World", "current_world", "submit"],
    "eval": ["TASKS", "run_suite"],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_frozen_and_there(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == PUBLIC[package]
    for name in PUBLIC[package]:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def run_python(code: str) -> str:
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return shown.stdout.strip()


def test_importing_the_packages_does_not_import_torch() -> None:
    code = (
        "import sys; import data_pipeline, pretrain, cluster; from eval import __all__ as names;"
        "print(sorted({'torch', 'deepspeed', 'mlflow', 'transformers', 'webdataset'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_building_needs_no_torch() -> None:
    code = "import sys; import data_pipeline.build; print('torch' in sys.modules)"
    assert run_python(code) == "False"
