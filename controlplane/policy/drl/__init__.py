"""Job sizes by a policy network, after Chic and DL2: the DRL baseline of the ONES paper."""
