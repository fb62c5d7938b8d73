"""Jobs that share a node slow each other down: rules, what jobs demand, and what was measured."""
