"""Fine-tune a backbone: small passes that add up, mixed precision, a rate for each part."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from backbone import Classifier, load_images, pretrained
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=64)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
BACKBONE_LR, HEAD_LR = 2e-4, 2e-3
PASS = 16  # samples that fit the device at once


def build_model() -> nn.Module:
    """A new head on the backbone that is made once."""
    return Classifier(pretrained(Path("backbone.pt")))


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW: the backbone's last stage slowly, the head ten times as fast."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    parts = [{"params": trained[:-2], "lr": BACKBONE_LR}, {"params": trained[-2:], "lr": HEAD_LR}]
    return torch.optim.AdamW(parts, weight_decay=0.01)


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> tuple[float, float]:
    """Loss, and the share of test images that are recognised."""
    model.eval()
    images, labels = next(iter(DataLoader(test_set, batch_size=len(test_set))))
    scores, labels = model(images.to(device)), labels.to(device)
    model.train()
    right = (scores.argmax(dim=1) == labels).float().mean()
    return cross_entropy(scores, labels).item(), right.item()


args = parser.parse_args()
torch.manual_seed(args.seed)
data, test_set = load_images(known=False)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = build_model().to(device)
optimizer = build_optimizer(model.parameters())
loader = DataLoader(data, batch_size=PASS, shuffle=True)
passes = args.batch // PASS
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
narrow = torch.float16 if device.type == "cuda" else torch.bfloat16
model.train()
for epoch in range(args.epochs):
    for place, (images, labels) in enumerate(loader, start=1):
        with torch.autocast(device.type, narrow):
            loss = cross_entropy(model(images.to(device)), labels.to(device)) / passes
        scaler.scale(loss).backward()
        if place % passes == 0 or place == len(loader):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    schedule.step()
    loss, accuracy = evaluate(model, test_set)
    print(f"epoch {epoch + 1:2}  test loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)
