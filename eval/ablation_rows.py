"""The ablations of the BERT paper as data (configs/ablations/tables.toml), and the commands that each row needs."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from data_pipeline.config import ConfigError, StrictModel, validate
from eval.tasks import TASKS

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "ablations"
TABLES = FOLDER / "tables.toml"
HELD_OUT = "held-out"
"""In place of a task: a number of the last validation of the pretraining."""

Size = Literal["small", "base"]


class Row(StrictModel):
    """One model of a table.

    Attributes:
        run: folder of its pretraining; rows with the same settings share it.
        set: `table.key=value` that the row changes in the size's configuration; `small` and `base`: in one size only.
        bilstm: layers of a BiLSTM that fine-tuning puts on top.
        paper: the paper's number of each column.
    """

    name: str
    run: str
    set: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    bilstm: int = 0
    paper: tuple[float, ...]

    def settings(self, size: Size) -> tuple[str, ...]:
        """What the row changes in this size."""
        return (*self.set, *(self.small if size == "small" else self.base))


class Table(StrictModel):
    """One table of the paper.

    Attributes:
        columns: "TASK SPLIT METRIC", or "held-out KEY" of the pretraining's metrics.
    """

    name: str
    title: str
    source: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the columns."""
        return tuple(dict.fromkeys(word for word in (column.split()[0] for column in self.columns) if word != HELD_OUT))

    @model_validator(mode="after")
    def _fits(self) -> Table:
        for row in self.rows:
            if len(row.paper) != len(self.columns):
                raise ValueError(f"row {row.name!r} has {len(row.paper)} numbers for {len(self.columns)} columns")
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise ValueError(f"table {self.name!r}: unknown tasks {unknown}")
        return self


class _File(StrictModel):
    tables: tuple[Table, ...]

    @model_validator(mode="after")
    def _runs_agree(self) -> _File:
        known: dict[str, Row] = {}
        for row in (row for table in self.tables for row in table.rows):
            first = known.setdefault(row.run, row)
            if any(first.settings(size) != row.settings(size) for size in ("small", "base")):
                raise ValueError(f"rows {first.name!r} and {row.name!r} share run {row.run!r} but not their settings")
        return self


def load_tables(path: Path = TABLES) -> tuple[Table, ...]:
    """All tables of the file.

    Raises:
        ConfigError: missing, not TOML, or rows that do not fit their table.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return validate(_File, tree, path).tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a run of the ablations has beside its rows.

    Attributes:
        config: of the size.
        root: folder with the data and a folder for each run.
        overrides: `table.key=value` below those of the rows.
        tasks: to fine-tune on; empty: those of the table's columns.
        data: folder with the tasks' files.
        evaluation: further options of `eval.run`.
        launcher: words that start pretraining, before the script.
    """

    size: Size
    config: Path
    root: Path
    data: Path
    overrides: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()

    def run_settings(self, row: Row) -> list[str]:
        """Everything that is set for a row: the user's, the row's, and where it all lies."""
        own = row.settings(self.size)
        masks = any(setting.startswith("data.") for setting in own)
        folder = self.root / (f"data-{row.run}" if masks else "data")
        shared = [f"data.tokens_from={self.root / 'data'}"] if masks else []
        places = [f"data.dir={folder}", f"run.dir={self.root / row.run / 'pretrain'}", f"run.name={row.run}"]
        return [*self.overrides, *own, *shared, *places]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command of a chain.

    Attributes:
        kind: "data" and "pretraining" need not be run for a row whose pretraining is complete.
    """

    kind: Literal["data", "pretraining", "evaluation"]
    what: str
    command: tuple[str, ...]


def steps(setup: Setup, tables: Sequence[Table]) -> list[tuple[Row, Step]]:
    """All commands in an order that works, each once; every one goes on where it was stopped.

    Rows that share a pretraining share its commands; the tokens of the first data set serve all.
    """
    python = sys.executable
    found: dict[tuple[str, ...], tuple[Row, Step]] = {}

    def add(row: Row, kind: Literal["data", "pretraining", "evaluation"], what: str, *command: str) -> None:
        found.setdefault(command, (row, Step(kind=kind, what=what, command=command)))

    for table in tables:
        for row in table.rows:
            settings = [word for setting in setup.run_settings(row) for word in ("--set", setting)]
            config = ("--config", str(setup.config))
            shared = [*setup.overrides, f"data.dir={setup.root / 'data'}"]
            words = [word for setting in shared for word in ("--set", setting)]
            add(row, "data", "shared data", python, "-m", "data_pipeline.build", *config, *words)
            if any(setting.startswith("data.tokens_from=") for setting in settings):
                words = [word for setting in setup.run_settings(row) for word in ("--set", setting)]
                add(row, "data", f"data of {row.run}", python, "-m", "data_pipeline.build", *config, *words)
            add(row, "pretraining", f"pretraining {row.run}", *setup.launcher, "pretrain/run.py", *config, *settings)
            model = ("--model", str(setup.root / row.run / "pretrain"), "--output", str(setup.root / row.run / "eval"))
            tasks = ("--tasks", *(setup.tasks or table.tasks), "--data", str(setup.data))
            more = ("--bilstm", str(row.bilstm)) if row.bilstm else ()
            what = f"evaluation {row.run}" + (" + BiLSTM" if row.bilstm else "")
            add(row, "evaluation", what, python, "-m", "eval.run", *model, *tasks, *more, *setup.evaluation)
    return list(found.values())
