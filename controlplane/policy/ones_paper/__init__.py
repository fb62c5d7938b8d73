"""The scheduler of the ONES paper, with a switch for every sentence that can be read twice."""
