"""From what a policy decides to a plan: what may be given out, which slots, with which reasons."""
