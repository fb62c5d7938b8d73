"""Live shell around the core, which receives messages, writes the journal, and sends replies."""
