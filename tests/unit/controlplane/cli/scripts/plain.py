"""Everything at the level of the script, numbers as constants."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 16
EPOCHS = 3

torch.manual_seed(0)
inputs = torch.randn(160, 8)
train_set = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(EPOCHS):
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
