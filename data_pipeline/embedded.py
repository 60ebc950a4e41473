"""The embedded corpus: English prose that every Python installation already carries.

Documentation strings of the standard library and of installed packages, and the language reference in
`pydoc_data.topics`, read as text: nothing is imported. One document is one module or one topic. The same installed
versions give the same documents in the same order.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

import orjson

from data_pipeline.artefacts import atomic_writer, write_text
from data_pipeline.prose import module_prose
from data_pipeline.records import Document

STANDARD_LIBRARY = "python"
PACKAGES = (
    STANDARD_LIBRARY,
    "numpy",
    "scipy",
    "sklearn",
    "networkx",
    "matplotlib",
    "pandas",
    "sqlalchemy",
    "sympy",
    "mlflow",
)
"""What is read, as far as installed: well documented dependencies of this project. The list is fixed, so a package that
happens to lie beside them changes nothing; torch and transformers are left out, as they hold little prose for the time
that reading them takes."""
MIN_WORDS = 40
"""Documents below this, about two sentences, are too short for sentence pairs."""
FILE_NAME = "embedded.jsonl"
COUNTS_NAME = "counts.json"
_SKIPPED_FOLDERS = frozenset(
    {"tests", "test", "testing", "_vendor", "site-packages", "idlelib", "lib2to3", "__pycache__"}
)


def _roots() -> list[tuple[str, Path]]:
    paths = sysconfig.get_paths()
    roots = [(name, Path(paths["stdlib" if name == STANDARD_LIBRARY else "purelib"])) for name in PACKAGES]
    roots = [(name, root if name == STANDARD_LIBRARY else root / name) for name, root in roots]
    return [(name, root) for name, root in roots if root.is_dir()]


def _modules() -> Iterator[tuple[Path, str]]:
    """(file, document id) of every module, in alphabetical order inside each package; tests are left out."""
    for package, root in _roots():
        files = {path: path.relative_to(root).parts for path in root.rglob("*.py")}
        for path in sorted(files, key=files.__getitem__):
            parts = files[path]
            if not _SKIPPED_FOLDERS.intersection(parts[:-1]) and not parts[-1].startswith("test_"):
                yield path, f"{package}/{'/'.join(parts).removesuffix('.py')}"


def iter_embedded_documents(
    max_megabytes: float = 0, drops: Counter[str] | None = None, workers: int = 0
) -> Iterator[Document]:
    """Documents of the embedded corpus, shuffled by a hash of their ids.

    Args:
        max_megabytes: stop after this much text (10^6 bytes of UTF-8); 0 takes all.
        drops: receives the number of paragraphs and documents left out, by reason.
        workers: processes that parse; 0 uses the cores of this machine. Never changes the output.

    Yields:
        documents with the id `package/module`, metadata `{"package": top-level name}` and paragraphs divided by a
        blank line.
    """
    drops = Counter() if drops is None else drops
    documents = sorted(_all_documents(drops, workers), key=lambda document: _digest(document.id))
    taken = 0
    for document in documents:
        if max_megabytes and taken >= max_megabytes * 1e6:
            return
        taken += len(document.text.encode())
        yield document


def _all_documents(drops: Counter[str], workers: int) -> Iterator[Document]:
    seen: set[bytes] = set()
    for found, left_out in _scan(list(_modules()), workers or len(os.sched_getaffinity(0))):
        drops.update(left_out)
        for document_id, paragraphs in found:
            kept = _distinct(paragraphs, seen, drops)
            if sum(paragraph.count(" ") + 1 for paragraph in kept) >= MIN_WORDS:
                package = document_id.partition("/")[0]
                yield Document(text="\n\n".join(kept), id=document_id, metadata={"package": package})
            elif paragraphs:
                drops["dropped:short_document"] += 1


def _scan(modules: list[tuple[Path, str]], workers: int) -> Iterable[tuple[list[tuple[str, list[str]]], Counter[str]]]:
    """`module_prose` of every module, in their order."""
    paths, ids = [path for path, _ in modules], [document_id for _, document_id in modules]
    if workers == 1:
        yield from map(module_prose, paths, ids)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(module_prose, paths, ids, chunksize=32)


def _distinct(paragraphs: Iterable[str], seen: set[bytes], drops: Counter[str]) -> list[str]:
    kept = []
    for paragraph in paragraphs:
        key = _digest(paragraph.lower())
        if key in seen:
            drops["dropped:duplicate_paragraph"] += 1
            continue
        seen.add(key)
        kept.append(paragraph)
    return kept


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()


def _signature(max_megabytes: float) -> dict[str, object]:
    """What the corpus depends on: a stored one with another signature is written anew."""
    return {
        "max_megabytes": max_megabytes,
        "python": sysconfig.get_python_version(),
        "packages": {name: _version(name) for name, _ in _roots()},
    }


def _version(package: str) -> str:
    if package == STANDARD_LIBRARY:
        return ".".join(map(str, sys.version_info[:3]))
    distribution = "scikit-learn" if package == "sklearn" else package
    return metadata.version(distribution)


def materialise_embedded(directory: str | Path, max_megabytes: float = 0, workers: int = 0) -> Path:
    """Write the embedded corpus as JSON lines (`id`, `text`, `metadata`), atomically, and `counts.json` beside it.

    A corpus that is already there, of the same size and from the same versions, is kept.

    Returns:
        the JSONL file.
    """
    directory = Path(directory)
    path, counts_path = directory / FILE_NAME, directory / COUNTS_NAME
    signature = _signature(max_megabytes)
    if path.exists() and counts_path.exists() and orjson.loads(counts_path.read_bytes())["source"] == signature:
        return path
    counts_path.unlink(missing_ok=True)  # written last: without it the corpus is not finished
    drops: Counter[str] = Counter()
    documents = size = 0
    with atomic_writer(path) as handle:
        for document in iter_embedded_documents(max_megabytes, drops, workers):
            documents += 1
            size += len(document.text.encode())
            row = {"id": document.id, "text": document.text, "metadata": document.metadata}
            handle.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    counts = {"source": signature, "documents": documents, "bytes": size, "drops": dict(sorted(drops.items()))}
    write_text(counts_path, orjson.dumps(counts, option=orjson.OPT_INDENT_2).decode() + "\n")
    return path
