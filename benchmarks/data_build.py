"""Tokens per CPU second of a build from pre-split and from raw text, and what a second worker brings.

Ours: the whole of `python -m data_pipeline.build` (start, reading, encoding, pairs, masks, tars written), CPU time of
all its processes; what the start costs is shown. Beside it stand, in the same run:

- pre-split: what the classic scripts for BERT do: encode each sentence with `tokenizers`, build pairs and masks from lists of
  tokens, one example at a time; it writes nothing, and its start is not counted;
- raw text: the bare cost of sentence splitter and encoder, ours and that of the libraries called plainly.

The two workers are compared with one on the clock, which is true on an idle machine only, and by processor time: were
both cores free, the clock would show the time of the main process and half of that of the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import ROOT, quick_argument, report
from tokenizers import Tokenizer

from data_pipeline.sentences import split_sentences

NEEDED = 2.0e6
RAW_NEEDED = 0.7e6
BARE_SHARE = 0.6
TWO_WORKERS = 1.8
LENGTH = 128
SENTENCES_PER_DOCUMENT = 60
_PR_SET_CHILD_SUBREAPER = 36  # sys/prctl.h


def sentences(megabytes: float) -> list[str]:
    """English novels where the public data sets are at hand, else the documentation in this installation."""
    shared = Path(os.environ.get("CLOZEWORKS_DATA", ROOT.parent / "shared" / "data")) / "text" / "gutenberg"
    found: list[str] = []
    size = 0
    for text in _novels(shared) if shared.is_dir() else _embedded(megabytes):
        for sentence in split_sentences(text[: int(megabytes * 1e6) - size], "punkt"):
            found.append(" ".join(sentence.split()))
            size += len(found[-1])
        if size >= megabytes * 9e5:
            break
    return found


def _novels(folder: Path):
    for path in sorted(folder.glob("*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8-sig", "replace")
        yield text.partition("*** START")[2].partition("*** END")[0].replace("\r\n", "\n")


def _embedded(megabytes: float):
    from data_pipeline.embedded import iter_embedded_documents

    for document in iter_embedded_documents(megabytes):
        yield document.text


def build(folder: Path, texts: list[str], vocabulary_path: Path, how: str, workers: int = 1) -> dict[str, float]:
    """Build these files; tokens of the corpus, CPU seconds (`cpu` of all processes, `main` of the first), seconds on the clock.

    Args:
        folder: is made; the data set stays there.
        texts: one file each.
        vocabulary_path: of the tokenizer.
        how: `corpus.sentences`.
        workers: processes.
    """
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number, text in enumerate(texts):
        (corpus / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    config = folder / "build.toml"
    config.write_text(
        f"""
[corpus]
source = "text"
paths = ["{corpus}"]
sentences = "{how}"
held_out = 0.0
[tokenizer]
path = "{vocabulary_path}"
[data]
dir = "{folder / "data"}"
max_seq_length = {LENGTH}
mask_sets = 1
workers = {workers}
"""
    )
    command = [sys.executable, "-m", "data_pipeline.build", "--config", str(config)]
    main_cpu, cpu, clock = timed(command)
    stats = json.loads((folder / "data" / "train" / "stats.json").read_bytes())
    print(
        f"{folder.name}: {stats['corpus_tokens'] / 1e6:.2f} M corpus tokens into {stats['examples']} examples, "
        f"{_size(folder / 'data' / 'train') / 1e6:.1f} MB, in {clock:.2f} s, {cpu:.2f} CPU s ({main_cpu:.2f} in the main process)"
    )
    return {"tokens": stats["corpus_tokens"], "cpu": cpu, "main": main_cpu, "clock": clock}


def timed(command: list[str]) -> tuple[float, float, float]:
    """CPU seconds of a command's first process, CPU seconds of all its processes, and seconds on the clock.

    Workers descend from a process that outlives the command for a moment: on Linux it comes to us (a subreaper), with
    its time and that of the workers it waited for.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    clock = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit("the build failed")
    main_cpu = total = usage.ru_utime + usage.ru_stime
    with contextlib.suppress(ChildProcessError):
        while True:
            _, _, usage = os.wait4(-1, 0)
            total += usage.ru_utime + usage.ru_stime
    return main_cpu, total, clock


def bare(text: str, tokenizer_dir: Path) -> tuple[float, float]:
    """Tokens per CPU second of splitter and encoder alone: as they are here, and as nupunkt and tokie come.

    Each call is one pass over text that the splitter has not seen.
    """
    import nupunkt

    from data_pipeline import sentences
    from data_pipeline.tokenizer import load_tokenizer

    sentences._punkt.cache_clear()  # it remembers the text of an earlier measurement
    tokenizer = load_tokenizer(tokenizer_dir)
    plain = nupunkt.load("default")
    documents = text.split("\n\n")

    def rate(split: Callable[[str], list[str]]) -> float:
        started = time.process_time()
        found = [split(document) for document in documents]
        tokens = len(tokenizer.encode_flat([sentence for part in found for sentence in part])[0])
        return tokens / (time.process_time() - started)

    tokenizer.encode_flat(split_sentences(documents[0], "punkt") + plain.tokenize(documents[0]))  # loads what is needed
    return rate(lambda document: split_sentences(document, "punkt")), rate(plain.tokenize)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def vocabulary(folder: Path, lines: list[str]) -> Path:
    """BERT's uncased vocabulary where it is at hand, else one trained on the text."""
    shared = Path(os.environ.get("CLOZEWORKS_DATA", ROOT.parent / "shared" / "data"))
    official = shared / "vocab" / "bert-base-uncased-vocab.txt"
    if official.exists():
        return official
    from data_pipeline.config import TokenizerConfig
    from data_pipeline.vocabulary import train_vocabulary

    train_vocabulary(lines, TokenizerConfig(vocab_size=8192), 0, folder / "vocabulary")
    return folder / "vocabulary"


def peer(lines: list[str], tokenizer_file: Path) -> float:
    """Tokens per CPU second of the plain pipeline."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rng = random.Random(0)
    started = time.process_time()
    documents = []
    for start in range(0, len(lines), SENTENCES_PER_DOCUMENT):
        chunk = lines[start : start + SENTENCES_PER_DOCUMENT]
        documents.append([tokenizer.encode(line, add_special_tokens=False).tokens for line in chunk])
    tokens = sum(len(sentence) for document in documents for sentence in document)
    vocabulary = list(tokenizer.get_vocab())
    examples = [
        plain_mask(first, second, label, vocabulary, rng)
        for number in range(len(documents))
        for first, second, label in plain_pairs(documents, number, rng)
    ]
    rng.shuffle(examples)
    seconds = time.process_time() - started
    print(f"peer: {tokens} corpus tokens into {len(examples)} examples in {seconds:.2f} CPU s, nothing written")
    return tokens / seconds


def plain_pairs(documents: list[list[list[str]]], number: int, rng: random.Random):
    """Next sentence pairs of one document, from lists of tokens."""
    room = LENGTH - 3
    document = documents[number]
    position = 0
    while position < len(document):
        goal = rng.randint(2, room) if rng.random() < 0.1 else room
        chunk: list[list[str]] = []
        while position + len(chunk) < len(document) and sum(map(len, chunk)) < goal:
            chunk.append(document[position + len(chunk)])
        split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        first = [token for sentence in chunk[:split] for token in sentence]
        if len(chunk) == 1 or rng.random() < 0.5:
            other = documents[(number + rng.randint(1, len(documents) - 1)) % len(documents)]
            second: list[str] = []
            for sentence in other[rng.randrange(len(other)) :]:
                second.extend(sentence)
                if len(second) >= goal - len(first):
                    break
            position += split
            label = 1
        else:
            second = [token for sentence in chunk[split:] for token in sentence]
            position += len(chunk)
            label = 0
        while len(first) + len(second) > room:
            longer = first if len(first) > len(second) else second
            if rng.random() < 0.5:
                del longer[0]
            else:
                longer.pop()
        if first and second:
            yield first, second, label


def plain_mask(first: list[str], second: list[str], label: int, vocabulary: list[str], rng: random.Random):
    """One masked example, as lists."""
    tokens = ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
    segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    places = [i for i, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
    rng.shuffle(places)
    chosen = sorted(places[: max(1, round(len(tokens) * 0.15))])
    labels = [tokens[i] for i in chosen]
    for i in chosen:
        fate = rng.random()
        if fate < 0.8:
            tokens[i] = "[MASK]"
        elif fate < 0.9:
            tokens[i] = rng.choice(vocabulary)
    return tokens, segments, chosen, labels, label


def main() -> None:
    """Measure all on the same text."""
    quick = quick_argument(__doc__.split("\n")[0]).quick
    lines = sentences(0.5 if quick else 12.0)
    documents = [lines[i : i + SENTENCES_PER_DOCUMENT] for i in range(0, len(lines), SENTENCES_PER_DOCUMENT)]
    pre_split = "\n\n".join("\n".join(document) for document in documents)
    raw = "\n\n".join("\n".join(" ".join(part) for part in _tens(document)) for document in documents)
    copies = 2 if quick else 40
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = vocabulary(folder, lines)
        start = build(folder / "start", [pre_split[:20000]], path, "line")
        # One worker first and last, so that a machine that grows faster or slower meanwhile favours neither.
        runs = {
            name: build(folder / name, [pre_split] * copies, path, "line", workers)
            for name, workers in (("pre-split", 1), ("two", 2), ("two again", 2), ("pre-split again", 1))
        }
        ours, two = _sum(runs["pre-split"], runs["pre-split again"]), _sum(runs["two"], runs["two again"])
        tokenizer_dir = folder / "pre-split" / "data" / "tokenizer"
        before = bare(raw, tokenizer_dir)
        raw_ours = build(folder / "raw", [raw] * max(2, copies // 4), path, "punkt")
        bare_rate, libraries = (2 / (1 / a + 1 / b) for a, b in zip(before, bare(raw, tokenizer_dir), strict=True))
        other = peer(lines[: 2000 if quick else 20000], tokenizer_dir / "tokenizer.json")
    value, raw_value = (run["tokens"] / run["cpu"] for run in (ours, raw_ours))
    print(
        f"start-up alone: {start['cpu']:.2f} CPU s, {2 * start['cpu'] / ours['cpu']:.0%} of a build from pre-split text\n"
        f"splitter and encoder alone: {bare_rate:,.0f} tokens per CPU second; nupunkt and tokie called plainly: {libraries:,.0f}"
    )
    both_free = ours["cpu"] / (two["main"] + (two["cpu"] - two["main"]) / 2)
    print(
        f"two workers are {ours['clock'] / two['clock']:.2f} times as fast as one, {both_free:.2f} times by processor time"
    )
    one, both = (run["tokens"] / run["clock"] for run in (ours, two))
    report("data_build_two_workers", both, "tokens per second on the clock", one, TWO_WORKERS)
    report("data_build_raw_bare", raw_value, "tokens per CPU second", bare_rate, BARE_SHARE)
    report("data_build_raw", raw_value, "tokens per CPU second", libraries, needed=RAW_NEEDED)
    report("data_build", value, "tokens per CPU second", other, needed=NEEDED)


def _sum(*runs: dict[str, float]) -> dict[str, float]:
    return {name: sum(run[name] for run in runs) for name in runs[0]}


def _tens(document: list[str]) -> list[list[str]]:
    """Running text: ten sentences a line."""
    return [document[i : i + 10] for i in range(0, len(document), 10)]


if __name__ == "__main__":
    main()
