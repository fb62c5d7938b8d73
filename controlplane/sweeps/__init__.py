"""Model selection by model hopping: what to train, where next, what to keep (Cerebro)."""
