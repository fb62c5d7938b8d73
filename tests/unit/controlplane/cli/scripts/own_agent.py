"""A script that calls something of its own `agent`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run():
    agent = "somebody"
    model = nn.Linear(4, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), 8, True)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        print(agent, epoch)


run()
