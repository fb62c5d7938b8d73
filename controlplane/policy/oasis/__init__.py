"""Online primal-dual admission: the value of a job against the cost of its slots (OASiS)."""
