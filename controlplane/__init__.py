"""Controller of a cluster: slots and batches of jobs, their history, and the interfaces to both."""
