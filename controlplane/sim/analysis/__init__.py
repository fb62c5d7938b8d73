"""What a simulation amounts to: figures, bounds, comparisons, tables, pictures."""
