"""ones init: which losses of a script it takes for sums over the batch."""

from __future__ import annotations

import ast

import pytest

from controlplane.cli.init_script.remarks import summed_losses

# The lines before the loss, the loss, and whether it is a sum over the batch.
# `each` has one value for each sample, `total` is a sum, `other` is unknown.
LOSSES = [
    ("", 'F.cross_entropy(out, y, reduction="sum")', True),
    ("", "F.cross_entropy(out, y)", False),
    ("", 'F.cross_entropy(out, y, reduction="mean")', False),
    ("", 'F.cross_entropy(out, y, reduction="sum").float()', True),
    ("", 'nn.MSELoss(reduction="sum")(out, y)', True),
    ('criterion = nn.MSELoss(reduction="sum")', "criterion(out, y)", True),
    ('criterion = nn.MSELoss(reduction="sum")', "criterion(out, y) / len(y)", False),
    ('criterion = nn.MSELoss(reduction="none")', "criterion(out, y).sum()", True),
    ('criterion = partial(F.mse_loss, reduction="sum")', "criterion(out, y)", True),
    ('criterion = lambda a, b: F.mse_loss(a, b, reduction="sum")', "criterion(out, y)", True),
    ('if flag:\n    f = nn.MSELoss()\nelse:\n    f = nn.MSELoss(reduction="sum")', "f(out, y)", False),
    ("import F\nclass A:\n    def mse_loss(self):\n        return 0", 'F.mse_loss(a, y, reduction="sum")', True),
    ('kind = "sum"', "F.mse_loss(out, y, reduction=kind)", True),
    ("", "F.mse_loss(out, y, reduction=args.kind)", False),
    ("", "each.sum()", True),
    ("", "torch.sum(each)", True),
    ("", "each.sum() / len(x)", False),
    ("", "each.sum().div(len(x))", False),
    ("", "each.sum().div(2)", True),
    ("", "each.mean()", False),
    ("", "each.sum(1).mean()", False),
    ("", "each.sum(dim=(1, 2)).mean(0)", False),
    ("", "torch.sum(each, dim=1).mean()", False),
    ("", "each.sum(dim=1).sum()", True),
    ("", "each.sum(0)", True),
    ("", "(each * mask).sum()", False),
    ("", "(0.5 * each).sum()", True),
    ("", "other.sum()", False),
    ("", "other.sum() * 0.5", False),
    ("", "each.mean() + each.sum() * 0.5", True),
    ("", "each.mean() + 1e-4 * sum(p.abs().sum() for p in net.parameters())", False),
    ("", "0.5 * total", True),
    ("", "-total / 2", True),
    ("", "weight * total", False),
    ("", "total / accumulation_steps", False),
    ("", "(total + other) / x.size(0)", False),
    ("", "scaler.scale(total)", True),
    ("", "sum([total, other])", True),
    ("", "sum(F.mse_loss(a, b, reduction='sum') for a, b in heads)", True),
    ("", "total if flag else total + other", True),
    ("", "total if flag else other", False),
    ("loss = total\nloss /= len(x)", "loss", False),
    ("loss = total\nloss /= 8", "loss", True),
    ("loss = total\nloss = loss / len(x)", "loss", False),
    ("loss = other\nloss += total", "loss", True),
    ("loss = 0\nfor head in heads:\n    loss += F.mse_loss(head, y, reduction='sum')", "loss", True),
    ("loss = total\nif flag:\n    loss = loss / len(x)", "loss", False),
    ("loss = total\nif flag:\n    loss = loss + other", "loss", True),
    ("for head in heads:\n    loss = loss + other", "loss", False),
    ("for loss in [other]:\n    loss = loss + total", "loss", True),
    ("loss = total\nfor loss in parts:\n    pass", "loss", False),
    ("for n in rounds:\n    (loss / 1).backward()\n    loss = total", "other", True),
    ("", "(new := total)", True),
    ("", "each.sum(axis=1)", False),
    ("loss, more = total, other", "loss", True),
    ("losses = {'all': total, 'part': other}", "losses['part']", False),
    ("losses = {'all': total, 'part': other}", "losses['all']", True),
    ("def f(a):\n    return g(a)\ndef g(b):\n    return b + other", "f(total)", True),
    ("def f(a):\n    return g(a)\ndef g(b):\n    return b / len(x)", "f(total)", False),
    ("def f(a, b):\n    return a + b, a, b", "f(total, other)[0]", True),
    ("def f(a, how='sum'):\n    return F.mse_loss(a, y, reduction=how)", "f(out)", True),
    ("def f(a):\n    return f(a)", "f(total)", False),
    ("class L(nn.Module):\n    def forward(self, a):\n        return a.sum()\nl = L()", "l(each)", True),
]  # fmt: skip
KNOWN = """
each = F.mse_loss(out, y, reduction="none")
total = F.mse_loss(out, y, reduction="sum")
"""
VAE = """
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction='sum')
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD

def train(epoch):
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
"""
TRAINER = """
class Trainer:
    def __init__(self, model, criterion):
        self.criterion = criterion

    def loss(self, x, y):
        return self.criterion(self.model(x), y)

    def step(self, x, y):
        loss = self.loss(x, y)
        loss.backward()

def main():
    trainer = Trainer(Net(), nn.MSELoss(reduction="sum"))
"""
LIGHTNING = """
class Model(LightningModule):
    def training_step(self, batch):
        loss = F.mse_loss(self(batch), batch, reduction="sum")
        return {"log": 1, "loss": loss}
"""
TRANSFORMERS = """
class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        loss = F.mse_loss(outputs, inputs["y"], reduction="sum")
        return (loss, outputs) if return_outputs else loss
"""


@pytest.mark.parametrize(("before", "loss", "is_sum"), LOSSES)
def test_a_loss_is_a_sum_only_if_nothing_divides_it(
    before: str, loss: str, *, is_sum: bool
) -> None:
    tree = ast.parse(f"{KNOWN}\n{before}\n({loss}).backward()\n")

    assert bool([*summed_losses(tree)]) is is_sum


@pytest.mark.parametrize(
    ("script", "line"),
    [(VAE, 3), (TRAINER, 14), (LIGHTNING, 4), (TRANSFORMERS, 5)],
    ids=["vae", "trainer", "lightning", "transformers"],
)
def test_the_line_that_sums_is_found_through_functions_methods_and_parameters(
    script: str, line: int
) -> None:
    assert [*summed_losses(ast.parse(script))] == [line]
