"""Train an autoencoder on scikit-learn's digits with Lightning."""

from dataset import load_split
from elastic.lightning import ElasticStrategy
from lightning.pytorch import Trainer, seed_everything
from model import DigitsAutoencoder
from torch.utils.data import DataLoader

EPOCHS = 120

seed_everything(0)
train_set, test_set = load_split()
module = DigitsAutoencoder()
loader = DataLoader(train_set, batch_size=64, shuffle=True)
held_out = DataLoader(test_set, batch_size=450)
trainer = Trainer(
    strategy=ElasticStrategy(),
    max_epochs=EPOCHS,
    devices=1,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, loader, held_out)
print(f"error {trainer.callback_metrics['error']:.4f}", flush=True)
