"""Settings, logging, files and archives, which every process of a host needs."""
