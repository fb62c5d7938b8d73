"""Live shell around the core: it receives messages, writes the journal, and sends the replies."""
