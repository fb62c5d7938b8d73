"""The network, so that `plain.py` and `train.py` differ only in how they train it."""

from torch import Tensor, nn


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a 3x3 convolution that keeps the image size, batch normalisation, ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class DigitsNet(nn.Module):
    """Two stages of two convolutions each, then a linear classifier on the pooled features."""

    def __init__(self, width: int = 96, classes: int = 10) -> None:
        """Build a first stage of `width` channels and a second of twice as many."""
        super().__init__()
        self.features = nn.Sequential(
            conv_block(1, width),
            conv_block(width, width),
            nn.MaxPool2d(2),
            conv_block(width, 2 * width),
            conv_block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to class scores (N, classes)."""
        return self.classifier(self.dropout(self.features(images)))
