"""The phases of a run: parts with their own data, sizes, rate or schedule; weights, optimizer and step go on.

BERT's two phases, sequences of 128 then 512 tokens (https://arxiv.org/abs/1810.04805, appendix A.2), with one decay over
both; LAMB's, each with its own warm-up and decay (https://arxiv.org/abs/1904.00962); a batch-size warm-up, as phases on the
same data, whose stream of examples goes on without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import TrainConfig
from pretrain.schedule import learning_rate, rate_in_time


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps `start + 1` to `end` of a run.

    Attributes:
        number: from 1.
        config: the run's, with this phase's data, sizes, rate and schedule.
        own_schedule: warm-up and decay count this phase's updates alone.
        continues_data: the examples go on where the phase before left them.
    """

    number: int
    start: int
    end: int
    config: TrainConfig
    own_schedule: bool
    continues_data: bool

    def rate(self, step: int, *, skipped: int, skipped_before: int, seconds_used: float = 0.0) -> float:
        """The learning rate of a step.

        Args:
            step: of the run, from 1.
            skipped: steps of the run so far whose gradient was not finite.
            skipped_before: of these, those before this phase.
            seconds_used: of the time budget, where there is one.
        """
        config = self.config
        if config.schedule.budget_hours:
            return rate_in_time(seconds_used, peak=config.optimizer.lr, schedule=config.schedule)
        update, total = step - skipped, config.train.steps
        if self.own_schedule:
            update, total = step - self.start - (skipped - skipped_before), self.end - self.start
        return learning_rate(update, peak=config.optimizer.lr, total_steps=total, schedule=config.schedule)


def phases_of(config: TrainConfig) -> list[Phase]:
    """The phases of a configuration; where `[[phases]]` is empty one: the whole run, or what follows another run."""
    if not config.phases:
        start, end = config.schedule.start_step, config.train.steps
        return [Phase(number=1, start=start, end=end, config=config, own_schedule=start > 0, continues_data=True)]
    found: list[Phase] = []
    for number, part in enumerate(config.phases, start=1):
        start = found[-1].end if found else 0
        sizes = {"global_batch": part.global_batch, "micro_batch": part.micro_batch}
        table = config.model_copy(
            update={
                "phases": [],
                "train": config.train.model_copy(update={key: size for key, size in sizes.items() if size}),
                "data": config.data.model_copy(update={"dir": part.data_dir} if part.data_dir else {}),
                "optimizer": config.optimizer.model_copy(update={"lr": part.lr} if part.lr else {}),
                "schedule": part.schedule or config.schedule,
            }
        )
        found.append(
            Phase(
                number=number,
                start=start,
                end=start + part.steps,
                config=table,
                own_schedule=part.schedule is not None,
                continues_data=bool(found) and found[-1].config.data.dir == table.data.dir,
            )
        )
    return found


def phase_at(phases: list[Phase], step: int) -> Phase:
    """The phase that takes the step after `step`; the last one where the run is over."""
    return next((phase for phase in phases if step < phase.end), phases[-1])
