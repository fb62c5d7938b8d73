"""Online primal-dual admission: what an end is worth against what its slots cost (OASiS)."""
