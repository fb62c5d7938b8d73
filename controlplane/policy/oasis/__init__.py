"""Online primal-dual admission: the worth of an end against the cost of its slots (OASiS)."""
