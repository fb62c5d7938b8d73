"""How much work jobs have left, and how far such predictions can be trusted."""
