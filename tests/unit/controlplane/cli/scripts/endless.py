"""No loader, no loop over epochs, an optimizer of its own kind."""

import torch
from torch import nn

from mylib import Shampoo

model = nn.Linear(4, 1)
optimizer = Shampoo(model.parameters(), lr=0.1)
step = 0
while step < 100:
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    step += 1
