"""What a live cluster went through, to be replayed under another policy."""

from controlplane.sim.recording.export import recorded
from controlplane.sim.recording.file import read, write
from controlplane.sim.recording.model import Epoch, Family, Recording, Submission, Took

__all__ = ["Epoch", "Family", "Recording", "Submission", "Took", "read", "recorded", "write"]
