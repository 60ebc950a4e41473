"""The embedded corpus: what counts as prose, documents, order, the stored file."""

from __future__ import annotations

import argparse
import ast
import email.message
import json.decoder
import textwrap
import unittest.mock
from collections import Counter
from pathlib import Path

import orjson
import pytest

from data_pipeline import embedded
from data_pipeline.embedded import iter_embedded_documents, materialise_embedded
from data_pipeline.prose import docstrings, module_prose, paragraphs

DOCSTRING = """
Sum of array elements over a given axis, as a new array.

This is a longer explanation that refers to :func:`numpy.add` and `where <http://x.org>`_
and continues on a **second** line, in ``plain`` English [1]_.

Parameters
----------
a : array_like
    Elements to sum, given in any form that can be turned into an array.
axis : None or int or tuple of ints, optional
    Axis.

>>> np.sum([0.5, 1.5])
2.0

* a bullet item that is long enough to be a sentence of its own.

    x = compute(y) + f(z) and then return it to the caller of this one.

References
----------
Knuth, The Art of Computer Programming, is a book about the subject of this.
"""


def test_prose_is_kept_and_the_rest_counted():
    drops: Counter[str] = Counter()
    found = list(paragraphs(DOCSTRING, drops))
    assert found.pop(1) == (
        "This is a longer explanation that refers to numpy.add and where and continues on a second line, "
        "in plain English."
    )
    assert found == [
        "Sum of array elements over a given axis, as a new array.",
        "Elements to sum, given in any form that can be turned into an array.",
    ]
    assert set(drops) >= {"dropped:doctest", "dropped:list_or_field", "dropped:reference_section", "dropped:short"}


def test_docstrings_in_source_order_without_importing():
    source = (
        b'"""M."""\nraise SystemExit\nclass A:\n  """A."""\n  def f(self):\n    """f."""\nasync def g():\n  """g."""\n'
    )
    assert list(docstrings(source)) == ["M.", "A.", "f.", "g."]
    source = b'#!x\n\n# c\n\'M\\\'s.\'\nx = """no"""\ndef f(\n  a: int,\n) -> str:  # c\n  # c\n  r"""\\f.\n\n    g "" h.\n  """\n'
    assert list(docstrings(source)) == ["M's.", '\\f.\n\ng "" h.']


def test_docstrings_are_those_of_ast():
    """On real modules of the standard library."""
    for module in (argparse, email.message, json.decoder, textwrap, unittest.mock):
        source = Path(module.__file__).read_bytes()
        owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
        expected = [text for text in map(ast.get_docstring, nodes) if text]
        assert sorted(docstrings(source)) == sorted(expected) and expected


def test_unreadable_modules_are_counted(tmp_path):
    path = tmp_path / "old.py"
    path.write_bytes(b'"""Caf\xe9."""')
    assert module_prose(path, "p/old") == ([], Counter({"dropped:unreadable_module": 1}))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One well documented package, so that a test takes no 20 seconds."""
    monkeypatch.setattr(embedded, "PACKAGES", ("networkx", "absent"))


def test_documents_are_distinct_prose_in_a_stable_order(small):
    documents = list(iter_embedded_documents(0.05, workers=1))
    again = list(iter_embedded_documents(0.05, workers=2))
    assert [(d.id, d.text) for d in documents] == [(d.id, d.text) for d in again]
    assert len(documents) > 5 and 50_000 <= sum(len(d.text.encode()) for d in documents) < 120_000
    assert len({d.id for d in documents}) == len(documents)
    assert all(d.id.startswith("networkx/") and d.metadata == {"package": "networkx"} for d in documents)
    found = [paragraph for d in documents for paragraph in d.text.split("\n\n")]
    assert len({p.lower() for p in found}) == len(found)
    words = [word for paragraph in found for word in paragraph.split()]
    assert sum(word in {"the", "a", "of", "is", "to", "in", "and"} for word in words) > 0.15 * len(words)
    assert not any(">>>" in p or p.endswith(":") for p in found)


def test_materialised_once_with_counts(small, tmp_path: Path):
    path = materialise_embedded(tmp_path, 0.05, workers=1)
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    counts = orjson.loads((tmp_path / "counts.json").read_bytes())
    assert counts["documents"] == len(rows) and counts["drops"]["dropped:duplicate_paragraph"] > 0
    assert set(rows[0]) == {"id", "text", "metadata"}
    before = path.stat().st_mtime_ns
    assert materialise_embedded(tmp_path, 0.05, workers=1).stat().st_mtime_ns == before
    (tmp_path / "counts.json").unlink()  # as after a kill
    content = path.read_bytes()
    assert materialise_embedded(tmp_path, 0.05, workers=1).read_bytes() == content
    assert path.stat().st_mtime_ns != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["counts.json", "embedded.jsonl"]
