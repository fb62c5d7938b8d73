"""Train a small vision transformer on scikit-learn's digits with Accelerate."""

import torch
from accelerate import Accelerator
from dataset import load_split
from model import DigitsTransformer
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

EPOCHS = 30
WARM_UP = 60  # steps

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
train_set, test_set = load_split()
model = DigitsTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
loader = DataLoader(train_set, batch_size=32, shuffle=True)
held_out = DataLoader(test_set, batch_size=256)
steps = EPOCHS * -(-len(loader) // 2)
scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / steps))
model, optimizer, loader, held_out, scheduler = accelerator.prepare(
    model, optimizer, loader, held_out, scheduler
)
for epoch in range(EPOCHS):
    model.train()
    for images, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(images), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for images, labels in held_out:
        with torch.no_grad():
            predicted = model(images).argmax(dim=1)
        found, wanted = accelerator.gather_for_metrics((predicted, labels))
        right += int((found == wanted).sum())
    accuracy = right / len(test_set)
    accelerator.print(f"epoch {epoch + 1:2}  accuracy {accuracy:.4f}", flush=True)
