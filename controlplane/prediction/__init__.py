"""Models of speed and remaining work: numbers in, numbers out."""
