"""What a trained model of `harmony-drl` holds, and how it is taken out of its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from controlplane.policy.harmony_drl.gang_placement import STRUCTURE, Actor
from controlplane.policy.harmony_drl.reward_model import RewardModel
from controlplane.policy.learned.dense_net import dense_net, dense_shapes
from controlplane.policy.learned.model_file import (
    FIELD,
    LearnedModel,
    ModelCard,
    read_model,
    shipped_model,
)
from schemas.errors import SettingsError

POLICY: Final = "harmony-drl"
PACKAGE: Final = "controlplane.policy.harmony_drl"
FEATURES: Final = 1  # version of what the networks are shown
CLASSES: Final = 12  # L of the paper: those that were trained, and some for families of a cluster
HIDDEN: Final = 32
SHAPES: Final = {
    **dense_shapes("beside", [4 * CLASSES + 2, HIDDEN, 1]),
    **dense_shapes("spread", [CLASSES + 3, HIDDEN // 2, 1]),
    **dense_shapes("actor", [STRUCTURE + 2 * CLASSES, HIDDEN, 1]),
    "sharpness": (1,),
}


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Both networks of the paper, and whom they know."""

    reward: RewardModel
    actor: Actor
    families: tuple[str, ...]  # by number of their class, fewer than CLASSES


def load(file: str | None) -> TrainedModel:
    """A model from its file.

    Args:
        file: path; None: the one that ships.

    Raises:
        SettingsError: if it is none, or of another version, policy or shape.
    """
    return unpack(_read(file))


def load_card(file: str | None) -> ModelCard:
    """What made a model.

    Raises:
        SettingsError: as `load` does.
    """
    return _read(file).card


def unpack(model: LearnedModel) -> TrainedModel:
    """Its networks.

    Raises:
        SettingsError: if its card names families that cannot have numbers.
    """
    arrays, families = model.arrays, model.card.families
    if len(families) >= CLASSES:
        raise _refusal(f"{len(families)} families, {CLASSES - 1} are the most")
    for name in families:
        if families.count(name) > 1:
            raise _refusal(f"family {name!r} twice")
    reward = RewardModel(dense_net("beside", arrays), dense_net("spread", arrays), CLASSES)
    actor = Actor(dense_net("actor", arrays), float(arrays["sharpness"][0]))
    return TrainedModel(reward, actor, families)


def _read(file: str | None) -> LearnedModel:
    if file is not None:
        return read_model(file, policy=POLICY, features=FEATURES, shapes=SHAPES)
    return shipped_model(PACKAGE, "model.npz", policy=POLICY, features=FEATURES, shapes=SHAPES)


def _refusal(what: str) -> SettingsError:
    return SettingsError(f"{FIELD}: a model with {what}", "train another one", FIELD)
