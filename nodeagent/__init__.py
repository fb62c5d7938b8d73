"""The agent on every node: runs what the controller wants, and outlives neither more nor less."""
