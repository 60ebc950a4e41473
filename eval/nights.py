"""The history of nightly evaluations, and what is said of a new one beside it: a regression only beyond the noise of seeds."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.artefacts import write_text
from eval.results import IDENTITY

FILE = "nights.jsonl"
SIGNIFICANCE = 0.01
"""A drop is a regression where seeds alone would give one as large in fewer than this share of nights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric of one split over the seeds.

    Attributes:
        identity: hash of what must be equal for two scores to be compared: task version, recipe, data, but not the model.
        mean: fraction, over the seeds with a finite score; None where there is none.
        sd: standard deviation over the seeds; None with fewer than two.
        n, left_out: seeds with and without a score.
        examples: of the split.
        headline: whether it is judged.
    """

    task: str
    label: str
    split: str
    metric: str
    identity: str
    mean: float | None
    sd: float | None
    n: int
    left_out: int
    examples: int
    headline: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is a score of."""
        return self.label, self.split, self.metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """One checkpoint's evaluation.

    Attributes:
        time: when it ended, UTC.
        run: name of the pretraining.
        step, weights: of the checkpoint; sha256.
        settings: hash of what was asked for.
        held_out: the validation line of the step.
        version: of the registered model; empty where it was not registered.
        problems: what did not work, in words.
    """

    time: str
    run: str
    step: int
    weights: str
    settings: str
    scores: tuple[Score, ...]
    held_out: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    problems: tuple[str, ...] = ()


def read_nights(folder: Path) -> list[Night]:
    """All nights in the order of their ends; lines that are not whole are left out."""
    path = folder / FILE
    nights = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
            scores = tuple(Score(**score) for score in entry.pop("scores"))
            nights.append(Night(**entry | {"problems": tuple(entry["problems"])}, scores=scores))
        except (ValueError, KeyError, TypeError):
            continue
    return nights


def add_night(folder: Path, night: Night) -> None:
    """Append one night; the file is replaced as a whole, so that it never holds half a line."""
    path = folder / FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    before += "" if before.endswith("\n") or not before else "\n"
    write_text(path, before + json.dumps(asdict(night), allow_nan=False) + "\n")


def scores_of(groups: Sequence[Mapping[str, Any]], label: Any) -> tuple[Score, ...]:
    """The scores of `results.json`.

    Args:
        groups: its results.
        label: a function from a group to the name that it is shown under.
    """
    found = []
    for group in groups:
        kept = {key: group[key] for key in IDENTITY if key in group and key not in ("model", "tokenizer", "seed")}
        identity = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
        for split, scores in group["splits"].items():
            for metric, summary in scores["metrics"].items():
                found.append(
                    Score(
                        task=group["task"],
                        label=label(group),
                        split=split,
                        metric=metric,
                        identity=identity,
                        mean=summary["mean"],
                        sd=summary["sd"],
                        n=summary["n"],
                        left_out=summary["left_out"],
                        examples=scores["n"],
                        headline=metric == group["headline"]["metric"],
                    )
                )
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A score beside its history.

    Attributes:
        before: the score of the night before, if it can be compared.
        best: the best finite mean of earlier nights that can be compared, and its step.
        regression: why it is one; empty where it is none.
        judged: whether the noise was known.
    """

    score: Score
    before: Score | None
    best: tuple[float, int] | None
    regression: str
    judged: bool


def judge(night: Night, earlier: Sequence[Night]) -> list[Verdict]:
    """Each score of a night beside those of earlier nights of the same run."""
    verdicts = []
    for score in night.scores:
        same = [
            (past, old)
            for past in earlier
            if past.run == night.run
            for old in past.scores
            if old.key == score.key and old.identity == score.identity
        ]
        before = same[-1][1] if same else None
        finite = [(old.mean, past.step) for past, old in same if old.mean is not None and math.isfinite(old.mean)]
        regression = "" if before is None or not score.headline else regression_of(score, before)
        verdicts.append(
            Verdict(
                score=score,
                before=before,
                best=max(finite, key=lambda pair: pair[0], default=None),
                regression=regression,
                judged=before is not None and standard_error(score, before) is not None,
            )
        )
    return verdicts


def standard_error(one: Score, two: Score) -> tuple[float, float] | None:
    """Standard error of the difference of two means, and its degrees of freedom (Welch, 1947); None where no seed was
    repeated on either side.

    Where only one side has several seeds, its deviation is taken for both. The error is never below one example: equal
    scores of all seeds do not make the next example significant.
    """
    sides = [(score.sd, score.n) for score in (one, two) if score.sd is not None and score.n > 1]
    if not sides or one.n < 1 or two.n < 1:
        return None
    if len(sides) == 2:
        parts = [sd**2 / n for sd, n in sides]
        spread = sum(part**2 / (n - 1) for part, (_, n) in zip(parts, sides, strict=True))
        freedom = sum(parts) ** 2 / spread if spread else 1.0
    else:
        deviation, n = sides[0]
        parts, freedom = [deviation**2 / one.n, deviation**2 / two.n], n - 1.0
    error, floor = math.sqrt(sum(parts)), 1 / max(1, min(one.examples, two.examples))
    return (error, freedom) if error > floor else (floor, float(sum(n - 1 for _, n in sides)))


def regression_of(score: Score, before: Score) -> str:
    """Why the score is worse than the one before beyond the noise of seeds; empty where it is not, or nobody can know."""
    if before.mean is None or not math.isfinite(before.mean):
        return ""
    if score.mean is None or not math.isfinite(score.mean):
        return f"no score any more, {100 * before.mean:.2f} the night before"
    error = standard_error(score, before)
    drop = before.mean - score.mean
    if error is None or drop <= 0:
        return ""
    from scipy.stats import t

    chance = float(t.sf(drop / error[0], error[1]))
    if chance >= SIGNIFICANCE:
        return ""
    return (
        f"{100 * score.mean:.2f}, {100 * drop:.2f} below the night before; the seeds' standard error is "
        f"{100 * error[0]:.2f} (p = {chance:.1g})"
    )
