"""Two networks that train against each other."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

real_label, fake_label = 1.0, 0.0
dataset = TensorDataset(torch.randn(64, 4))
dataloader = DataLoader(dataset, batch_size=16, shuffle=True)
netG = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
netD = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for epoch in range(2):
    for (data,) in dataloader:
        netD.zero_grad()
        criterion(netD(data), torch.full((len(data), 1), real_label)).backward()
        fake = netG(torch.randn(len(data), 2))
        criterion(netD(fake.detach()), torch.full((len(data), 1), fake_label)).backward()
        optimizerD.step()
        netG.zero_grad()
        criterion(netD(fake), torch.full((len(data), 1), real_label)).backward()
        optimizerG.step()
