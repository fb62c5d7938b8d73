"""Model selection by model hopping: search, visits, stored states (Cerebro)."""
