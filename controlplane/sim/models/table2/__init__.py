"""The 50 workloads of the paper's Table 2 on V100-like nodes of four (ONES sections 4.1, 4.2)."""
