"""Train an image classifier: augmentation, a schedule, evaluation, checkpoints."""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, Dataset, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=24)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("checkpoints"))
parser.add_argument("--resume", type=Path, help="checkpoint to go on from")


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Digits that lie up to a pixel away from their place, another way every time."""

    def __init__(self, digits: TensorDataset) -> None:
        self.digits = digits

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """An image (1, 8, 8) and its label."""
        image, label = self.digits[index]
        down, right = torch.randint(3, (2,)).tolist()
        return pad(image, (1, 1, 1, 1), value=-1.0)[:, down : down + 8, right : right + 8], label


class Classifier(nn.Module):
    """Three convolutions with batch normalisation; keeps its best accuracy beside its weights."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, width), (width, width), (width, 2 * width)):
            convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        pooled = nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.layers = nn.Sequential(*layers, pooled, nn.Dropout(0.2), nn.Linear(8 * width, 10))
        self.register_buffer("best", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to class scores (N, 10)."""
        return self.layers(images)


def load_split() -> tuple[Dataset[tuple[Tensor, Tensor]], TensorDataset]:
    """Images (1, 8, 8) in [-1, 1] and labels: to train on, and to test on."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    split = train_test_split(images, torch.tensor(labels), stratify=labels, random_state=0)
    return Shifted(TensorDataset(split[0], split[2])), TensorDataset(split[1], split[3])


def build_optimizer(parameters: object) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> float:
    """The share of test images that are recognised."""
    model.eval()
    hits = 0
    for images, labels in DataLoader(test_set, batch_size=256):
        hits += int((model(images.to(device)).argmax(dim=1) == labels.to(device)).sum())
    model.train()
    return hits / len(test_set)


def save(path: Path, epoch: int) -> None:
    """Keep all that it takes to go on behind `epoch`."""
    path.parent.mkdir(exist_ok=True)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, path)


def load(path: Path) -> int:
    """Go on from what `save` kept; the epoch that comes next."""
    kept = torch.load(path, weights_only=True)
    for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
        part.load_state_dict(kept[name])
    return int(kept["epoch"]) + 1


args = parser.parse_args()
torch.manual_seed(args.seed)
train_set, test_set = load_split()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Classifier().to(device)
optimizer = build_optimizer(model.parameters())
loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
start = load(args.resume) if args.resume else 0
for epoch in range(start, args.epochs):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
    scheduler.step()
    accuracy = evaluate(model, test_set)
    better = accuracy > model.best.item()
    model.best.fill_(max(accuracy, model.best.item()))
    print(f"epoch {epoch + 1:2}  loss {loss.item():.3f}  accuracy {accuracy:.4f}", flush=True)
    save(args.out / "last.pt", epoch)
    if better:
        save(args.out / "best.pt", epoch)
