"""Where training stands in its stream of samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.samples.sample_stream import SampleStream


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """What is done of a job: a value, the same on every worker behind the same step."""

    epoch: int = 1  # the running one, 1-based
    cursor: int = 0  # samples of it that are done
    step: int = 0  # steps that are done, of all epochs
    samples_done: int = 0  # of all epochs
    epoch_step: int = 0  # steps of the running epoch that are done

    def after_step(self, step: int, cursor: int) -> TrainingPosition:
        """The same epoch, behind one more step.

        Args:
            cursor: samples of the epoch that are done with it.
        """
        done = self.samples_done + cursor - self.cursor
        within = self.epoch_step + 1
        return replace(self, step=step, cursor=cursor, samples_done=done, epoch_step=within)

    def next_epoch(self) -> TrainingPosition:
        """The beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, cursor=0, epoch_step=0)

    def advanced(self, steps: int, batch: int, stream: SampleStream) -> TrainingPosition:
        """Where training stands `steps` steps of `batch` samples further on.

        Args:
            batch: global, samples per step.
            stream: says how the last step of an epoch is.
        """
        epoch, cursor, done, within = self.epoch, self.cursor, self.samples_done, self.epoch_step
        for _ in range(steps):
            if not stream.taken(cursor, batch):
                epoch, cursor, within = epoch + 1, 0, 0
            taken = stream.taken(cursor, batch)
            cursor, done, within = cursor + taken, done + taken, within + 1
        if not stream.taken(cursor, batch):
            epoch, cursor, within = epoch + 1, 0, 0
        return TrainingPosition(epoch, cursor, self.step + steps, done, within)
