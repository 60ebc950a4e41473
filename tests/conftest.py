"""Fixtures that every room shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the public data sets (`CLOZEWORKS_DATA`, default `../shared/data`); skips where it is absent."""
    path = Path(os.environ.get("CLOZEWORKS_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data sets at {path}; set CLOZEWORKS_DATA")
    return path
