"""The module, so that `plain.py` and `train.py` differ only in how they train it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss


class DigitsAutoencoder(LightningModule):
    """Squeezes images of 8 x 8 pixels into a few numbers and draws them again."""

    def __init__(self, code: int = 8, width: int = 256, lr: float = 2e-3) -> None:
        """Build encoder and decoder with `width` units, around a code of `code` numbers."""
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.GELU(), nn.Linear(width, 64), nn.Unflatten(1, (1, 8, 8))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Draw images (N, 1, 8, 8) again."""
        return self.decoder(self.encoder(images))

    def training_step(self, batch: Any, _: int) -> Tensor:
        """Return the reconstruction error of the images."""
        images, _labels = batch
        loss = mse_loss(self(images), images)
        self.log("train_error", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        """Log the reconstruction error of held-out images."""
        images, _labels = batch
        self.log("error", mse_loss(self(images), images), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, whose rate falls to nothing along a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
