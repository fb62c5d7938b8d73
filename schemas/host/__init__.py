"""Services that every process of a host needs: settings, logging, files and archives."""
