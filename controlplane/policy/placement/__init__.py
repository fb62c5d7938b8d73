"""The steps from a policy's decisions to a plan: free slots, placement and reasons."""
