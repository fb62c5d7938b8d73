"""What policies that search share."""
