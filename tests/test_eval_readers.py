"""Official task files with their traps, on the real files where they are at hand."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from eval.readers import ReadError, read_split
from eval.tasks import GLUE, TASKS, TaskError, select_tasks

# Rows and label counts of the official release: (task, split) -> (rows, {label: count}).
OFFICIAL = {
    ("CoLA", "train"): (8551, {}),
    ("CoLA", "dev"): (1043, {"acceptable": 721, "unacceptable": 322}),
    ("CoLA", "test"): (1063, None),
    ("SST-2", "train"): (67349, {}),
    ("SST-2", "dev"): (872, {"positive": 444, "negative": 428}),
    ("SST-2", "test"): (1821, None),
    ("MRPC", "train"): (3668, {"equivalent": 2474}),
    ("MRPC", "dev"): (408, {"equivalent": 279}),
    ("MRPC", "test"): (1725, None),
    ("STS-B", "train"): (5749, {}),
    ("STS-B", "dev"): (1500, {}),
    ("STS-B", "test"): (1379, None),
    ("STS-B", "test_gold"): (1379, {}),
    ("QQP", "dev_part"): (23496, {"not_duplicate": 14749, "duplicate": 8747}),
    ("QNLI", "dev"): (5463, {"entailment": 2702, "not_entailment": 2761}),
    ("QNLI", "test"): (5463, None),
    ("RTE", "train"): (2490, {}),
    ("RTE", "dev"): (277, {"entailment": 146, "not_entailment": 131}),
    ("RTE", "test"): (3000, None),
    ("WNLI", "train"): (635, {}),
    ("WNLI", "dev"): (71, {"not_entailment": 40, "entailment": 31}),
    ("WNLI", "test"): (146, None),
    ("diagnostic", "dev"): (1104, {"entailment": 460, "neutral": 386, "contradiction": 258}),
    ("diagnostic", "test"): (1104, None),
    ("SICK-E", "train"): (4500, {"entailment": 1299, "neutral": 2536, "contradiction": 665}),
    ("SICK-E", "dev"): (500, {}),
    ("SICK-E", "test"): (4927, {}),
    ("SICK-R", "train"): (4500, {}),
}


@pytest.mark.parametrize(("task", "split"), OFFICIAL)
def test_official_files_give_official_counts(shared_data: Path, task: str, split: str) -> None:
    rows, counts = OFFICIAL[task, split]
    examples = read_split(shared_data, TASKS[task], split)
    assert len(examples) == rows
    assert all(text.strip() for text in examples.texts_a)
    if counts is None:
        assert examples.labels is None
    else:
        found = Counter(examples.label_names[int(label)] for label in examples.labels) if examples.label_names else {}
        assert {name: found[name] for name in counts} == counts
    assert examples.malformed == ({"number of fields": 1} if task == "QQP" else {})


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return folder


def test_bom_crlf_lone_quotes_and_odd_line_ends(tmp_path: Path) -> None:
    rows = '\ufeffindex\tsentence1\tsentence2\tlabel\r\n0\t"one\u2028 lone\x85quote\ttwo\tentailment\r\n1\ta\t"b"\tnot_entailment'
    plain = read_split(write(tmp_path, "RTE/dev.tsv", rows.encode()), TASKS["RTE"], "dev")
    assert plain.texts_a == ['"one\u2028 lone\x85quote', "a"] and plain.texts_b == ["two", '"b"']
    assert plain.labels.tolist() == [0, 1]
    (tmp_path / "RTE/dev.tsv").unlink()
    packed = read_split(write(tmp_path, "glue/RTE/dev.tsv.gz", gzip.compress(rows.encode())), TASKS["RTE"], "dev")
    assert packed.texts_a == plain.texts_a and packed.sha256 == plain.sha256


def test_a_bom_does_not_hide_the_first_column(tmp_path: Path) -> None:
    content = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb\n"
    examples = read_split(write(tmp_path, "MRPC/dev.tsv", content.encode()), TASKS["MRPC"], "dev")
    assert examples.labels.tolist() == [1] and examples.texts_a == ["a"]


def test_malformed_rows_are_counted_and_too_many_end_with_the_first_named(tmp_path: Path) -> None:
    good = [f"{n}\t{n}\t{n}\tone {n}\ttwo {n}\t{n % 2}" for n in range(400)]
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    content = "\n".join([header, *good[:3], "short\trow", *good[3:], "9\t9\t9\ta\tb\tmaybe"])
    examples = read_split(write(tmp_path, "QQP/dev.tsv", content.encode()), TASKS["QQP"], "dev")
    assert len(examples) == 400 and examples.malformed == {"number of fields": 1, "unknown label": 1}
    assert examples.ids[2:4] == ["2", "4"]
    write(tmp_path, "QQP/dev.tsv", "\n".join([header, *good[:3], *["short\trow"] * 9]).encode())
    with pytest.raises(ReadError, match=r"QQP/dev.tsv: 9 of 12 rows are malformed .* row 3: 2 instead of 6"):
        read_split(tmp_path, TASKS["QQP"], "dev")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"index\tsentence1\tlabel\n", r"no column \['sentence2'\]"),
        (b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\tyes\n", r"unknown label, first row 0: 'yes'.*'entailment'"),
        (b"index\tsentence1\tsentence2\tlabel\n0\t\xff\tb\tyes\n", "not UTF-8 at byte 34"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ReadError, match=message):
        read_split(write(tmp_path, "RTE/dev.tsv", content), TASKS["RTE"], "dev")


def test_missing_file_names_the_places(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"RTE/train.tsv: no such file \(nor train.tsv.gz.*glue.*--data"):
        read_split(tmp_path, TASKS["RTE"], "train")


def test_labels_of_the_demo_task_come_from_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "package/labels.txt", b"numpy\ntorch\n")
    write(tmp_path, "package/dev.tsv", b"index\tsentence\tlabel\n0\tan array\tnumpy\n1\ta tensor\ttorch\n")
    examples = read_split(tmp_path, TASKS["package"], "dev")
    assert examples.label_names == ("numpy", "torch") and examples.labels.tolist() == [0, 1]


def test_tasks_by_name() -> None:
    assert [task.name for task in select_tasks(["cola,RTE"])] == ["CoLA", "RTE"]
    assert [task.name for task in select_tasks(["glue"])] == list(GLUE)
    with pytest.raises(TaskError, match="did you mean 'MRPC'"):
        select_tasks(["MRCP"])
    with pytest.raises(TaskError, match="no task named"):
        select_tasks([","])


def test_listing_tasks_imports_no_torch() -> None:
    code = "import sys; from eval import TASKS; from eval.run import build_parser; build_parser().format_help();"
    code += "assert TASKS and 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
