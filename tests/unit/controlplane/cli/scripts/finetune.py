"""A model whose head is replaced and whose body is frozen; only what is left is trained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.fc = nn.Linear(16, 1000)

    def forward(self, x):
        return self.fc(torch.relu(self.body(x)))


def main(batch_size: int = 20, epochs: int = 2, learning_rate: float = 0.01) -> None:
    inputs = torch.randn(100, 8)
    train_loader = DataLoader(
        TensorDataset(inputs, (inputs[:, 0] > 0).long()),
        batch_size=batch_size,
        shuffle=True,  # as ever
    )
    model = Backbone()
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.fc = nn.Linear(16, 2)
    model = model.cuda() if torch.cuda.is_available() else model
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(
        filter(lambda p: p.requires_grad, model.parameters()),
        lr=learning_rate,
    )
    for epoch in range(epochs):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()


main()
