"""Analysis of results: figures, bounds, comparisons, tables, plots."""
