"""The loader comes last, a schedule counts its batches, and the loop is in a function of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG_LR = 0.1


def fit(model, batches, optimizer, scheduler, epochs=3):
    for epoch in range(epochs):
        total = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        print(epoch, total)


if __name__ == "__main__":
    net = nn.Linear(8, 1)
    print("parameters:", sum(p.numel() for p in net.parameters()))
    opt = torch.optim.SGD(net.parameters(), lr=CONFIG_LR)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    batches = DataLoader(dataset=data, batch_size=12, shuffle=True, drop_last=True)
    steps = len(batches) * 3
    schedule = torch.optim.lr_scheduler.LinearLR(opt, total_iters=steps)
    fit(net, batches, opt, schedule)
