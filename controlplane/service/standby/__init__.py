"""Standby controller: the lease, the copy of the journal and of the files, and the takeover."""
