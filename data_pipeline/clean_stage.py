"""Stage 0, where `[cleaning]` asks for it: which documents of the corpus are left out, and why.

One task per input partition judges documents by themselves and notes what duplicates are found by; then all notes together
give the list of documents to leave out, `dropped.npz`, and `report.json` with counts and samples. The tokenizer and
stage 1 read the corpus without them. Neither file depends on the number of tasks.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from data_pipeline.artefacts import atomic_writer, write_text
from data_pipeline.build_state import worker_lock
from data_pipeline.config import CleaningConfig
from data_pipeline.duplicates import BANDS, clusters, same_text, signature
from data_pipeline.ngrams import word_hashes, words_of

if TYPE_CHECKING:
    from data_pipeline.quality import Finding

DROPPED_NAME, REPORT_NAME, INDEX_NAME = "dropped.npz", "report.json", "evaluation.npz"
SAMPLES = 5
"""Documents of each reason that the report shows."""
_SAMPLE_CHARACTERS = 200
EXACT, NEAR = "exact_duplicate", "near_duplicate"


def document_key(document_id: str) -> int:
    """64 bits that stand for a document."""
    return int.from_bytes(_digest(document_id), "little")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"cleaning").digest()


@dataclass(slots=True)
class _Notes:
    """What one task found."""

    keys: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    bands: list[np.ndarray] = field(default_factory=list)
    dropped: dict[str, list[int]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)

    def drop(self, document: Document, found: Finding) -> None:
        key, reason = document_key(document.id), found.reason
        self.dropped.setdefault(reason, []).append(key)
        self.kinds[json.dumps([reason, found.kind])] += 1
        detail = f"{found.kind}: {found.detail}" if found.detail else found.kind
        entry = {"id": document.id, "detail": detail, "text": document.text[:_SAMPLE_CHARACTERS]}
        held = self.samples.setdefault(reason, [])
        held.append((key, entry))
        if len(held) > 20 * SAMPLES:
            self.samples[reason] = _least(held)

    def keep(self, document: Document, hashes: np.ndarray, near: bool) -> None:
        key = document_key(document.id)
        self.keys.append(key)
        self.ids.append(document.id)
        self.texts.append(document_key(document.text.strip()))
        if near:
            # Without a word there is nothing to compare: a value that no other document has.
            self.bands.append(signature(hashes) if len(hashes) else np.full(BANDS, key, np.uint64))

    def write(self, path: Path) -> None:
        arrays = {f"dropped_{reason}": np.array(keys, np.uint64) for reason, keys in self.dropped.items()}
        arrays |= {"keys": np.array(self.keys, np.uint64), "texts": np.array(self.texts, np.uint64)}
        arrays["ids"] = np.frombuffer(json.dumps(self.ids).encode(), np.uint8)
        samples = {reason: _least(held) for reason, held in self.samples.items()}
        arrays["kinds"] = np.frombuffer(json.dumps(self.kinds).encode(), np.uint8)
        arrays["samples"] = np.frombuffer(json.dumps(samples).encode(), np.uint8)
        columns = np.array(self.bands, np.uint64).reshape(-1, BANDS)
        arrays |= {f"band_{band}": np.ascontiguousarray(columns[:, band]) for band in range(BANDS)}
        with atomic_writer(path) as handle:
            np.savez(handle, **arrays)  # type: ignore[arg-type]


def _least(entries: list[tuple[int, dict[str, str]]]) -> list[tuple[int, dict[str, str]]]:
    return heapq.nsmallest(SAMPLES, entries, key=lambda entry: entry[0])


class CleanStep(PipelineStep):
    """Write the notes of one task.

    Args:
        cleaning: `[cleaning]`.
        output_dir: receives `task-NNNNN.npz` and holds `evaluation.npz` where there are evaluation files.
    """

    name = "Clean"
    type = "Clozeworks"

    def __init__(self, *, cleaning: CleaningConfig, output_dir: Path) -> None:
        super().__init__()
        self.cleaning = cleaning
        self.output_dir = output_dir

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Consume the documents of task `rank`; yields nothing."""
        from data_pipeline.quality import DocumentFilters  # its libraries load for a second

        cleaning, notes = self.cleaning, _Notes()
        filters = DocumentFilters(cleaning, self.output_dir / INDEX_NAME if cleaning.decontaminate else None)
        compare = cleaning.exact_duplicates or cleaning.near_duplicates
        with worker_lock(self.output_dir.parent):
            for document in data:
                words = words_of(document.text)
                hashes = word_hashes(words)
                found = filters.finding(document, words, hashes)
                if found is not None:
                    notes.drop(document, found)
                elif compare:
                    notes.keep(document, hashes, cleaning.near_duplicates)
            notes.write(notes_path(self.output_dir, rank))
        yield from ()


def notes_path(directory: Path, task: int) -> Path:
    """The notes of a task."""
    return directory / f"task-{task:05d}.npz"


def merge_notes(
    directory: Path, tasks: int, cleaning: CleaningConfig, evaluation: dict[str, int] | None = None
) -> dict[str, int]:
    """Write `dropped.npz` and, last, `report.json` from the notes of all tasks; the documents dropped by reason.

    Args:
        evaluation: texts looked for, by evaluation file.
    """
    files = [notes_path(directory, task) for task in range(tasks)]
    dropped: dict[str, np.ndarray] = {}
    samples: dict[str, list[tuple[int, dict[str, str]]]] = {}
    kinds: Counter[str] = Counter()
    for path in files:
        with np.load(path) as notes:
            for name in notes.files:
                if name.startswith("dropped_"):
                    reason = name.removeprefix("dropped_")
                    dropped[reason] = np.concatenate([dropped.get(reason, np.zeros(0, np.uint64)), notes[name]])
            kinds.update(json.loads(notes["kinds"].tobytes()))
            for reason, held in json.loads(notes["samples"].tobytes()).items():
                samples[reason] = _least([*samples.get(reason, []), *((key, entry) for key, entry in held)])
    keys = _column(files, "keys")
    alive = np.ones(len(keys), bool)
    for reason, wanted in ((EXACT, cleaning.exact_duplicates), (NEAR, cleaning.near_duplicates)):
        if not wanted or not len(keys):
            continue
        places = np.flatnonzero(alive)
        if reason == EXACT:
            copies, owners = same_text(keys, _column(files, "texts"))
        else:
            bands = (_column(files, f"band_{band}")[places] for band in range(BANDS))
            copies, owners = (places[found] for found in clusters(keys[places], bands))
        alive[copies] = False
        dropped[reason] = keys[copies]
        samples[reason] = _copies(files, keys, copies, owners)
    counts = {reason: len(found) for reason, found in sorted(dropped.items()) if len(found)}
    _write_dropped(directory / DROPPED_NAME, dropped)
    by_kind: dict[str, dict[str, int]] = {}
    for pair, count in sorted(kinds.items()):
        reason, kind = json.loads(pair)
        by_kind.setdefault(reason, {})[kind] = count
    report = {
        "dropped": counts,
        "kinds": by_kind,
        "evaluation_texts": evaluation or {},
        "samples": {reason: [entry for _, entry in samples[reason]] for reason in counts},
    }
    write_text(directory / REPORT_NAME, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return counts


def _column(files: Sequence[Path], name: str) -> np.ndarray:
    parts = []
    for path in files:
        with np.load(path) as notes:
            parts.append(notes[name])
    return np.concatenate(parts)


def _copies(
    files: Sequence[Path], keys: np.ndarray, copies: np.ndarray, owners: np.ndarray
) -> list[tuple[int, dict[str, str]]]:
    """Samples of duplicates with the ids of both documents."""
    chosen = np.argsort(keys[copies], kind="stable")[:SAMPLES]
    wanted = {int(place) for place in np.concatenate([copies[chosen], owners[chosen]])}
    ids: dict[int, str] = {}
    start = 0
    for path in files:
        with np.load(path) as notes:
            end = start + len(notes["keys"])
            inside = [place for place in wanted if start <= place < end]
            if inside:
                names = json.loads(notes["ids"].tobytes())
                ids |= {place: names[place - start] for place in inside}
            start = end
    return [
        (int(keys[copies[i]]), {"id": ids[int(copies[i])], "detail": f"repeats {ids[int(owners[i])]}"}) for i in chosen
    ]


def _write_dropped(path: Path, dropped: dict[str, np.ndarray]) -> None:
    names = sorted(dropped)
    keys = np.concatenate([np.zeros(0, np.uint64), *(dropped[name] for name in names)])
    reasons = np.repeat(np.arange(len(names), dtype=np.uint8), [len(dropped[name]) for name in names])
    order = np.argsort(keys, kind="stable")
    with atomic_writer(path) as handle:
        np.savez(handle, keys=keys[order], reasons=reasons[order], names=np.array(names, dtype=np.str_))


class DroppedDocuments:
    """The documents that cleaning leaves out."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._keys, self._reasons = arrays["keys"], arrays["reasons"]
            self._names = arrays["names"].tolist()

    def reason(self, document_id: str) -> str | None:
        """Why a document is left out; None: it is kept."""
        key = np.uint64(document_key(document_id))
        place = int(np.searchsorted(self._keys, key))
        if place == len(self._keys) or self._keys[place] != key:
            return None
        return self._names[self._reasons[place]]

    def kept(self, documents: Iterable[Document], counts: Counter[str]) -> Iterator[Document]:
        """The documents that are kept; the others are counted as `dropped:REASON`."""
        for document in documents:
            reason = self.reason(document.id)
            if reason is None:
                yield document
            else:
                counts[f"dropped:{reason}"] += 1
